"""Side by side with mace-torch: speed, the first losses, and what is learned from real data.

    python -m benchmarks.mace.mace_torch speed                    about 3 minutes on 2 cores
    python -m benchmarks.mace.mace_torch learn --work FOLDER      about 30 minutes on one core

Both sides have the same data, split, batches, architecture, first weights, loss and optimiser
(`mace_torch_plan.py`). mace-torch (`mace_torch_peer.py`) runs in a virtual environment of its own,
`.venv-parity`, which ``make parity`` creates; ours (`mace_torch_ours.py`) is the shipped trainer.
Each is a process of its own with the same number of threads. ``learn`` keeps finished trainings in
FOLDER and goes on where it stopped.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.report import write_result
from benchmarks.mace.mace_torch_plan import DATASETS, SEEDS, TRAINING, write_plan

ROOT = Path(__file__).resolve().parents[2]
SIDES = {
    "mace-torch": (ROOT / ".venv-parity/bin/python", "benchmarks.mace.mace_torch_peer"),
    "bevatron": (Path(sys.executable), "benchmarks.mace.mace_torch_ours"),
}
NUM_LOSSES = 50
SPEED_BATCHES = 45
WARM_UP_BATCHES = 4
TOLERANCE = {"float64": 1e-9, "float32": 2e-3}
"""Largest difference of forces, eV/Å, above which timings are void."""


class Side:
    """One of the two programs, waiting for requests."""

    def __init__(self, name: str, folder: Path, dataset: str, threads: int) -> None:
        self.process = subprocess.Popen(
            command(name, "serve", folder, dataset),
            env=environment(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.name = name
        self.about = self._answer()

    def ask(self, what: str, dtype: str, batches: list[list[int]]) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"what": what, "dtype": dtype, "batches": batches}))
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.name} ended with exit code {self.process.wait()}")

    def close(self) -> None:
        """End the program."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def command(side: str, *arguments: Any) -> list[str]:
    python, module = SIDES[side]
    if not python.exists():
        raise SystemExit(f"{python}: missing; `make parity` creates the environment of mace-torch")
    return [str(python), "-W", "ignore", "-m", module, *map(str, arguments)]


def environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def speed(work: Path, dataset: str, repeats: int) -> None:
    """Time training and inference, one side after the other, in turn."""
    plan = json.loads((work / "plan.json").read_text())
    batches = plan["batches"]["0"][0][:SPEED_BATCHES]
    warm_up, loads = batches[:WARM_UP_BATCHES], [os.getloadavg()]
    rows: list[dict[str, Any]] = []
    seconds: list[dict[str, list[float]]] = []
    versions: dict[str, str] = {}
    for threads in (1, 2):
        # The first side writes the weights that the other converts.
        sides = [Side(name, work, dataset, threads) for name in SIDES]
        for side in sides:
            versions |= side.about["versions"]
        for dtype in ("float64", "float32"):
            check_outputs(sides, dtype, warm_up)
            for side in sides:
                for what in ("train", "infer", "train", "infer"):
                    side.ask(what, dtype, warm_up)
            for what in ("train", "infer"):
                times: dict[str, list[float]] = {side.name: [] for side in sides}
                for repeat in range(repeats):
                    for side in sides if repeat % 2 == 0 else reversed(sides):
                        times[side.name].append(side.ask(what, dtype, batches)["seconds"])
                seconds.append(times)
                rows.append(speed_row(what, dtype, threads, times))
                print(rows[-1], flush=True)
        for side in sides:
            side.close()
    loads.append(os.getloadavg())
    extra = {"seconds": seconds, "load_average": loads, "repeats": repeats}
    write_speed(rows, dataset, versions, extra)


def check_outputs(sides: list[Side], dtype: str, batches: list[list[int]]) -> None:
    """Compare forces and energies before anything is trained; a wrong model's speed is void."""
    theirs, ours = (side.ask("outputs", dtype, batches) for side in sides)
    difference = max(
        abs(a - b)
        for one, other in zip(theirs["forces"], ours["forces"], strict=True)
        for a, b in zip(one, other, strict=True)
    )
    if not difference <= TOLERANCE[dtype]:
        raise SystemExit(f"{dtype}: forces differ by {difference:.2e} eV/Å; no timing")


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


def learn(work: Path, jobs: int) -> None:
    """Run what is missing of both sides' trainings, some at once, and compare."""
    plan = json.loads((work / "plan.json").read_text())
    pairs = [(dataset, seed) for dataset in DATASETS for seed in SEEDS]
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda pair: train_both(work, *pair), pairs))
    write_learning(results, plan)


def train_both(work: Path, dataset: str, seed: int) -> dict[str, Any]:
    """Train mace-torch, then bevatron from the same weights, unless that is done already."""
    folder, result = work / f"{dataset}-{seed}", {"dataset": dataset, "seed": seed}
    for side, file in (("mace-torch", "learn.json"), ("bevatron", "bevatron.json")):
        if not (folder / file).exists():
            print(f"{side}: {dataset}, seed {seed}", flush=True)
            arguments = command(side, "learn", work, dataset, seed)
            subprocess.run(arguments, env=environment(1), check=True, stdout=subprocess.DEVNULL)
        result[side] = json.loads((folder / file).read_text())
    return result


def largest_loss_difference(result: dict[str, Any]) -> float:
    """Largest relative difference of the first losses."""
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
    """Test errors of a data set over all seeds."""
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
    """Keep of each run what fits into a file that people read."""

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
    parser.add_argument("--work", type=Path, help="folder for plan, weights and trainings")
    parser.add_argument("--dataset", choices=tuple(DATASETS), default="acac")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once, of one thread each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        if not (work / "plan.json").exists():
            write_plan(work, args.data)
        begin = time.monotonic()
        if args.what == "speed":
            speed(work, args.dataset, args.repeats)
        else:
            learn(work, args.jobs)
        print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
