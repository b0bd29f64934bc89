"""Peak memory of launched training steps of AlphaFold3 by length, and the longest that train.

    python -m benchmarks.alphafold3.memory STORE [--lengths 64 128] [--policies all] [--longest]
    python -m benchmarks.alphafold3.memory STORE --device cpu --planned 139 --longest
    python -m benchmarks.alphafold3.memory STORE --device cpu --kept --lengths 384
    python -m benchmarks.alphafold3.memory --collect FOLDER

One step an arm and length; weights, gradients, moments and averaged weights are not counted. With
``--longest`` lengths between the last that fitted and the first that did not are halved down to a
multiple of 32, for each policy and arm. Crops come from the largest complex of the store. With
``--planned`` steps are planned for a GPU of so many GiB, without one: a small crop stands for all
lengths. ``--kept`` plans what autograd keeps of each kind of module if nothing is computed again,
on a page of its own. ``--collect`` sets measured and planned results beside each other, with
launched steps of `benchmarks.alphafold3.train_step` if the folder holds some.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.alphafold3.arms import Crops, built, peak_gib, training_of
from benchmarks.alphafold3.train_step import RUNGS
from benchmarks.common.arguments import add_crops, add_out, read_all, script_parser
from benchmarks.common.arms import GIB, OUT_OF_MEMORY, Arm, or_out_of_memory
from benchmarks.common.report import write_result

from bevatron.data.padding import BatchShape
from bevatron.data.proteins.complex_batch import ComplexBatch, collate_complex
from bevatron.models.alphafold3.model import AlphaFold3
from bevatron.models.alphafold3.task import StepOptions
from bevatron.models.common.folding.checkpointing import Kind
from bevatron.train.memory_plan import kept_by_module, plan_memory
from bevatron.train.run import Run

ARMS = {
    arm.name: arm
    for arm in (
        Arm("bevatron", captured=False, workers=0),
        Arm("eager", "reference", captured=False, workers=0),
        *(Arm(title, captured=False, workers=0, plain=plain) for title, plain in RUNGS.items()),
    )
}
WHOLE = ("bevatron", "eager")
"""Those measured by default; the others are the paper's ladder."""
PARTS_OF = {name: name for name in ("input_encoder", "diffusion", "confidence", "distogram")}
"""Modules of the model that are parts; those of the trunk are parts themselves."""
LITTLE = 0.003
"""Share of what is kept below which a module is one of the others."""
GRANULE = 32
"""Tokens; crops are padded to multiples."""
SMALL, ATOMS = 128, 7
"""Tokens of the crop that plans are made of, and atoms of a token, of haemoglobin."""


class Memory:
    """Steps of one model, whose peaks are rows; ``on_row`` is called after each."""

    on_row: Callable[[], None] | None = None

    def __init__(self, model: AlphaFold3, given: argparse.Namespace) -> None:
        self.model, self.given = model, given
        self.rows: list[dict[str, Any]] = []

    def fits(self, name: str, policy: Kind, tokens: int) -> bool:
        """Take a step; add its row; return whether there was enough memory."""
        given, on_gpu = self.given, next(self.model.parameters()).is_cuda
        crops = Crops(given.store, tokens, rows=given.rows, different=1)
        arm, trained = replace(ARMS[name], policy=policy), []
        row: dict[str, Any] = {"arm": name, "policy": policy, "N": tokens}

        def step() -> bool:
            options = StepOptions(copies=given.copies)
            trained.append(training_of(arm, self.model, crops, options))
            trained[0].steps([0])
            return True

        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        fitted = or_out_of_memory(step) is not None
        row["peak GiB"] = (peak_gib(self.model) if on_gpu else "") if fitted else OUT_OF_MEMORY
        for training in trained:
            training.release()
        self._add(row)
        return fitted

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(row, flush=True)
        if self.on_row is not None:
            self.on_row()

    def longest(self, name: str, policy: Kind, lengths: list[int]) -> int | None:
        """Try lengths in their order until one does not fit, then halve what lies between."""
        fitted = 0
        for tokens in lengths:
            if not self.fits(name, policy, tokens):
                break
            fitted = tokens
        else:
            return None
        failed = tokens
        granule = self.given.granule
        while self.given.longest and failed - fitted > granule:
            middle = (fitted + failed) // 2 // granule * granule
            if self.fits(name, policy, middle):
                fitted = middle
            else:
                failed = middle
        return fitted


