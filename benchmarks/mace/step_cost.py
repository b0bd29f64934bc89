"""What a step costs by the size of its batch, from which size on a GPU is busy, and what fits.

    python -m benchmarks.mace.step_cost STORE --out rows [--dtype float32]
    python -m benchmarks.mace.step_cost --collect rows

Captured training steps (loss on forces, clipping, Adam) over random batches of growing size, as
`bevatron bench cost` and `bevatron bench capacity` measure them; for the fit of the cost model also
batches of the densest structure. The picture shows what Figure 11 of Firoz et al. shows
(arXiv:2504.10700; there, on an A100 with 80 GB, about 800 atoms in float32 and 400 in float64
saturate the GPU, and about 4000 and 2000 are the most that fit).
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import add_rows, read_all, script_parser
from benchmarks.common.report import add_picture, hardware, versions, write_result

from bevatron.recipes.bench import capacity_picture, saturated_from, step_meter
from bevatron.recipes.mace.capacity import find_capacity
from bevatron.recipes.mace.step_cost import TERMS, StepCost, StepMeter, fit_cost, saturation

FITTED = 4096
"""Atoms of the largest batch that the cost model is fitted to."""

WORDS = {
    "atoms": "an atom",
    "edges": "an edge",
    "graphs": "a structure",
    "constant": "for the step itself",
}


def measure(arguments: argparse.Namespace) -> None:
    """Measure all precisions; everything is kept as soon as it is measured."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    for dtype in arguments.dtype:
        meter = step_meter(arguments.store, arguments.model, arguments.device, dtype)
        kept = Kept(arguments, dtype, meter)
        for cost in saturation(meter, most=arguments.most):
            kept.add("random", cost)
        atoms = [n for n in kept.atoms() if n <= FITTED]
        for number in atoms[:: max(1, len(atoms) // 4)]:
            kept.add("densest", meter.measure(meter.densest_batch(number)))
        if meter.device.type == "cuda" and not arguments.no_capacity:
            kept.values["fits"] = find_capacity(meter)
        kept.save()
        del meter


class Kept:
    """The file of one precision."""

    def __init__(self, arguments: argparse.Namespace, dtype: str, meter: StepMeter) -> None:
        self.path = arguments.out / f"{dtype}.json"
        self.meter = meter
        self.values: dict[str, Any] = {
            "dtype": dtype,
            "model": arguments.model,
            "structures": len(meter.dataset),
            "hardware": hardware(meter.device.type),
            "versions": versions(),
            "random": [],
            "densest": [],
        }

    def add(self, kind: str, cost: StepCost) -> None:
        """Keep one measurement."""
        self.values[kind].append(dataclasses.asdict(cost))
        self.save()

    def atoms(self) -> list[int]:
        """Sizes of the random batches."""
        return [cost["sizes"]["atoms"] for cost in self.values["random"]]

    def save(self) -> None:
        """Write the file."""
        self.values["captured"] = self.meter.captured
        self.path.write_text(json.dumps(self.values))
        print(self.path.name, len(self.values["random"]), len(self.values["densest"]), flush=True)


def collect(folder: Path, out: Path) -> None:
    """Fit the cost model; write tables and the picture."""
    found = read_all(folder)
    curves = {one["dtype"]: costs(one["random"]) for one in found}
    rows, notes, fits = [], [], {}
    for one in found:
        dtype, measured = one["dtype"], curves[one["dtype"]]
        few = [cost for cost in measured if cost.sizes["atoms"] <= FITTED] + costs(one["densest"])
        factors, error = fit_cost(few)
        fits[dtype] = {**factors, "relative error": error}
        rows += [row(dtype, "random", cost, factors) for cost in measured]
        rows += [row(dtype, "densest", cost, factors) for cost in costs(one["densest"])]
        notes.append(words(one, measured, factors, error))
    first = found[0]
    notes.append(
        f"Preset {first['model']}, batches drawn from {first['structures']:,} structures; medians "
        "of five steps, the next launched before one is read, as in training."
    )
    path = write_result(
        "mace/step_cost",
        rows,
        " ".join([" ".join((__doc__ or "").split("\n\n")[2].split()), *notes]),
        device="cuda",
        extra={"cost": fits, "fits": {one["dtype"]: one.get("fits") for one in found}},
        folder=out,
        measured_on={"hardware": first["hardware"], "versions": first["versions"]},
    )
    add_picture(capacity_picture(curves), path)


def costs(values: Sequence[Any]) -> list[StepCost]:
    """Make measurements again of their plain values."""
    return [StepCost(**value) for value in values]


def row(dtype: str, batches: str, cost: StepCost, factors: dict[str, float]) -> dict[str, Any]:
    """Put one measurement into a row, with what the cost model says of it."""
    fitted = factors["constant"] + sum(factors[name] * cost.sizes[name] for name in TERMS)
    return {
        "dtype": dtype,
        "batches": batches,
        **cost.sizes,
        "ms": round(1e3 * cost.seconds, 2),
        "fitted ms": round(1e3 * fitted, 2),
        "atoms/s": round(cost.sizes["atoms"] / cost.seconds),
        "peak MiB": round(cost.peak_bytes / 2**20),
        "capture MiB": round(cost.kept_bytes / 2**20),
    }


def words(one: dict[str, Any], measured: Sequence[StepCost], factors: Any, error: float) -> str:
    """Say what was found in one precision."""
    how = "captured as CUDA graphs" if one["captured"] else "launched one by one"
    fits = one.get("fits")
    most = " and ".join(f"{value:,} {name}" for name, value in (fits or {}).items())
    listed = ", ".join(f"{1e6 * factors[name]:.3g} us {of}" for name, of in WORDS.items())
    return (
        f"{one['dtype']} (steps {how}): {listed} (root mean "
        f"square of the relative error {error:.1%}, batches up to {FITTED} atoms); within 10 % of "
        f"the highest rate from {saturated_from(measured):,} atoms on"
        + (f"; the largest batches that fit: {most}." if fits else ".")
    )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("store", nargs="?", type=Path, help="prepared structures")
    parser.add_argument("--model", default="paper")
    parser.add_argument("--dtype", nargs="*", default=["float32", "float64"])
    parser.add_argument("--most", type=int, default=16384, help="atoms of the largest batch")
    parser.add_argument("--no-capacity", action="store_true", help="do not look for what fits")
    parser.add_argument("--device", default="auto")
    add_rows(parser, "cost-rows")
    arguments = parser.parse_args()
    if arguments.collect:
        collect(arguments.collect, arguments.results)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
