"""Where time and memory of a captured step of AlphaFold3 go, as `bevatron bench profile` tells it.

    python -m benchmarks.alphafold3.profile STORE [--tokens 384] [--out rows]
    python -m benchmarks.alphafold3.profile --collect rows

Crops of one complex that have one padded shape, as in alphafold3/train_step.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from benchmarks.alphafold3.arms import Crops, built, training_of
from benchmarks.alphafold3.train_step import ARMS, OURS
from benchmarks.common.arguments import add_rows, read_all
from benchmarks.common.report import versions, write_result

from bevatron.models.alphafold3.task import StepOptions
from bevatron.recipes.bench_profile import profile, short, write

MIB = 2**20
LONGEST = 12
"""Kernels and modules of the table."""


def measure(given: argparse.Namespace) -> None:
    """Profile steps and write profile.json."""
    crops = Crops(given.store, given.tokens, rows=given.rows)
    model = built(given.preset, torch.device(given.device))
    training = training_of(ARMS[f"{OURS}, all"], model, crops, StepOptions(copies=given.copies))
    run = training.run
    training.release()
    found = profile(run, given.steps, given.warm)
    assert found is not None
    write({**found, "versions": versions()}, given.out)


def collect(folder: Path, results: Path) -> None:
    """Write the result from profile.json."""
    (found,) = read_all(folder, "profile.json")
    (rank,) = found["ranks"]
    memory = rank["memory"]
    rows: list[dict[str, Any]] = [
        {"of": "step", "name": "untraced", "ms": found["step"]},
        {"of": "step", "name": "traced", "ms": rank["traced_step"], "launches": rank["launches"]},
    ]
    for kind in ("classes", "kernels"):
        longest = sorted(rank[kind].items(), key=lambda item: -item[1]["ms"])[:LONGEST]
        rows += [
            {"of": kind, "name": short(name), "ms": spent["ms"], "launches": spent["count"]}
            for name, spent in longest
        ]
    rows += [
        {"of": "memory", "name": kind, "MiB": memory[kind] / MIB}
        for kind in ("weights", "gradients", "optimizer", "averages", "activations", "temporary")
    ]
    rows += [
        {"of": "activations", "name": name, "MiB": (kept["forward"] + kept["gradient"]) / MIB}
        for name, kept in list(memory["modules"].items())[:LONGEST]
    ]
    device = "cuda" if found["on_gpu"] else "cpu"
    hardware = found["device"].lower().replace(" ", "-") if found["on_gpu"] else "cpu"
    write_result(
        "alphafold3/profile", rows, NOTES, device=device, folder=results,
        measured_on={"hardware": hardware, "versions": found["versions"]},
    )  # fmt: skip


NOTES = (
    "A captured step of 384 tokens of the published model, all blocks computed again; ms and "
    "launches a step, mean of 6 traced steps; step, untraced: of as many before. memory: averages "
    "are the averaged weights; activations: kept for the backward pass of a batch, by module "
    "below; temporary: what the peak has beyond all of these."
)


def main() -> None:
    """Profile, or write the result of a profile."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("store", type=Path, nargs="?", help="of complexes; the largest is cropped")
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--rows", type=int, default=1024, help="of the alignment")
    parser.add_argument("--copies", type=int, default=48)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--preset", default="alphafold3")
    parser.add_argument("--device", default="cuda")
    add_rows(parser, "alphafold3-profile")
    given = parser.parse_args()
    collect(given.collect, given.results) if given.collect else measure(given)


if __name__ == "__main__":
    main()
