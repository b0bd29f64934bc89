"""Comparison with mace-torch: speed, first losses, and accuracy on real data.

    .venv-parity/bin/python -m benchmarks.mace.mace_torch speed       about 3 minutes on 2 cores
    .venv-parity/bin/python -m benchmarks.mace.mace_torch learn --work FOLDER     30 on one core

Both sides have the same data, split, batches, architecture, initial weights, loss and optimiser
(`mace_torch_plan.py`). mace-torch (`mace_torch_peer.py`) needs a separate environment, which
``make parity`` creates; ours (`mace_torch_ours.py`) is the shipped trainer. ``learn`` keeps
finished trainings in FOLDER and continues where it stopped.
"""

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.report import write_result
from benchmarks.mace import mace_torch_ours, mace_torch_peer
from benchmarks.mace.mace_torch_ours import Ours, Timed
from benchmarks.mace.mace_torch_peer import Peer
from benchmarks.mace.mace_torch_plan import DATASETS, SEEDS, TRAINING, make_plan

from bevatron import kernels
from bevatron.files import write_json_atomically

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("mace-torch", "bevatron")
NUM_LOSSES = 50
SPEED_BATCHES = 45
WARM_UP_BATCHES = 4
TOLERANCE = {"float64": 1e-9, "float32": 2e-3}
"""Largest difference of forces, eV/Å, above which timings are void."""


