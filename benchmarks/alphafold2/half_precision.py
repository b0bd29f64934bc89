"""How far is float16 from failing? One training step of AlphaFold2, looked at block by block.

    python -m benchmarks.alphafold2.half_precision STORE --trained RUN [--openfold]

One sample, its full crop, 3 recyclings, dropout and all losses, in float32, bfloat16 and float16,
this one also with a scaled loss, with the weights of a run (else drawn). What every block returns
in all passes, and its gradient, are compared with the range of float16; gradients of weights with
those of float32. What is not finite is named by the module that returned it first. OpenFold's step
is its own source with our weights, under autocast.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.alphafold2 import openfold, train_step
from benchmarks.common.arguments import add_out, script_parser
from benchmarks.common.arms import first_batch, free, set_policy
from benchmarks.common.report import add_picture, write_result
from torch import Tensor, nn

from bevatron import kernels
from bevatron.data.proteins.chain_batch import ChainBatch
from bevatron.models.alphafold2 import load_model
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.alphafold2.task import AlphaFold2Task
from bevatron.models.common.folding import OuterProductMean, TriangleMultiplication
from bevatron.recipes.kinds import newest_model
from bevatron.train.report import plots
from bevatron.train.report.plots import Curve, Panel

LARGEST = float(torch.finfo(torch.float16).max)
LOST = 2.0**-25
"""Half of float16's smallest number: what is smaller becomes 0."""
IN_RANGE = {"inf": 1e4, "eps": 1e-4}
"""For what OpenFold takes from masked logits, 1e5 and 1e9, and adds to a count of rows, 1e-8: both
are beyond float16. The first is replaced, then the second, too."""
PARTS = {"inf": "masks of 1e4", "eps": "masks of 1e4, 1e-4 added to counts"}
TYPES = {None: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
CASES: tuple[tuple[torch.dtype | None, int], ...] = (
    (None, 1),
    (torch.bfloat16, 1),
    (torch.float16, 1),
    (torch.float16, 2**10),
    (torch.float16, 2**16),
)
"""Type of activations, and what the loss is multiplied with before the backward pass."""


class Watch:
    """What the modules of a model return in a step, and the gradients of what its blocks return."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: list[tuple[str, Tensor]] = []
        self.gradients: list[tuple[str, Tensor]] = []
        self.inside: list[tuple[str, Tensor]] = []
        self._handles = [
            module.register_forward_hook(self._hook(name, module))
            for name, module in model.named_modules()
            if name
        ]

    def close(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str, module: nn.Module) -> Callable[..., None]:
        is_block = name.split(".")[-2:-1] == ["blocks"]

        def look(_: nn.Module, given: tuple[Any, ...], found: Any) -> None:
            parts = [x for x in tensors(found) if x.is_floating_point()]
            for part, x in zip("mz", parts, strict=False):
                self.outputs.append((f"{name} {part}" if is_block else name, largest(x)))
                if is_block and x.requires_grad:
                    x.register_hook(self._gradient(f"{name} {part}"))
            kind = module_kind(module)
            if kind and parts and parts[0].dtype == torch.float32:
                with torch.no_grad():
                    self.inside.append((kind, largest(INSIDE[kind](module, given[0]))))

        return look

    def _gradient(self, name: str) -> Callable[[Tensor], None]:
        def look(g: Tensor) -> None:
            size, seen = g.float().abs(), g != 0
            small = (seen & (size < LOST)).sum() / seen.sum().clamp(min=1)
            row = torch.stack([largest(g), seen.float().mean(), small, size.square().mean().sqrt()])
            self.gradients.append((name, row))

        return look


def tensors(found: Any) -> Iterator[Tensor]:
    """Yield the tensors of what a module returns."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        yield from (x for value in found.values() for x in tensors(value))
    elif isinstance(found, tuple | list):
        yield from (x for value in found for x in tensors(value))


def largest(x: Tensor) -> Tensor:
    """Return the largest size of a number; not finite if any is not."""
    return x.detach().abs().amax().float()


def of_triangles(module: Any, z: Tensor) -> Tensor:
    """Compute the sums over triangles, which a norm follows."""
    n = module.norm_in(z)
    a, b = (gate(n).sigmoid() * layer(n) for gate, layer in
            ((module.a_gate, module.a), (module.b_gate, module.b)))  # fmt: skip
    return torch.einsum(
        "...ikc,...jkc->...ijc" if module.outgoing else "...kic,...kjc->...ijc", a, b
    )


def of_rows(module: Any, m: Tensor) -> Tensor:
    """Compute the sums over rows of the alignment, before their division."""
    n = module.norm(m)
    return torch.einsum("...sic,...sjd->...ijcd", module.a(n), module.b(n))


INSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "triangle multiplication": of_triangles,
    "outer product": of_rows,
}


