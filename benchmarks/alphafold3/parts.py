"""Times parts of AlphaFold3 beside plain PyTorch: a Pairformer block, the stack, the diffusion.

    python -m benchmarks.alphafold3.parts STORE [--lengths 256 384] [--stack 512] [--out rows]
    python -m benchmarks.alphafold3.parts --collect rows

A block is timed forward and backward with all gradients, as a replayed CUDA graph and launched, at
the published sizes in bfloat16 with dropout. Every arm is compared with the plain operators in
float32: the error is that of the worst gradient, relative to its largest number. The stack is its
48 blocks forward; the diffusion is a forward pass of 48 noisy copies that keeps what the backward
pass needs, and what it conditions on. Where Boltz's package can be imported its block of the
same sizes can be an arm, in a call of its own: one is compiled at a time.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.alphafold3.arms import Crops, compiled_blocks
from benchmarks.common import arms
from benchmarks.common.arguments import (
    add_after,
    add_crops,
    add_rows,
    read_all,
    script_parser,
    wait_for,
)
from benchmarks.common.arms import OUT_OF_MEMORY, drawn, free, or_out_of_memory
from benchmarks.common.report import hardware, versions, write_result
from benchmarks.common.timing import captured, median_ms, peak_mib
from torch import Tensor, nn

from bevatron import kernels
from bevatron.data.padding import pad
from bevatron.data.proteins.complex_batch import collate_complex
from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.models.alphafold3.diffusion import DiffusionModule
from bevatron.models.alphafold3.pair import pair_drops
from bevatron.models.alphafold3.pairformer import Pairformer, PairformerBlock
from bevatron.models.common.folding import Checkpointing

OURS, COMPILED, BOLTZ = "bevatron", "torch.compile", "Boltz-2"
ARMS = {OURS: "auto", "eager": "reference", COMPILED: "reference"}
PEERS = (BOLTZ, f"{BOLTZ}, {COMPILED}")
BLOCK = "Pairformer block, forward and backward"
ZERO = 1e-5
"""Of the largest gradient."""
Gradients = Sequence[Tensor]


@dataclass(frozen=True)
class Work:
    """What is timed of a part.

    Attributes
    ----------
    name
        Of the part.
    modules
        What torch.compile may compile.
    call
        Runs it; returns tensors to compare.
    exact
        The same in float32 with the plain operators.
    """

    name: str
    modules: nn.Module
    call: Callable[[], Gradients]
    exact: Callable[[], Gradients] | None = None


def block_of(config: AlphaFold3Config, N: int, device: torch.device) -> Work:
    """Make a Pairformer block, forward and backward, on random representations of N tokens."""
    torch.manual_seed(N)
    widths = config.widths
    with device:
        block = PairformerBlock(
            widths.single, widths.pair, config.pairformer, Checkpointing("none")
        )
    drawn(block)
    s, z = torch.randn(N, widths.single), torch.randn(N, N, widths.pair)
    ds, dz = torch.randn_like(s), torch.randn_like(z)
    tokens = torch.ones(N, dtype=torch.bool, device=device)
    pairs = tokens[:, None] & tokens
    parameters = list(block.parameters())
    seed = torch.tensor(7, device=device)

    def run(given: Mapping[str, Tensor], drops: Tensor | None) -> Gradients:
        outputs = block((given["s"], given["z"]), tokens, pairs, drops)
        return torch.autograd.grad(
            outputs, [given["s"], given["z"], *parameters], [given["ds"], given["dz"]]
        )

    def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
        given = {"s": s, "z": z, "ds": ds, "dz": dz}
        moved = {name: x.to(device, dtype) for name, x in given.items()}
        moved["s"].requires_grad_()
        moved["z"].requires_grad_()
        return moved

    short = inputs(torch.bfloat16 if device.type == "cuda" else torch.float32)
    (drops,) = pair_drops(seed, 0, short["z"].detach(), 1, config.pairformer.pair.dropout)

    def exact() -> Gradients:
        # The same rounded inputs and masks.
        wide = {name: x.detach().float() for name, x in short.items()}
        wide["s"].requires_grad_()
        wide["z"].requires_grad_()
        with kernels.use("reference"):
            return run(wide, None if drops is None else drops.float())

    return Work(BLOCK, block, lambda: run(short, drops), exact)


def stack_of(config: AlphaFold3Config, N: int, device: torch.device) -> Work:
    """Make the whole Pairformer, forward without gradients."""
    torch.manual_seed(N)
    widths, dtype = config.widths, torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        stack = Pairformer(widths.single, widths.pair, config.pairformer, Checkpointing("none"))
        s = torch.randn(N, widths.single, dtype=dtype)
        z = torch.randn(N, N, widths.pair, dtype=dtype)
        tokens = torch.ones(N, dtype=torch.bool)
    drawn(stack)

    @torch.no_grad()
    def call() -> Gradients:
        return stack(s, z, tokens)

    return Work(f"Pairformer of {len(stack.blocks)} blocks, forward", stack, call)


def boltz_of(config: AlphaFold3Config, N: int, device: torch.device) -> Work:
    """Make Boltz-2's block of the same sizes under autocast, as it trains."""
    from boltz.model.layers.pairformer import PairformerLayer

    torch.manual_seed(N)
    widths, sizes = config.widths, config.pairformer
    with device:
        layer = PairformerLayer(
            widths.single, widths.pair, sizes.num_heads, sizes.pair.dropout,
            sizes.pair.head_width, sizes.pair.num_heads, v2=True,
        )  # fmt: skip
        s = torch.randn(1, N, widths.single, requires_grad=True)
        z = torch.randn(1, N, N, widths.pair, dtype=torch.bfloat16, requires_grad=True)
        tokens, pairs = torch.ones(1, N), torch.ones(1, N, N)
        ds, dz = torch.randn_like(s), torch.randn(z.shape)
    drawn(layer)
    wanted = [s, z, *layer.parameters()]

    def call() -> Gradients:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            outputs = layer(s, z, tokens, pairs)
        cotangents = [ds.to(outputs[0].dtype), dz.to(outputs[1].dtype)]
        return torch.autograd.grad(outputs, wanted, cotangents)

    return Work(BLOCK, layer, call)


