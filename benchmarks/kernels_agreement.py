"""Training with the fast kernels beside training with the reference: losses step by step.

    python benchmarks/kernels_agreement.py --data ../data/mptrj_random_1k.extxyz.gz [--steps 500]

The same model, data, seed and batches in float32, once with ``reference`` kernels (plain PyTorch)
and once with ``auto`` (Triton, captured steps); then both with another seed of the weights. The
losses of the first 100 steps are compared one by one. Later two runs drift apart as any two runs
with other rounding do, so the mean loss of the last 50 steps is set beside its spread over seeds.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from report import write_result

from bevatron.recipes import recipe
from bevatron.recipes.mace import build
from bevatron.train.journal import read_journal
from bevatron.train.loop import fit

LAST = 50


def losses(implementation: str, seed: int, folder: Path, arguments: argparse.Namespace) -> Any:
    """Train for some steps; return the loss of every step."""
    output = folder / f"{implementation}-{seed}"
    fast = implementation != "reference"
    values: dict[str, Any] = {
        "output": str(output),
        "preset": arguments.preset,
        "data": {
            "train": [str(path) for path in arguments.data],
            "prepared": str(folder / "prepared"),
            "valid_fraction": 0.0,
        },
        "optim": {"lr": arguments.lr, "ema": None, "clip": 10.0},
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
            "cuda_graphs": (fast and arguments.device != "cpu") or False,
            "explode_factor": None,
        },
        "report": False,
    }
    fit(build(recipe("mace")[0].from_values(values)))
    journal = read_journal(output / "metrics.jsonl")
    return np.array([r["loss"] for r in journal if r["kind"] == "step"])[: arguments.steps]


def main() -> None:
    """Train all runs and write the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", nargs="+", type=Path, required=True)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=13)
    parser.add_argument("--capacity", type=int, default=768)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    rows, found = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in arguments.seeds:
            for implementation in ("reference", "auto"):
                found[implementation, seed] = losses(implementation, seed, Path(scratch), arguments)
            one, two = found["reference", seed], found["auto", seed]
            apart = np.abs(one - two) / np.abs(one)
            rows.append(
                {
                    "seed": seed,
                    "steps": len(one),
                    "largest relative difference, 100 steps": f"{apart[:100].max():.1e}",
                    "over all steps": f"{apart.max():.1e}",
                    f"mean of the last {LAST}, reference": round(float(one[-LAST:].mean()), 5),
                    "fast kernels": round(float(two[-LAST:].mean()), 5),
                }
            )
            print(rows[-1], flush=True)
    spread = np.std([found["reference", s][-LAST:].mean() for s in arguments.seeds])
    notes = f"{(__doc__ or '').split(chr(10) * 2)[-1]} Spread over seeds (std): {spread:.4g}."
    losses_of = {f"{name}, seed {seed}": list(map(float, v)) for (name, seed), v in found.items()}
    device = "cpu" if arguments.device == "cpu" else "cuda"
    write_result("kernels_agreement", rows, notes, device=device, extra={"losses": losses_of})


if __name__ == "__main__":
    main()
