"""Epochs of a mixed data set on one and on many GPUs: strong and weak scaling of MACE.

    torchrun --nproc-per-node 8 -m benchmarks.mace.scaling --data ../data/*.xyz.gz --out rows
    python -m benchmarks.mace.scaling --collect rows [--with an_earlier_result.json]

What is timed are steps of `bevatron.train.loop.fit`, with its loader, gradients summed over the
ranks, clipping, Adam and moving average: the steps after the first epoch (captured) or after the
first ten (launched one by one). Shapes of batches may still be captured at the start of an epoch:
"efficiency" counts every step (as run; "capture s" is the part of all of them that went into
that), "settled" leaves out the first ten of each epoch. A case is ``batching:kernels``;
``reference`` is plain PyTorch with every step launched one by one, which is how e3nn works,
``auto`` the fast kernels with captured steps. Batches of a fixed count hold as many structures as
fill the capacity on average. Strong: the same data on all numbers of GPUs (plain PyTorch: one of
``--thin-reference`` structures); ``weak:batching:kernels``: one copy of the data for each GPU, on
one GPU the same as strong.

The pictures correspond to Figures 6 (strong scaling), 7 (weak scaling) and 10 (batching and
kernels, separately and together) of Firoz et al. (arXiv:2504.10700).
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common.arguments import add_rows, read_rows, script_parser
from benchmarks.common.report import RESULTS, add_picture, write_result

from bevatron import kernels
from bevatron.data.dataset import Dataset, Subset
from bevatron.data.packing import pack
from bevatron.models.mace import MACE, LossConfig, MaceConfig, MaceTask, statistics
from bevatron.parallel.mesh import Mesh, open_mesh
from bevatron.recipes.mace.data import DataConfig, batch_sizes, load_structures
from bevatron.recipes.mace.step_cost import TERMS, StepCost, fit_cost
from bevatron.train.logger import read_journal
from bevatron.train.loop import fit
from bevatron.train.report import plots
from bevatron.train.run import Run
from bevatron.train.settings import (
    BatchConfig,
    CheckpointConfig,
    LoaderConfig,
    OptimConfig,
    ScheduleConfig,
    Settings,
    TrainConfig,
)

WARM_UP = 10
"""Steps until launched ones have settled; and of an epoch, until no more shapes are captured."""
CASES = ("fixed_count:reference", "balanced:reference", "fixed_count:auto", "algorithm1:auto")
CASES += ("balanced:auto",)

STEPS = {
    "fixed_count:reference": "fixed count, plain",
    "balanced:reference": "balanced, plain",
    "fixed_count:auto": "fixed count, fast kernels",
    "algorithm1:auto": "Algorithm 1, fast kernels",
    "balanced:auto": "balanced, fast kernels",
}


def prepared_data(files: Sequence[Path], cutoff: float, folder: Path) -> tuple[Dataset, Any]:
    """Prepare the structures, or open a prepared store, with the statistics that a model needs."""
    config = DataConfig(train=tuple(files), valid_size=0.0)
    train = load_structures(config, cutoff, folder).train
    return train, statistics(train)


def make_run(
    train: Dataset, found: Any, case: str, folder: Path, arguments: argparse.Namespace
) -> Run:
    batching, implementation = case.split(":")
    config = MaceConfig.preset(arguments.preset).with_data(
        atomic_numbers=found.atomic_numbers,
        atomic_energies=found.atomic_energies,
        avg_num_neighbors=found.avg_num_neighbors,
    )
    sizes = batch_sizes(train)
    captured = implementation != "reference"
    settings = Settings(
        optim=OptimConfig(lr=1e-4, ema=0.99),
        schedule=ScheduleConfig(kind="constant"),
        batch=BatchConfig(
            algorithm=batching,  # type: ignore[arg-type]
            capacity=arguments.capacity,
            size=round(arguments.capacity / float(sizes["atoms"].mean())),
            cost={"atoms": 1.0, "edges": arguments.cost_edges if batching == "balanced" else 0.0},
        ),
        loader=LoaderConfig(workers=arguments.workers),
        checkpoint=CheckpointConfig(every_epochs=None),
        train=TrainConfig(
            epochs=arguments.epochs if captured else 1,
            dtype="float32",
            device=arguments.device,
            cuda_graphs=captured and arguments.device != "cpu",
            explode_factor=None,
        ),
    )
    torch.manual_seed(0)
    return Run(MACE(config), MaceTask(LossConfig()), train, sizes, folder, settings)


def measured(run: Run, case: str, mesh: Mesh, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, and read the times of the steps from the journal."""
    with kernels.use(case.split(":")[1]):
        result = fit(run)
    if result.stopped_by is not None:
        raise SystemExit(f"{case}: stopped by {result.stopped_by}, so there is no row of it")
    records = [r for r in read_journal(run.folder / "metrics.jsonl") if r["kind"] == "step"]
    epochs = run.settings.train.epochs
    first = sum(record["epoch"] == records[0]["epoch"] for record in records)
    steady = records[first if epochs > 1 else min(WARM_UP, first // 4) :]
    per_epoch = len(steady) // (epochs - 1) if epochs > 1 else first
    seconds = np.array([record["time"]["seconds"] for record in steady])
    settled = seconds
    if epochs > 1:
        settled = seconds[settled_steps([record["epoch"] for record in steady])]
    waited = sum(r["time"]["seconds"] * r["time"]["wait_share"] for r in steady)
    capturing = sum(r["time"].get("capture", 0.0) for r in steady)
    atoms = int(run.sizes["atoms"].sum())
    batch = run.settings.batch
    cost = run.sizes["atoms"] + arguments.cost_edges * run.sizes["edges"]
    plan = pack(
        run.sizes["atoms"],
        batch.capacities(run.sizes)["atoms"],
        mesh.world,
        algorithm=batch.algorithm,
        balance=cost,
        batch_size=batch.size if batch.algorithm == "fixed_count" else None,
    )
    epoch_seconds = float(seconds.mean() * per_epoch)
    row: dict[str, Any] = {}
    if mesh.world == 1 and len(steady) > len(TERMS):
        costs = [StepCost(r["sizes"], r["time"]["seconds"], 0) for r in steady]
        row["cost"], row["cost error"] = fit_cost(costs)
    return row | {
        "case": case,
        "GPUs": mesh.world,
        "structures": len(run.train),
        "steps": per_epoch,
        "counted": len(steady),
        "ms/step": round(1e3 * float(seconds.mean()), 2),
        "settled ms": round(1e3 * float(settled.mean()), 2),
        "median": round(1e3 * float(np.median(seconds)), 2),
        "epoch s": round(epoch_seconds, 3),
        "capture s": round(capturing, 2),
        "atoms/s": round(atoms / epoch_seconds),
        "waited %": round(100 * waited / float(seconds.sum()), 1),
        "slowest/mean": round(float(plan.imbalance), 3),
        "fill": round(float(plan.fill), 3),
    }


def settled_steps(epochs: Sequence[int]) -> np.ndarray:
    """Select steps after the first ones of their epoch; all, if that would leave none."""
    place = np.array([i - epochs.index(epoch) for i, epoch in enumerate(epochs)])
    late = place >= WARM_UP
    return late if late.any() else ~late


def copies(train: Dataset, number: int) -> Dataset:
    """Repeat the data, every sample under several indices."""
    return Subset(train, np.tile(np.arange(len(train)), number))


def thinned(train: Dataset, every: int) -> Dataset:
    """Keep every `every`-th sample, of all sizes alike."""
    return Subset(train, np.arange(0, len(train), every))


def measure(arguments: argparse.Namespace) -> None:
    """Run all cases on the GPUs of this job; the first rank writes a file of rows."""
    with open_mesh(arguments.device) as mesh:
        folder = arguments.scratch or arguments.out / "scratch"  # the same on all ranks
        preset = MaceConfig.preset(arguments.preset)
        train, found = prepared_data(arguments.data, preset.r_max, folder / "prepared")
        if arguments.take:
            train = Subset(train, np.arange(arguments.take))
        rows = []
        for wanted in arguments.cases:
            case = wanted.removeprefix("weak:")
            kind = "strong" if case == wanted else "weak"
            fast = not case.endswith("reference")
            number = mesh.world if kind == "weak" else arguments.strong_copies if fast else 1
            data = copies(train, number) if fast else thinned(train, arguments.thin_reference)
            make = partial(make_run, data, found, case, arguments=arguments)
            run = make(folder / f"run-{mesh.world}-{kind}-{case.replace(':', '-')}")
            row = measured(run, case, mesh, arguments)
            rows.append({"scaling": kind, "copies": number, **row})
            if mesh.is_main:
                print(rows[-1], flush=True)
                arguments.out.mkdir(parents=True, exist_ok=True)
                path = arguments.out / f"rows-{mesh.world}.json"
                path.write_text(json.dumps(rows))


Rows = list[dict[str, Any]]


def collect(folder: Path, earlier: Sequence[Path], results: Path = RESULTS) -> None:
    """Join the rows of all numbers of GPUs, add efficiencies, write the result and pictures."""
    rows: Rows = read_rows(folder)
    rows += weak_on_one(rows)
    with_ratios(rows)
    sources = []
    for path in earlier:
        result = json.loads(path.read_text())
        origin = f"{result['hardware']} {result['date']}"
        taken = _further(rows, result["rows"])
        sources.append(
            f"Rows marked {origin} are of an earlier run and code, their efficiencies relative to "
            f"one GPU there: {result['notes']}"
        )
        rows += [{**row, "measured": origin} for row in taken]
    rows.sort(key=lambda row: (row["scaling"], row["case"], row["GPUs"]))
    costs = {}
    for row in rows:
        cost, error = row.pop("cost", None), row.pop("cost error", None)
        if cost is not None and row["scaling"] == "strong":
            costs[row["case"]] = {**cost, "relative error": error}
    print(json.dumps(costs, indent=1))
    (folder / "costs.json").write_text(json.dumps(costs))
    notes = " ".join([*(__doc__ or "").split("\n\n")[2:4], *sources]).replace("\n", " ")
    written = write_result(
        "mace/scaling", rows, notes=notes, device="cuda" if torch.cuda.is_available() else "cpu",
        extra={"costs": costs}, folder=results,
    )  # fmt: skip
    for name, figure in pictures(rows).items():
        add_picture(figure, written, name)


def weak_on_one(rows: Rows) -> Rows:
    """Return rows of one GPU and one copy of the data as what weak scaling begins with."""
    weak = {row["case"] for row in rows if row["scaling"] == "weak"}
    weak -= {row["case"] for row in rows if row["scaling"] == "weak" and row["GPUs"] == 1}
    alone = [r for r in rows if r["scaling"] == "strong" and r["GPUs"] == r["copies"] == 1]
    return [{**row, "scaling": "weak"} for row in alone if row["case"] in weak]


def _further(rows: Rows, earlier: Rows) -> Rows:
    """Return earlier rows of numbers of GPUs that were not measured now; void ones are left out."""
    now = {(row["scaling"], row["case"], row["GPUs"]) for row in rows}
    found = []
    for row in earlier:
        key = row["scaling"], row["case"], row["GPUs"]
        if key not in now and isinstance(row["atoms/s"], int | float):
            found.append({("median" if k == "median ms" else k): v for k, v in row.items()})
    return found


def with_ratios(rows: Rows) -> None:
    """Add efficiencies, by all, by settled and by median steps, and ratios to plain fixed counts.

    The base is the same case on one GPU; for weak scaling without such a row the strong one, whose
    batches are alike.
    """
    single = {(r["scaling"], r["case"]): r for r in rows if r["GPUs"] == 1}
    fixed = {r["GPUs"]: r["atoms/s"] for r in rows if r["case"] == "fixed_count:reference"}
    for row in rows:
        own = single.get((row["scaling"], row["case"])) or single.get(("strong", row["case"]))
        if own:
            row["efficiency %"] = round(100 * row["atoms/s"] / (own["atoms/s"] * row["GPUs"]), 1)
            for name, column in (("settled", "settled ms"), ("by medians", "median")):
                if column in row and column in own:
                    rate = steady_rate(row, column) / (steady_rate(own, column) * row["GPUs"])
                    row[f"efficiency {name} %"] = round(100 * rate, 1)
        if row["GPUs"] in fixed:
            row["over fixed count, reference"] = round(row["atoms/s"] / fixed[row["GPUs"]], 2)


def steady_rate(row: Mapping[str, Any], column: str = "median") -> float:
    """Atoms per second if every step took the median time, or another column's."""
    return float(row["atoms/s"] * row["ms/step"] / row[column])


def pictures(rows: Rows) -> dict[str, Any]:
    """Draw strong and weak scaling and what batching and kernels give, of one run and code."""
    figures, rows = {}, [row for row in rows if "measured" not in row]
    for kind in ("strong", "weak"):
        own = [row for row in rows if row["scaling"] == kind]
        if len({row["GPUs"] for row in own}) > 1:
            figures[kind] = _scaling(own, kind)
    most = max(row["GPUs"] for row in rows)
    strong = {r["case"]: r for r in rows if r["scaling"] == "strong" and r["GPUs"] == most}
    base = strong.get("fixed_count:reference")
    if base is not None:
        names = {case: words for case, words in STEPS.items() if case in strong}
        figures["ablation"] = plots.bars(
            list(names.values()),
            {
                "all steps": [strong[c]["atoms/s"] / base["atoms/s"] for c in names],
                "median step": [steady_rate(strong[c]) / steady_rate(base) for c in names],
            },
            f"atoms per second over fixed-count batches with plain PyTorch, {most} GPUs",
            "What batching and kernels give",
        )
    return figures


def _scaling(rows: Rows, kind: str) -> Any:
    rates, efficiencies = [], []
    for case in dict.fromkeys(row["case"] for row in rows):
        own = sorted((row for row in rows if row["case"] == case), key=lambda row: row["GPUs"])
        gpus, name = [row["GPUs"] for row in own], STEPS.get(case, case)
        rates.append(plots.Curve(name, gpus, [row["atoms/s"] for row in own]))
        if "efficiency by medians %" in own[0]:
            shares = [row["efficiency by medians %"] for row in own]
            efficiencies.append(plots.Curve(name, gpus, shares))
    title = f"{kind.capitalize()} scaling"
    panels = [
        plots.Panel(title, "atoms per second", rates),
        plots.Panel(
            "Efficiency, median steps", "% of one GPU", efficiencies, logarithmic=False,
            from_zero=True,
        ),
    ]  # fmt: skip
    return plots.curves(panels, "GPUs", logarithmic_x=True)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", nargs="*", type=Path, default=[])
    parser.add_argument("--cases", nargs="*", default=["weak:balanced:auto", *CASES])
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--capacity", type=int, default=3072)
    parser.add_argument("--cost-edges", type=float, default=0.0)
    parser.add_argument("--strong-copies", type=int, default=4)
    parser.add_argument(
        "--thin-reference",
        type=int,
        default=1,
        help="plain PyTorch: keep one structure of this number",
    )
    parser.add_argument("--epochs", type=int, default=3, help="captured steps: the first warms up")
    parser.add_argument("--take", type=int, default=0, help="only this number of structures")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scratch", type=Path, help="OUT/scratch if not given")
    add_rows(parser, "scaling-rows")
    parser.add_argument("--with", dest="earlier", nargs="*", type=Path, default=[])
    arguments = parser.parse_args()
    if arguments.collect:
        collect(arguments.collect, arguments.earlier, arguments.results)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