def speed(plan: dict[str, Any], work: Path, dataset: str, repeats: int) -> None:
    """Time training and inference, alternating between the sides."""
    batches = plan["batches"][0][0][:SPEED_BATCHES]
    warm_up, loads = batches[:WARM_UP_BATCHES], [os.getloadavg()]
    rows: list[dict[str, Any]] = []
    seconds: list[dict[str, list[float]]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for dtype in ("float64", "float32"):
            peer = Peer(plan, dataset, 0, dtype)
            ours = Ours(plan, dataset, 0, dtype, work, peer.initial())
            sides = peer, Timed(ours, work / f"speed-{dtype}")
            theirs, mine = (side.forces(warm_up[0]) for side in sides)
            difference = float((theirs - mine).abs().max())
            if not difference <= TOLERANCE[dtype]:
                raise SystemExit(f"{dtype}: forces differ by {difference:.2e} eV/Å; no timing")
            for side in sides:
                for what in ("train", "infer", "train", "infer"):
                    getattr(side, what)(warm_up)
            for what in ("train", "infer"):
                times: dict[str, list[float]] = {side.name: [] for side in sides}
                for repeat in range(repeats):
                    for side in sides if repeat % 2 == 0 else reversed(sides):
                        times[side.name].append(getattr(side, what)(batches))
                seconds.append(times)
                rows.append(speed_row(what, dtype, threads, times))
                print(rows[-1], flush=True)
    loads.append(os.getloadavg())
    versions = {**mace_torch_peer.versions(), **mace_torch_ours.versions()}
    extra = {"seconds": seconds, "load_average": loads, "repeats": repeats}
    write_speed(rows, dataset, versions, extra)


def speed_row(what: str, dtype: str, threads: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of each side, and the ratio; above 1 ours is faster."""
    theirs, ours = times["mace-torch"], times["bevatron"]
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    return {
        "": {"train": "training", "infer": "energies and forces"}[what],
        "precision": dtype,
        "threads": threads,
        "mace-torch (e3nn), s": statistics.median(theirs),
        "bevatron, s": statistics.median(ours),
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "of the fastest": min(theirs) / min(ours),
        "of single pairs": f"{min(ratios):.2f} to {max(ratios):.2f}",
    }


def write_speed(
    rows: list[dict[str, Any]], dataset: str, versions: dict[str, str], extra: dict[str, Any]
) -> None:
    count = SPEED_BATCHES * int(TRAINING["batch_size"])
    before, after = extra["load_average"]
    notes = (
        f"One epoch of {count} structures of {dataset} in batches of "
        f"{TRAINING['batch_size']}: medians of {extra['repeats']} alternating repetitions, ratio = "
        f"mace-torch / bevatron (above 1: ours is faster). {architecture()} Training: collation, "
        "forward, double backward, clipping, Adam, averaged weights. Before timing, forces of "
        "both agree to 1e-9 eV/Å in float64. Load average of the machine (1, 5, 15 minutes) "
        f"{before} before and {after} after; the runs themselves make 1 to 2 of it. "
        f"{', '.join(f'{name} {value}' for name, value in versions.items())}."
    )
    write_result("mace/mace_torch_speed", rows, notes, extra={"peer_versions": versions, **extra})


def learn(plan: dict[str, Any], work: Path) -> None:
    """Run the missing trainings of both sides, and compare."""
    torch.set_num_threads(1)
    results = [train_both(plan, work, name, seed) for name in DATASETS for seed in SEEDS]
    write_learning(results, plan)


def train_both(plan: dict[str, Any], work: Path, dataset: str, seed: int) -> dict[str, Any]:
    """Train mace-torch, then bevatron from the same weights, unless that is done already."""
    folder = work / f"{dataset}-{seed}"
    path = folder / "result.json"
    if not path.exists():
        print(f"{dataset}, seed {seed}", flush=True)
        peer = Peer(plan, dataset, seed, "float64")
        initial = peer.initial()
        result = {"dataset": dataset, "seed": seed, "mace-torch": mace_torch_peer.learn(peer)}
        ours = Ours(plan, dataset, seed, "float64", work, initial)
        result["bevatron"] = mace_torch_ours.learn(ours, folder)
        write_json_atomically(path, result)
    return json.loads(path.read_text())


def largest_loss_difference(result: dict[str, Any]) -> float:
    pairs = zip(result["mace-torch"]["losses"], result["bevatron"]["losses"], strict=True)
    return max(abs(a - b) / abs(a) for a, b in list(pairs)[:NUM_LOSSES])


def write_learning(results: list[dict[str, Any]], plan: dict[str, Any]) -> None:
    losses = [
        {
            "dataset": result["dataset"],
            "seed": result["seed"],
            "largest_relative_difference": largest_loss_difference(result),
        }
        for result in results
    ]
    rows = [summary(results, dataset) for dataset in DATASETS]
    training = plan["training"]
    worst = max(row["largest_relative_difference"] for row in losses)
    sizes = "; ".join(
        f"{name} {' + '.join(str(len(values[part])) for part in ('train', 'valid', 'test'))}"
        for name, values in plan["datasets"].items()
    )
    apart = max(
        abs(r["bevatron"]["test"]["rmse_f"] / r["mace-torch"]["test"]["rmse_f"] - 1)
        for r in results
    )
    peer = results[0]["mace-torch"]["versions"]
    notes = (
        f"Root mean square errors on the test part after {training['epochs']} epochs, averaged "
        f"weights of the last epoch: mean of seeds {', '.join(map(str, SEEDS))} (lowest to "
        f"highest); energies per atom. Structures for training, validation and test: {sizes}. "
        f"{architecture()} Adam with amsgrad, rate {training['lr']} times {training['gamma']} per "
        f"epoch, averaging {training['ema']}, clipping {training['clip']}, batches of "
        f"{training['batch_size']}, float64, loss energy : forces = {training['energy_weight']} : "
        f"{training['forces_weight']}, one thread. Both sides start from the same weights and see "
        "the same batches; ours is `bevatron.train.fit`. The first "
        f"{NUM_LOSSES} losses of all {len(losses)} pairs of runs agree to {worst:.1e} relative, "
        "and the runs stay together to the end: the final force errors of a pair differ by "
        f"{apart:.1e} relative at most. "
        f"{', '.join(f'{name} {value}' for name, value in peer.items())}."
    )
    extra = {"first_losses": losses, "runs": slim(results), "training": training}
    write_result("mace/mace_torch_learning", rows, notes, extra=extra)
    print(json.dumps(losses, indent=1))


def summary(results: list[dict[str, Any]], dataset: str) -> dict[str, Any]:
    errors = {
        side: {
            error: [r[side]["test"][error] * 1e3 for r in results if r["dataset"] == dataset]
            for error in ("rmse_f", "rmse_e_per_atom")
        }
        for side in SIDES
    }

    def cell(side: str, error: str) -> str:
        values = errors[side][error]
        return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    theirs, ours = (statistics.mean(errors[side]["rmse_f"]) for side in SIDES)
    return {
        "data": dataset,
        "forces meV/Å, mace-torch": cell("mace-torch", "rmse_f"),
        "bevatron": cell("bevatron", "rmse_f"),
        "bevatron / mace-torch": f"{ours / theirs:.4f}",
        "energy meV, mace-torch": cell("mace-torch", "rmse_e_per_atom"),
        "energy meV, bevatron": cell("bevatron", "rmse_e_per_atom"),
    }


def slim(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reduce each run to what fits into a readable file."""

    def short(run: dict[str, Any]) -> dict[str, Any]:
        return {**run, "losses": run["losses"][:NUM_LOSSES]}

    return [{**r, **{side: short(r[side]) for side in SIDES}} for r in results]


def architecture() -> str:
    return (
        "Model: 32x0e+32x1o, l_max 2, correlation 2, r_max 5 Å, 2 layers, 8 Bessel functions, "
        "non-residual first block."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("speed", "learn"))
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/mace")
    parser.add_argument("--work", type=Path, help="folder for stores and trainings")
    parser.add_argument("--dataset", choices=tuple(DATASETS), default="acac")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    plan, begin = make_plan(args.data), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, kernels.use("reference"):
        work = args.work or Path(temporary)
        if args.what == "speed":
            speed(plan, work, args.dataset, args.repeats)
        else:
            learn(plan, work)
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
