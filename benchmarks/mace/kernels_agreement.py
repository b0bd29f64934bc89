"""Training with the fast kernels and training with the reference: losses step by step.

    python -m benchmarks.mace.kernels_agreement --data ../data/mptrj_random_1k.extxyz.gz --out rows
    python -m benchmarks.mace.kernels_agreement --collect rows

The runs do not disturb each other: ``--seeds`` and ``--kernels`` divide them among processes. The
same model, data, seed and batches in float32, once with ``reference`` kernels (plain PyTorch)
and once with ``auto`` (Triton); then both with another seed of the weights. The
losses of the first 100 steps are compared one by one. Later two runs drift apart as any two runs
with other rounding do, so the mean loss of the last 50 steps is compared with its spread over
seeds.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.arguments import add_rows, read_all, script_parser
from benchmarks.common.report import add_picture, write_result

from bevatron.recipes import recipe
from bevatron.recipes.mace.run import build
from bevatron.train.logger import read_journal
from bevatron.train.loop import fit
from bevatron.train.report import plots

LAST = 50
SMOOTH = 20
"""Steps whose losses are averaged, for the table and for the picture."""


def losses(implementation: str, seed: int, folder: Path, arguments: argparse.Namespace) -> Any:
    """Train for some steps; return the loss of every step."""
    output = folder / f"{implementation}-{seed}"
    values: dict[str, Any] = {
        "output": str(output),
        "preset": arguments.preset,
        "model": {"num_channels": arguments.channels} if arguments.channels else {},
        "data": {
            "train": [str(path) for path in arguments.data],
            "prepared": str(arguments.prepared or folder / "prepared"),
            "valid_size": 0.0,
        },
        "loss": {"kind": arguments.loss},
        "optim": {"lr": arguments.lr, "ema": None, "clip": 100.0},
        "schedule": {"kind": "constant", "warmup_steps": 100},
        "batch": {"capacity": arguments.capacity},
        "loader": {"workers": arguments.workers},
        "checkpoint": {"every_epochs": None},
        "kernels": {"default": implementation},
        "train": {
            "epochs": arguments.epochs,
            "seed": seed,
            "dtype": "float32",
            "device": arguments.device,
            "cuda_graphs": None,
            "explode_factor": None,
        },
        "report": False,
    }
    fit(build(recipe("mace")[0].from_values(values)))
    journal = read_journal(output / "metrics.jsonl")
    return np.array([r["loss"] for r in journal if r["kind"] == "step"])[: arguments.steps]


def measure(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    setting = (
        f"preset {arguments.preset}, {arguments.channels or 'its'} channels, {arguments.loss} "
        f"loss, batches of {arguments.capacity} atoms, a learning rate of {arguments.lr:g} after a "
        "rise over 100 steps"
    )
    with tempfile.TemporaryDirectory() as scratch:
        for seed in arguments.seeds:
            for implementation in arguments.kernels:
                found = losses(implementation, seed, Path(scratch), arguments).tolist()
                row = {"kernels": implementation, "seed": seed, "setting": setting, "loss": found}
                path = arguments.out / f"{implementation}-{seed}.json"
                path.write_text(json.dumps(row))
                print(path.name, len(found), found[-1], flush=True)


def collect(folder: Path, results: Path, device: str, further: str = "") -> None:
    """Compare the losses of all runs; write the table and the picture."""
    runs = read_all(folder)
    steps = min(len(run["loss"]) for run in runs)
    found = {(run["kernels"], run["seed"]): np.array(run["loss"][:steps]) for run in runs}
    seeds = sorted({seed for _, seed in found})
    ends = {key: float(loss[-LAST:].mean()) for key, loss in found.items()}
    spread = float(np.std([ends["reference", seed] for seed in seeds], ddof=1))
    rows, curves = [], []
    for seed in seeds:
        one, two = found["reference", seed], found["auto", seed]
        apart = np.abs(one - two) / np.abs(one)
        rows.append(
            {
                "seed": seed,
                "steps": len(one),
                "largest relative difference, 100 steps": f"{apart[:100].max():.1e}",
                "over all steps": f"{apart.max():.1e}",
                f"mean of the last {LAST}, reference": round(ends["reference", seed], 5),
                "fast kernels": round(ends["auto", seed], 5),
                "apart / spread": (
                    f"{abs(ends['auto', seed] - ends['reference', seed]) / spread:.1e}"
                ),
            }
        )
        curves.append((seed, one, two, apart))
    notes = (
        f"{' '.join((__doc__ or '').split(chr(10) * 2)[-1].split())} Here: {runs[0]['setting']}. "
        f"Spread of the reference over seeds (standard deviation of its means): {spread:.4g}. "
        f"{further}"
    )
    losses_of = {f"{name}, seed {seed}": v.tolist() for (name, seed), v in found.items()}
    path = write_result(
        "mace/kernels_agreement",
        rows,
        notes,
        device=device,
        extra={"losses": losses_of},
        folder=results,
    )
    add_picture(picture(curves), path)


def picture(curves: Sequence[tuple[int, Any, Any, Any]]) -> Any:
    """Draw losses of both kinds of kernels and how far they are apart."""
    panels, apart = [], []
    for seed, reference, fast, difference in curves:
        steps = np.arange(1, len(reference) + 1)
        both = (
            plots.Curve("reference", steps, _smooth(reference)),
            plots.Curve("fast kernels", steps, _smooth(fast), dashed=True),
        )
        panels.append(plots.Panel(f"Seed {seed}, mean of {SMOOTH} steps", "loss", both))
        most = np.maximum.accumulate(difference)
        apart.append(plots.Curve(f"seed {seed}", steps, np.maximum(most, 1e-9)))
    title = "Largest difference so far"
    panels.append(plots.Panel(title, "|fast - reference| / reference", apart))
    return plots.curves(panels, "step")


def _smooth(values: Any) -> Any:
    """Average over the last steps; over those there are at the beginning."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    begin = np.maximum(np.arange(1, len(values) + 1) - SMOOTH, 0)
    return (total[1:] - total[begin]) / (np.arange(1, len(values) + 1) - begin)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", nargs="*", type=Path, default=[])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--kernels", nargs="*", default=["reference", "auto"])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=13)
    parser.add_argument("--capacity", type=int, default=768)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--loss", default="universal", help="as the MACE-MP models have it")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--channels", type=int, help="instead of those of the preset")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prepared", type=Path, help="kept: data are prepared once for all")
    add_rows(parser, "agreement-rows")
    parser.add_argument("--notes", default="", help="text below the table")
    arguments = parser.parse_args()
    if arguments.collect:
        device = "cpu" if arguments.device == "cpu" else "cuda"
        collect(arguments.collect, arguments.results, device, arguments.notes)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