class Prepared:
    """An arm of a part that has run: compiled, and compared with float32.

    Parameters
    ----------
    arm
        Its name.
    work
        The part, of this arm alone.
    exact
        Gradients in float32, if any.
    """

    def __init__(self, arm: str, work: Work, exact: Gradients | None) -> None:
        self.call, self.row, self._compiled = work.call, {"arm": arm}, ExitStack()
        self._kernels = ARMS.get(arm, "reference")
        if arm == COMPILED:
            self._compiled.enter_context(compiled_blocks(work.modules))
        elif arm.endswith(COMPILED):
            self._compiled.enter_context(arms.compiled_blocks([work.modules]))
        with kernels.use(self._kernels):
            found = or_out_of_memory(self.call)
        if found is not None and exact is not None:
            self.row["error"] = worst(found, exact)

    def timed(self) -> dict[str, Any]:
        """Time it replayed and launched, with its peak memory."""

        def measure() -> bool:
            if torch.cuda.is_available():
                self.row["peak MiB"] = peak_mib(self.call)
                self.row["launched ms"] = median_ms(self.call, 7)
                with torch.autograd.set_multithreading_enabled(False):
                    self.row["launched ms, one thread"] = median_ms(self.call, 7)
                self.row["replayed ms"] = median_ms(captured(self.call), 7, flush=True)
            return True

        with self._compiled, kernels.use(self._kernels):
            if or_out_of_memory(measure) is None:
                self.row["replayed ms"] = OUT_OF_MEMORY
        free()
        return self.row


def worst(found: Gradients, exact: Gradients) -> float:
    """Return the largest error of any gradient relative to its largest number.

    Those that exact arithmetic makes zero, such as of a shift of all logits, are left out.
    """
    largest = [float(y.abs().max()) for y in exact]
    return max(
        float((x.float() - y.float()).abs().max()) / size
        for x, y, size in zip(found, exact, largest, strict=True)
        if size > ZERO * max(largest)
    )


def diffusion_of(config: AlphaFold3Config, crops: Crops, copies: int, device: torch.device) -> Work:
    """Make the diffusion of noisy copies of a crop, forward, with what copies share."""
    torch.manual_seed(crops.tokens)
    widths, N = config.widths, crops.tokens
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        module = DiffusionModule(config.diffusion, widths).to(device)
        s_inputs, s = (torch.randn(N, C, dtype=dtype) for C in (widths.inputs, widths.single))
        z = torch.randn(N, N, widths.pair, dtype=dtype)
    drawn(module)
    sample = collate_complex([crops[0]], np.zeros(1, np.int64), [1.0])
    batch = pad(sample, crops.shape).to(device).tensors()
    x = 16 * torch.randn(copies, crops.shape["atoms"], 3, device=device)
    sigma = torch.full((copies,), 16.0, device=device)

    def call() -> Gradients:
        return [module(x, sigma, module.describe(batch, s_inputs, s, z))]

    return Work(f"diffusion of {copies} copies, forward", module, call)


