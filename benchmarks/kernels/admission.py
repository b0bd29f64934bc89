"""Admission tests of pair operators: accuracy on six kinds of input, speed, memory, repeatability.

    python -m benchmarks.kernels.admission
    python -m benchmarks.kernels.admission --op triangle_multiply --repeats 0

Forward and backward with all gradients, in bfloat16, of structures in float32. Accuracy: for each
kind of input, every tensor is compared with float64. It must be finite, and its error at most
`SHARE` times that of plain PyTorch in this type, or below that of rounding exact values to
bfloat16, a loose bound for float32: sums in another order differ by more than `SHARE`. Speed and
memory: no replay slower and no peak higher than plain PyTorch's. Soak: a captured call is replayed
many times, and every replay is compared with the first, bit for bit.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from benchmarks.common import timing
from benchmarks.common.arguments import add_out
from benchmarks.common.report import write_result
from benchmarks.kernels import cases_folding, cases_pair  # noqa: F401  they register operators
from benchmarks.kernels.cases import (
    OPERATORS,
    Case,
    Inputs,
    Row,
    Setup,
    cases_of,
    direction,
    leaves_of,
)
from benchmarks.kernels.checks import DRAWS, ROUNDING, errors, gradients, over_draws
from torch import Tensor

from bevatron import kernels

CASES = {
    "triangle_multiply": ("N 384, C 128", "N 256, C 128", "N 250, C 64", "N 64, C 128"),
    "pair_attention": ("diffusion 48 x 384", "triangle 384", "triangle 200", "triangle 64"),
    "transition": ("147456 x 128, x4", "32768 x 256, x4", "N 64, 128 wide"),
    "layer_norm": ("147456 x 128", "32768 rows, 384 wide", "N 64, 128 wide"),
    "layer_norm_linear": ("147456 x 128 to 512", "N 64, 128 wide", "147456 x 128 to 4"),
    "qkvg": ("384 x 384 x 128, with a bias", "147456 x 128", "18432 x 128"),
    "add_dropped": ("N 384", "N 384, transposed", "N 64, with its layer"),
    "window_attention": ("48 x 4600 atoms", "4 x 1000 atoms"),
    "pair_weighted_averaging": ("1024 x 384 x 64", "128 x 64 x 64"),
    "smooth_lddt": ("48 x 1500 atoms", "8 x 500 atoms"),
    "invariant_point_attention": ("N 256",),
    "conditioned_transition": ("18432 x 768, condition 384", "48 x 64"),
    "outer_product_mean": ("128 x 256 x 256", "16 x 256 x 256"),
    "global_attention": ("1024 x 256 x 64", "1024 x 32 x 64"),
}
"""Operator -> cases; the last of each is soaked."""
SOAKED_TOO = {
    "triangle_multiply": "N 256, C 128",
    "qkvg": "384 x 384 x 128, with a bias",
}
"""Cases that other kernels take than the last one, such as those for Hopper."""
SHARE = 1.3
"""Largest ratio of our error to plain PyTorch's; single draws of few elements vary."""
LARGE, TINY, LATE = 30.0, 1e-4, 100.0
Kind = Callable[[Inputs], Inputs]


def scaled(factor: float) -> Kind:
    """Scale all inputs but weights and masks; logits grow with the square."""

    def change(inputs: Inputs) -> Inputs:
        leaves = leaves_of(inputs)
        scaled = {name: factor * leaves[name] for name in leaves if not is_weight(name)}
        return inputs | scaled

    return change


def masked(keep: int) -> Kind:
    """Mask all but the first keys of each row."""

    def change(inputs: Inputs) -> Inputs:
        mask = torch.zeros_like(inputs["mask"])
        mask[..., :keep] = True
        return inputs | {"mask": mask}

    return change


def late(inputs: Inputs) -> Inputs:
    """Make the last key, or the last channel of rows, larger than all others."""
    name = next(name for name in ("z", "x", "bias", "m", "predicted") if name in inputs)
    value = inputs[name].clone()
    value[..., -1] += LATE
    return inputs | {name: value}


KINDS: dict[str, Kind] = {
    "normal": lambda inputs: inputs,
    "large": scaled(LARGE),
    "tiny": scaled(TINY),
    "all masked": masked(0),
    "one key": masked(1),
    "late maximum": late,
}


def is_weight(name: str) -> bool:
    """Whether an input is a parameter of a layer."""
    return name.endswith(("weight", "_bias"))