class Plans(Memory):
    """The same, planned."""

    def _step(self, name: str, policy: Kind, tokens: int) -> tuple[Run, ComplexBatch, BatchShape]:
        """Return a run, the batch that stands for all and the shape to which it is padded."""
        given = self.given
        crops = Crops(given.store, SMALL, rows=given.rows, different=1)
        arm, options = replace(ARMS[name], policy=policy), StepOptions(given.copies)
        run = training_of(arm, self.model, crops, options).run
        run.task.activations = torch.bfloat16
        batch = collate_complex([crops[0]], np.zeros(1, np.int64), [1.0])
        sizes = {**batch.sizes, "tokens": tokens, "atoms": ATOMS * tokens, "rows": given.rows}
        return run, batch, batch.padding.rounded([sizes[axis] for axis in batch.padding.names])

    def kept(self, tokens: int) -> None:
        """Add a row for each kind of module: what autograd keeps of it, ours beside plain."""
        found: dict[str, Counter[str]] = {}
        for name in WHOLE:
            run, batch, shape = self._step(name, "none", tokens)
            with ARMS[name].implementations():
                modules = kept_by_module(run, batch, shape)
            kinds = {path: type(module).__name__ for path, module in run.model.named_modules()}
            of = found.setdefault(name, Counter())
            for path, saved in modules.items():
                part = PARTS_OF.get(path.split(".")[0], path.partition(".")[2].split(".")[0])
                of[f"{part}: {kinds[path]}" if path in kinds else path] += saved.total
        ours, plain = found["bevatron"], found["eager"]
        whole = sum(plain.values())
        little = {kind for kind, size in plain.items() if size < LITTLE * whole}
        for of in (ours, plain):
            of["others"] = sum(of.pop(kind, 0) for kind in little)
        for kind, size in [*plain.most_common(), ("all", whole)]:
            own = sum(ours.values()) if kind == "all" else ours[kind]
            row = {"N": tokens, "module": kind, "eager GiB": size / GIB}
            self._add({**row, "eager %": 100 * size / whole, "bevatron GiB": own / GIB})

    def fits(self, name: str, policy: Kind, tokens: int) -> bool:
        """Plan a step; add its row; return whether there is enough memory."""
        given = self.given
        run, batch, shape = self._step(name, policy, tokens)
        for row in self.rows:
            if (row.get("arm"), row["policy"], row["N"]) == (name, policy, shape["tokens"]):
                return row["in all GiB"] <= given.planned  # another length padded to the same
        with ARMS[name].implementations():
            plan = plan_memory(run, batch, shape=shape, captured=False)
        row = {
            "arm": name,
            "policy": policy,
            "N": shape["tokens"],
            "peak GiB": plan.activations / GIB,
        }
        self._add({**row, "in all GiB": plan.peak / GIB})
        return plan.peak <= given.planned * GIB


def main() -> None:
    """Measure all arms and policies and write the result after each length."""
    parser = script_parser(__doc__)
    add_crops(parser)
    parser.add_argument("--lengths", nargs="*", type=int, default=[64, 128, 256, 384, 512, 768])
    parser.add_argument("--policies", nargs="*", default=["none", "pair", "all", "paper"])
    parser.add_argument("--arms", nargs="*", choices=[*ARMS], default=[*WHOLE])
    parser.add_argument("--planned", type=float, help="GiB of a GPU for which steps are planned")
    parser.add_argument("--kept", action="store_true", help="plan what autograd keeps, by module")
    parser.add_argument("--granule", type=int, default=GRANULE, help="of the lengths between")
    parser.add_argument("--longest", action="store_true", help="find it by halving")
    add_out(parser)
    parser.add_argument("--collect", type=Path, metavar="FOLDER", help="join the results in it")
    given = parser.parse_args()
    collect(given.collect, given.out) if given.collect else measure(given)