def main() -> None:
    """Measure parts and keep the rows of each, or join the rows of all calls."""
    parser = script_parser(__doc__)
    add_crops(parser)
    parser.add_argument("--lengths", nargs="*", type=int, default=[256, 384, 512, 768])
    parser.add_argument("--stack", nargs="*", type=int, default=[512])
    parser.add_argument("--diffusion", nargs="*", type=int, default=[512])
    parser.add_argument("--arms", nargs="*", choices=[*ARMS, *PEERS], default=[*ARMS])
    add_after(parser)
    add_rows(parser, "alphafold3-parts-rows")
    given = parser.parse_args()
    collect(given.collect, given.results, given.note) if given.collect else measure_all(given)


def measure_all(given: argparse.Namespace) -> None:
    """Measure all parts."""
    config, device = AlphaFold3Config.preset(given.preset), torch.device(given.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    given.out.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[int, Callable[[], Work]]]
    parts = [(N, partial(block_of, config, N, device)) for N in given.lengths]
    parts += [(N, partial(stack_of, config, N, device)) for N in given.stack]
    for N in given.diffusion:
        crops = Crops(given.store, N, rows=given.rows)
        parts.append((N, partial(diffusion_of, config, crops, given.copies, device)))
    for place, (N, make) in enumerate(parts):
        peer = partial(boltz_of, config, N, device)
        blocks = place < len(given.lengths)
        names = [name for name in given.arms if blocks or name in ARMS]
        makers = {name: peer if name in PEERS else make for name in names}
        measure(N, makers, place, given)


def measure(
    N: int, makers: Mapping[str, Callable[[], Work]], place: int, given: argparse.Namespace
) -> None:
    """Get all arms of a part ready, then time each, in another order each time; keep the rows."""
    works = {name: make() for name, make in makers.items()}
    work = next(iter(works.values()))
    exact = work.exact() if work.exact is not None else None
    found = [Prepared(name, one, exact if one.exact else None) for name, one in works.items()]
    del exact
    free()
    print(f"{work.name}, N = {N}: ready", flush=True)
    wait_for(given.after)
    for arm in found if place % 2 == 0 else found[::-1]:
        print(arm.timed(), flush=True)
    rows = [{"part": work.name, "N": N, **arm.row} for arm in found]
    kept = {"hardware": hardware(given.device), "versions": versions(), "rows": rows}
    name = "-".join([work.name.split(",")[0], *makers]).replace(" ", "-").replace(",", "")
    (given.out / f"parts-{N:04d}-{name}.json").write_text(json.dumps(kept))


def collect(folder: Path, results: Path, note: str) -> None:
    """Join the rows and write the result."""
    found = read_all(folder, "parts-*.json")
    rows = [row for one in found for row in one["rows"]]
    order = [*ARMS, *PEERS]
    rows.sort(key=lambda row: (row["part"], row["N"], order.index(row["arm"])))
    ours = {(row["part"], row["N"]): row for row in rows if row["arm"] == OURS}
    for row in rows:
        same = ours.get((row["part"], row["N"]), {})
        for key in ("replayed ms", "launched ms", "peak MiB"):
            if isinstance(row.get(key), float) and isinstance(same.get(key), float):
                row[f"x our {key.split()[0]}"] = row[key] / same[key]
    write_result(
        "alphafold3/parts",
        rows,
        f"{NOTES} {note}".strip(),
        device="cuda",
        folder=results,
        measured_on=found[0],
    )


NOTES = (
    "bfloat16 activations, float32 weights, published sizes, dropout 0.25. replayed ms: a captured "
    "CUDA graph, L2 flushed; launched ms: from Python, the device waits for the host; one thread: "
    "the backward pass stays on the calling thread, as in training. peak MiB: "
    "beyond weights and inputs. error: largest of a gradient's errors against float32, relative to "
    "its largest number. Boltz-2: its package's own block of the same sizes, dropout of its own, "
    "under autocast as it trains, so with a pair in float32; torch.compile: static shapes."
)

if __name__ == "__main__":
    main()