def accuracy(case: Case, kind: str) -> Row | None:
    """Compare one kind of input with float64; None where the operator has no mask."""
    drawn = case.draw(0)
    if "mask" not in drawn and kind in {"all masked", "one key"}:
        return None

    def plain(**tensors: Any) -> Tensor:
        with kernels.use("reference"):  # defined where all is masked
            return case.ours(**tensors)

    changed = replace(case, plain=plain, draw=lambda seed: KINDS[kind](case.draw(seed)))
    inputs = changed.draw(0)
    along = direction(case, inputs)
    usual = dict(zip(["result", *leaves_of(drawn)], gradients(plain, drawn, along), strict=True))
    sizes = {name: float(tensor.norm()) for name, tensor in usual.items()}
    found = {name: each[:2] for name, each in errors(changed, inputs, along, sizes).items()}
    # A few numbers may make up a parameter's gradient: more draws decide where one leaves doubt.
    found |= over_draws(
        changed, [name for name, each in found.items() if is_weight(name) and excess(*each) > 1]
    )
    worst = max(found, key=lambda name: excess(*found[name]))
    row = Row(op=case.op, case=case.name, kind=kind, admitted=excess(*found[worst]) <= 1)
    return row | {"worst": worst, "error": found[worst][0], "plain's": found[worst][1]}


def excess(error: float, theirs: float) -> float:
    """Return an error over the largest admitted one; half of bfloat16's rounding is admitted."""
    if not math.isfinite(theirs):
        return 0.0
    return error / max(SHARE * theirs, ROUNDING / 2) if math.isfinite(error) else math.inf


def speed(case: Case) -> Row:
    """Compare time and peak memory with plain PyTorch."""
    row = Row(op=case.op, case=case.name, kind="speed, memory")
    replays = []
    for who, operator in (("", case.ours), ("plain's ", case.plain)):
        run = case.step("forward+backward", operator).run
        assert run is not None
        row[f"{who}MiB"] = round(timing.peak_mib(run))
        replays.append(timing.captured(run))
    (row["ms"], _), (row["plain's ms"], _) = timing.in_turn(replays, flush=True)
    row["admitted"] = row["ms"] <= row["plain's ms"] and row["MiB"] <= max(row["plain's MiB"], 1)
    return row


def soak(case: Case, repeats: int) -> Row:
    """Replay a call and compare all results with those of the first, on the GPU."""
    run = case.step("forward+backward").run
    assert run is not None
    first = bits(run())
    differing = torch.zeros((), dtype=torch.int64, device=first.device)

    def compare() -> None:
        differing.add_((bits(run()) != first).any())

    replay = timing.captured(compare)
    differing.zero_()
    for _ in range(repeats):
        replay()
    wrong = int(differing)
    row = Row(op=case.op, case=case.name, kind="soak", admitted=wrong == 0)
    return row | {"calls": repeats, "differing": wrong}


def bits(tensors: Sequence[Tensor]) -> Tensor:
    """Join numbers as integers: NaN equals itself, and -0 differs from 0."""
    return torch.cat([tensor.flatten().view(torch.int16) for tensor in tensors])


def main() -> None:
    """Admit all cases and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", nargs="+", choices=CASES, metavar="OP", default=[*CASES])
    parser.add_argument("--repeats", type=int, default=100_000, help="calls of the soak")
    add_out(parser)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with kernels.use("triton"):
        for op in given.op:
            setup = Setup(getattr(torch, OPERATORS[op].family.dtype))
            found = list(cases_of(op, setup, CASES[op]))
            for case in found:
                rows += filter(None, (accuracy(case, kind) for kind in KINDS))
                rows.append(speed(case))
                torch.cuda.empty_cache()
            if given.repeats:
                soaked = {CASES[op][-1], SOAKED_TOO.get(op)}
                rows += [soak(case, given.repeats) for case in found if case.name in soaked]
            write_result("kernels/admission", rows, NOTES, device="cuda", folder=given.out)
    if refused := [row for row in rows if not row["admitted"]]:
        raise SystemExit("\n".join(["not admitted:", *map(str, refused)]))


NOTES = (
    "bfloat16 (smooth lDDT, invariant point attention: float32), forward and backward with all "
    "gradients. error: norm of the difference from float64 over the norm "
    "of the exact tensor, of the tensor that is worst beside plain PyTorch's error "
    "in this type; of a tensor that is exactly zero, over 2^-8 of its norm for normal inputs; "
    "admitted below 1.3 times plain PyTorch's, or below 2^-9, in float32 too; "
    f"of a weight or bias that one draw leaves in doubt, over {DRAWS} draws. "
    "ms: CUDA-graph replays, L2 flushed; MiB: peak beyond the inputs. Soak: captured "
    "calls, all results compared with those of the first call, bit for bit. large: all but weights "
    f"times {LARGE:g}; tiny: times {TINY:g}; late maximum: {LATE:g} added to the last key's bias, "
    "or to the last channel of rows."
)


if __name__ == "__main__":
    main()