def collect(folder: Path, results: Path) -> None:
    """Write measured memory beside what was planned."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    longest: dict[str, int | None] = {}

    def row(arm: str, policy: str, tokens: int) -> dict[str, Any]:
        return rows.setdefault((arm, policy, tokens), {"arm": arm, "policy": policy, "N": tokens})

    for found in read_all(folder, "memory*.json"):
        planned = found["hardware"].startswith("cpu")
        if planned:
            longest |= found.get("extra", {}).get("longest", {})
        else:
            measured_on = found
        for one in found["rows"]:
            kept = row(one["arm"], one["policy"], one["N"])
            kept["planned GiB" if planned else "peak GiB"] = one["peak GiB"]
            if planned:
                kept["planned in all GiB"] = one["in all GiB"]
    for found in read_all(folder, "step-*.json"):
        one, measured_on = found["row"], found["measured on"]
        arm, *captured, policy = one["arm"].split(", ")
        if captured != ["captured"] and arm in WHOLE and "peak GiB" in one:
            row(arm, policy, one["N"])["peak GiB"] = one["peak GiB"]
    write_result(
        "alphafold3/memory", [rows[key] for key in sorted(rows)], f"{COLLECTED} {listed(longest)}",
        device="cuda", folder=results, measured_on=measured_on,
    )  # fmt: skip


COLLECTED = (
    "Launched steps, 1024 rows, 48 copies, one pass, rollout and confidences, bfloat16. peak GiB: "
    "measured, less weights, gradients, moments and averages; planned GiB: the same, planned on a "
    f"CPU for {ATOMS} atoms a token, at lengths to which crops are padded, of which 139 GiB in all "
    "fit a GPU."
)


def listed(longest: Mapping[str, int | None]) -> str:
    """Name the longest crops that were planned to fit."""
    return f"The longest that fit: {', '.join(f'{arm} {n}' for arm, n in longest.items())}."


def kept_notes(given: argparse.Namespace) -> str:
    """Say what was planned."""
    return (
        f"What autograd keeps of a step until its backward pass if nothing is computed again: "
        f"{given.rows} rows, {given.copies} copies, one pass, rollout and confidences, bfloat16, "
        f"{ATOMS} atoms a token; planned on a CPU for a GPU, without weights and batch. What a "
        "module keeps does not count again for those around it; what several keep counts once, "
        "for the first."
    )


def measure(given: argparse.Namespace) -> None:
    """Measure the arms and policies."""
    model = built(given.preset, torch.device(given.device))
    if given.kept:
        plans = Plans(model, given)
        for tokens in given.lengths:
            plans.kept(tokens)
        write_result("alphafold3/kept", plans.rows, kept_notes(given), folder=given.out)
        return
    memory = (Memory if given.planned is None else Plans)(model, given)
    longest: dict[str, int | None] = {}

    def write() -> None:
        notes = (
            f"Launched steps, {given.rows} rows, {given.copies} copies, one pass, rollout and "
            "confidences, bfloat16; peak GiB: less weights, gradients, moments and averages."
        )
        if given.planned is not None:
            notes += (
                f" Planned for a GPU of {given.planned:g} GiB, not run, {ATOMS} atoms a token, "
                f"at lengths to which crops are padded. {listed(longest)}"
            )
        write_result(
            "alphafold3/memory", memory.rows, notes, device=given.device,
            extra={"longest": longest}, folder=given.out,
        )  # fmt: skip

    memory.on_row = write
    for policy in given.policies:
        for name in given.arms:
            longest[f"{name}, {policy}"] = memory.longest(name, policy, sorted(given.lengths))
    write()


if __name__ == "__main__":
    main()
