"""Does GPS++ learn as published? Validation error against time, in 2D and 3D, hybrid against MPNN.

    python -m benchmarks.gpspp.learning STORE --model gpspp-8 --inputs 3d --epochs 50 --out rows
    python -m benchmarks.gpspp.learning STORE --model gpspp-8-mpnn --inputs 2d --epochs 50
    python -m benchmarks.gpspp.learning STORE --epochs 25 --save models/gap
    python -m benchmarks.gpspp.learning OTHER --epochs 50 --start-from models/gap --lr 1e-4
    python -m benchmarks.gpspp.learning --collect rows

The store is made by `bevatron prepare` (QM9's gap, SMILES with positions), so that no rdkit is
needed here. One configuration per process; several run side by side with CUDA_VISIBLE_DEVICES.
``3d`` trains with positions, masked as published (1:3:1); ``2d`` with a model that has nothing for
positions. Attention without any 3D input trains at half the rate, as the paper does. Every run ends
with its learning rate at zero and is then tested.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.arguments import add_rows, add_set, change, read_all
from benchmarks.common.report import add_picture, hardware, spread, versions, write_result
from benchmarks.common.training import epochs_walked, whole_schedule

from bevatron.files import write_text_atomically
from bevatron.models.gpspp import save_model
from bevatron.recipes.gpspp.data import load_molecules
from bevatron.recipes.gpspp.report import evaluate_molecules
from bevatron.recipes.gpspp.run import GpsppRun, build
from bevatron.train.loop import fit
from bevatron.train.report import plots
from bevatron.train.report.plots import Curve, Panel

NO_POSITIONS = {"distance_bias": False, "distance_sum": False, "bond_lengths": False}
RATE = 4e-4
Groups = dict[tuple[str, str, str, str, float], list[dict[str, Any]]]
"""Runs by model, inputs, changes, the model begun with and learning rate."""

NOTES = (
    "Mean absolute error in meV on molecules that were not trained on, after the last step; mean ± "
    "standard deviation where there are several seeds. 3D: positions instead of shortest paths "
    "are seen. Morgan fingerprints with ridge regression reach 417 meV on QM9's gap."
)


def configuration(arguments: argparse.Namespace, folder: Path) -> GpsppRun:
    hybrid_2d = arguments.inputs == "2d" and not arguments.model.endswith("-mpnn")
    values: dict[str, Any] = {
        **whole_schedule(arguments.epochs, arguments.evaluate_every, arguments.warmup),
        "output": str(folder / "run"),
        "preset": arguments.model,
        "data": {
            "train": [str(arguments.store)],
            "split": "random",
            "split_seed": 0,
            "train_size": arguments.train_size,
            "valid_size": arguments.valid_size,
            "test_size": arguments.test_size,
        },
        "model": NO_POSITIONS if arguments.inputs == "2d" else {},
        "optim": {"lr": arguments.lr or (RATE / 2 if hybrid_2d else RATE)},
        "molecules": arguments.molecules,
        "loader": {"workers": arguments.workers},
    }
    values["train"] |= {"seed": arguments.seed, "device": arguments.device}
    if arguments.start_from is not None:
        values["start_from"] = str(arguments.start_from)
    change(values, arguments.set)
    return GpsppRun.from_values(values)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bevatron-") as scratch:
        config = configuration(arguments, Path(scratch))
        run = build(config)
        result = fit(run)
        curve = epochs_walked(config.output)
        data = load_molecules(config.data, config.output / "prepared")
    model: Any = run.model
    target = model.config.targets[0].name
    if arguments.save is not None:
        save_model(model, arguments.save)
    modes = ("2d", "3d") if arguments.inputs == "3d" else ("2d",)
    device = next(model.parameters()).device
    # Tested as it was trained and validated: matmuls in bfloat16 on a GPU.
    narrow = run.settings.train.autocast is not None
    test = {}
    if data.test is not None:
        with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
            found = evaluate_molecules(model.eval(), data.test, modes, device, 65536)
        test = {m: 1e3 * found.metrics[f"{'3d/' * (m == '3d')}{target}_mae"] for m in modes}
    curve = [row(record, target) for record in curve]
    return {
        "name": label(arguments),
        "model": arguments.model,
        "inputs": arguments.inputs,
        "seed": arguments.seed,
        "target": target,
        "lr": config.optim.lr,
        "set": arguments.set,
        "start_from": None if arguments.start_from is None else arguments.start_from.name,
        "molecules": config.molecules,
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_molecules": len(run.train),
        "epochs": len(curve),
        "steps": result.steps,
        "training_seconds": curve[-1]["seconds"],
        "total_seconds": time.perf_counter() - began,
        "test_mae_mev": test,
        "curve": curve,
        "device": arguments.device,
        "hardware": hardware("cuda" if device.type == "cuda" else "cpu"),
        "versions": versions(),
    }


def row(record: dict[str, Any], target: str) -> dict[str, Any]:
    """Pick what a learning curve is made of."""
    valid = record["valid"]
    both = {"2d": f"{target}_mae", "3d": f"3d/{target}_mae"}
    errors = {f"valid_mae_{mode}_mev": 1e3 * valid[k] for mode, k in both.items() if k in valid}
    return {
        "seconds": record["elapsed"],
        "epoch": record["epoch"] + 1,
        "step": record["step"],
        "train_loss": record["loss"],
        "train_target_loss": record["terms"].get("targets"),
        "molecules_per_s": record["time"].get("molecules_per_s"),
        "wait_share": record["time"]["wait_share"],
        **errors,
    }


def label(arguments: argparse.Namespace) -> str:
    changes = "".join(f"-{change.split('.')[-1].replace('=', '-')}" for change in arguments.set)
    rate = "" if arguments.lr is None else f"-lr{arguments.lr:g}"
    begun = "" if arguments.start_from is None else "-finetuned"
    return f"{arguments.model}-{arguments.inputs}-{arguments.seed}{rate}{begun}{changes}"[:120]


def collect(folder: Path, out: Path, name: str, note: str) -> None:
    runs = [run for run in read_all(folder) if "curve" in run]
    if not runs:
        raise SystemExit(f"{folder}: holds no results")
    groups = grouped(runs)
    rows = []
    for (model, inputs, changes, start, lr), members in sorted(groups.items()):
        last = [run["curve"][-1] for run in members]
        rows.append(
            {
                "model": model,
                "trained with": "3D masked 1:3:1" if inputs == "3d" else "no 3D",
                **({"changes": changes.replace("model.", "")} if any(k[2] for k in groups) else {}),
                **({"begun": start or "from scratch"} if any(key[3] for key in groups) else {}),
                "parameters": f"{members[0]['parameters'] / 1e6:.1f} M",
                "lr": lr,
                "seeds": len(members),
                "valid 2D": spread([one.get("valid_mae_2d_mev") for one in last]),
                "valid 3D": spread([one.get("valid_mae_3d_mev") for one in last]),
                "test 2D": spread([run["test_mae_mev"].get("2d") for run in members]),
                "test 3D": spread([run["test_mae_mev"].get("3d") for run in members]),
                "train (normalised)": spread([one["train_target_loss"] for one in last], 4),
                "epochs": round(statistics.mean(run["epochs"] for run in members)),
                "minutes": statistics.mean(run["training_seconds"] for run in members) / 60,
                "molecules/s": spread([median_rate(run) for run in members], 0),
                "on": members[0]["hardware"],
            }
        )
    path = write_result(
        name,
        rows,
        f"{NOTES} {note}".rstrip(),
        extra={"runs": runs},
        folder=out,
        measured_on=runs[0],
    )
    add_picture(draw(groups), path)


def grouped(runs: Sequence[dict[str, Any]]) -> Groups:
    """Put runs together that differ in their seed alone."""
    groups: Groups = defaultdict(list)
    for run in runs:
        changes, start = " ".join(run["set"]), run.get("start_from") or ""
        groups[run["model"], run["inputs"], changes, start, run["lr"]].append(run)
    return groups


def median_rate(run: dict[str, Any]) -> float | None:
    """Return the molecules trained on in a second, of the median epoch."""
    rates = [one["molecules_per_s"] for one in run["curve"] if one["molecules_per_s"]]
    return statistics.median(rates) if rates else None


def draw(groups: Groups) -> Any:
    """Draw validation errors, the mean over seeds, against epochs."""
    panels = []
    several = len({key[2] for key in groups if not key[3]}) > 1
    for mode, title in (("2d", "Seen in 2D"), ("3d", "Seen in 3D")):
        key = f"valid_mae_{mode}_mev"
        lines = []
        for (model, inputs, changes, start, _), members in sorted(groups.items()):
            curves = [[one for one in run["curve"] if key in one] for run in members]
            length = min(map(len, curves))
            if not length:
                continue
            errors = [
                statistics.mean(curve[place][key] for curve in curves) for place in range(length)
            ]
            epochs = [one["epoch"] for one in curves[0][:length]]
            with_3d = "3D masked" if inputs == "3d" else "no 3D"
            begun = ("fine-tuned" if start else "from scratch") if any(k[3] for k in groups) else ""
            parts = (model, with_3d, changes if several else "", begun)
            label = " ".join(part for part in parts if part)
            lines.append(Curve(label, epochs, errors, dashed=inputs == "2d"))
        if lines:
            panels.append(Panel(title, "validation MAE (meV)", lines))
    return plots.curves(panels, "epochs")


def workers() -> int:
    """Return this GPU's share of the cores, eight at most; none on a CPU."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
        gpus = len(listed.stdout.splitlines())
        return max(1, min(8, (os.cpu_count() or 1) // max(gpus, 1) - 1))
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("store", type=Path, nargs="?")
    add_rows(parser, "gpspp-learning-rows")
    parser.add_argument("--model", default="gpspp-8")
    parser.add_argument("--inputs", choices=["3d", "2d"], default="3d")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--warmup", type=float, default=0.05, help="share of the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--molecules", type=int, default=1024, help="of a step")
    parser.add_argument("--train-size", type=int, default=110_000)
    parser.add_argument("--valid-size", type=int, default=10_000)
    parser.add_argument("--test-size", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=workers(), help="of the loader")
    parser.add_argument("--evaluate-every", type=int, default=2, help="epochs")
    parser.add_argument("--device", default="auto")
    add_set(parser)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the trained model")
    parser.add_argument("--start-from", type=Path, metavar="FOLDER", help="a model to fine-tune")
    parser.add_argument("--name", default="gpspp/learning", help="of a collected result")
    arguments = parser.parse_args()
    if arguments.collect is not None:
        collect(arguments.collect, arguments.results, arguments.name, arguments.note)
        return
    if arguments.store is None or arguments.epochs is None:
        parser.error("expected a STORE and --epochs (or --collect FOLDER)")
    result = measure(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{result['name']}.json"
    write_text_atomically(path, json.dumps(result, indent=1) + "\n")
    shown = {k: result[k] for k in ("name", "epochs", "training_seconds", "test_mae_mev")}
    print(json.dumps({**shown, "last": result["curve"][-1]}), path)


if __name__ == "__main__":
    main()