def module_kind(module: nn.Module) -> str:
    """Return the name of what is summed inside a module."""
    kinds = {TriangleMultiplication: "triangle multiplication", OuterProductMean: "outer product"}
    return kinds.get(type(module), "")  # type: ignore[call-overload,no-any-return]


@contextmanager
def watched(model: nn.Module) -> Iterator[Watch]:
    """Watch a model for the length of a ``with`` block."""
    watch = Watch(model)
    try:
        yield watch
    finally:
        watch.close()


def looked_at(
    model: nn.Module, loss_of: Callable[[], Tensor], scale: int, exact: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Compute a step; return its row, what blocks returned, and the gradients of weights."""
    free()
    with watched(model) as watch:
        loss = loss_of()
        (loss * scale).backward()
    gradients = {n: p.grad / scale for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    outputs, inside = largest_of(watch.outputs), largest_of(watch.inside)
    blocks = {name: each.tolist() for name, each in watch.gradients}
    stacks = [name for name in outputs if name.endswith((" m", " z"))]
    top = max(stacks, key=lambda name: np.nan_to_num(outputs[name], nan=np.inf))
    row: dict[str, Any] = {
        "loss": float(loss.detach()),
        "largest activation": outputs[top],
        "of block": top,
    }
    if blocks:  # none where losses that are not finite are left out
        each = np.array([*blocks.values()])
        row["largest gradient of a block"] = float(each[:, 0].max())
        row["gradients of blocks too small %"] = 100 * float(each[:, 2].mean())
        row["gradients of blocks 0 %"] = 100 * float(1 - each[:, 1].mean())
    if exact:
        row |= compared(gradients, exact)
    row["not finite first"] = first_not_finite(watch.outputs, blocks, gradients)
    profile = {"outputs": {name: outputs[name] for name in stacks}, "gradients": blocks}
    return row | inside, profile, gradients


def largest_of(found: Sequence[tuple[str, Tensor]]) -> dict[str, float]:
    """Return the largest of each name over all passes; nan if any is."""
    whole: dict[str, float] = {}
    values = torch.stack([x for _, x in found]).tolist() if found else []
    for (name, _), value in zip(found, values, strict=True):
        whole[name] = float(np.maximum(whole.get(name, 0.0), value))
    return whole


def first_not_finite(
    outputs: Sequence[tuple[str, Tensor]],
    blocks: Mapping[str, Any],
    gradients: Mapping[str, Tensor],
) -> str:
    """Name the first module whose output, else gradient, is not finite."""
    for name, value in outputs:
        if not bool(value.isfinite()):
            return name
    for name, each in blocks.items():
        if not np.isfinite(each[0]):
            return f"gradient of {name}"
    wrong = [name for name, g in gradients.items() if not bool(g.isfinite().all())]
    return f"gradients of {len(wrong)} weights, {wrong[-1]} among them" if wrong else ""


def compared(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Compare gradients of weights with exact ones: distance, norm, what became 0."""
    wrong = norm = exact_norm = lost = seen = 0.0
    worst: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, g in exact.items():
        ours = gradients[name]
        off, size = float((ours - g).square().sum()), float(g.square().sum())
        wrong, norm, exact_norm = wrong + off, norm + float(ours.square().sum()), exact_norm + size
        lost += int(((ours == 0) & (g != 0)).sum())
        seen += int((g != 0).sum())
        part = worst[stack_of(name)]
        part[0], part[1] = part[0] + off, part[1] + size
    found = {name: (off / max(size, 1e-60)) ** 0.5 for name, (off, size) in worst.items()}
    return {
        "gradient off by": (wrong / exact_norm) ** 0.5,
        "norm of gradient off by": abs((norm / exact_norm) ** 0.5 - 1),
        "gradients of weights lost %": 100 * lost / max(seen, 1),
    } | {f"off by, {name}": value for name, value in found.items()}


def stack_of(name: str) -> str:
    """Return the part of the model that a weight belongs to."""
    for part in ("evoformer", "extra_msa_stack", "template", "structure_module"):
        if name.startswith(part):
            return {"template": "templates"}.get(part, part.replace("_", " "))
    return "embedders and heads"


def measure(given: argparse.Namespace) -> None:
    """Look at all cases and write the result after each."""
    run = train_step.run_of(given)
    assert isinstance(run.task, AlphaFold2Task)
    device = next(run.model.parameters()).device
    batch = first_batch(run).to(device)
    if given.trained:
        run = replace(run, model=load_model(newest_model(given.trained)).to(device))
    model: AlphaFold2 = run.model.train()  # type: ignore[assignment]
    found = Found(given)
    exact: dict[str, Tensor] = {}
    for kind, scale in CASES:
        # Operators of PyTorch keep too much for a backward pass over all blocks.
        set_policy(model, "none" if kind else "all")
        task = AlphaFold2Task(given.passes, run.task.stages, kind)
        task.cycles = given.passes
        with kernels.use("auto" if kind else "reference"):
            row, profile, gradients = looked_at(
                model, lambda task=task: loss_of(task, model, batch), scale, exact
            )
        exact = exact or gradients
        found.add("bevatron", kind, scale, row, profile)
    if not given.openfold:
        return
    step = openfold.OpenFoldStep(model)
    step.model.train()
    changes = [("", torch.bfloat16), *((each, torch.float16) for each in ("", *IN_RANGE))]
    for changed, kind in changes:
        for module in step.model.modules():
            counts = type(module).__name__ == "GlobalAttention"
            if hasattr(module, changed) and (changed == "inf" or counts):
                setattr(module, changed, IN_RANGE[changed])
        row, profile, _ = looked_at(
            step.model, lambda kind=kind: step.loss_of(batch, given.passes, kind), 1, {}
        )
        who = f"{train_step.OPENFOLD}, {PARTS[changed]}" if changed else train_step.OPENFOLD
        found.add(who, kind, 1, row, profile)


def loss_of(task: AlphaFold2Task, model: nn.Module, batch: ChainBatch) -> Tensor:
    """Compute the loss of a step."""
    total: Tensor = task.loss(model, batch, task.normalisers(batch)).total
    return total


class Found:
    """Rows and profiles so far, written after each."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.rows: list[dict[str, Any]] = []
        self.profiles: dict[str, Any] = {}

    def add(
        self,
        who: str,
        kind: torch.dtype | None,
        scale: int,
        row: dict[str, Any],
        profile: dict[str, Any],
    ) -> None:
        """Append a case and write all."""
        about = {"who": who, "activations": TYPES[kind], "loss scaled by": scale}
        self.rows.append({**about, **row})
        self.profiles[", ".join(str(value) for value in about.values())] = profile
        print(self.rows[-1], flush=True)
        path = write_result(
            "alphafold2/half_precision", self.rows, (__doc__ or "").split("\n\n")[-1],
            device=self.given.device, folder=self.given.out, extra={"profiles": self.profiles},
        )  # fmt: skip
        add_picture(draw(self.rows, list(self.profiles.values())), path)


def draw(rows: Sequence[Mapping[str, Any]], profiles: Sequence[Mapping[str, Any]]) -> Any:
    """Draw the largest activation and the size of the gradient of every block."""
    panels = []
    for part, what in (("m", "alignment"), ("z", "pair")):
        for title, pick in (
            ("largest activation", lambda profile, name: profile["outputs"].get(name)),
            ("root mean square of its gradient", lambda p, n: p["gradients"].get(n, [None] * 4)[3]),
        ):
            curves = []
            for row, profile in zip(rows, profiles, strict=True):
                stack = [n for n in profile["outputs"] if n.startswith("evoformer.blocks")]
                names = [name for name in stack if name.endswith(part)]
                values = [pick(profile, name) for name in names]
                if values and all(value is not None and np.isfinite(value) for value in values):
                    scale = row["loss scaled by"]
                    times = "" if scale == 1 else f", loss x {scale:,}"
                    label = f"{row['who']}, {row['activations']}{times}"
                    curves.append(Curve(label, np.arange(1, 1 + len(values)), np.array(values)))
            panels.append(Panel(what, title, curves))
    return plots.curves(panels, "block of the Evoformer")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write the result."""
    parser = script_parser(__doc__)
    train_step.add_run(parser)
    parser.add_argument("--trained", type=Path, help="a run, of whose weights")
    parser.add_argument("--openfold", action="store_true", help="its step, too")
    parser.add_argument("--passes", type=int, default=4)
    add_out(parser)
    given = parser.parse_args(argv)
    measure(given)


if __name__ == "__main__":
    main()
