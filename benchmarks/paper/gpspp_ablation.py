"""What each part of GPS++ is worth: the ablations of the paper, trained at equal batch size.

Rows follow Tables 3 (inputs, noisy nodes and edges), 4 (chemical features), 6 (parts of a block)
and 7 (3D bias, 3D centrality and attention) of arXiv 2302.02947. All rows of a seed see the same
molecules; every run ends with its learning rate at zero.

    python -m benchmarks.paper.gpspp_ablation STORE --out ablation --epochs 10 --seeds 1
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
import torch
from benchmarks.paper.timed import Budget, fit_within

from bevatron.arguments import call
from bevatron.cli import one_sentence
from bevatron.config import load_yaml
from bevatron.data.store.store import MANIFEST, Store
from bevatron.errors import BevatronError, ConfigError
from bevatron.files import write_json_atomically
from bevatron.output import print_rows, say
from bevatron.recipes.arguments import Files
from bevatron.recipes.gpspp.run import GpsppRun, build
from bevatron.recipes.gpspp.stores import prepare_molecules
from bevatron.train.report import plots
from bevatron.train.report.plots import Curve, Panel

CELL = "--cell-from-input"
"""The only option of a process that runs one cell."""

ROOT = str(Path(__file__).resolve().parents[2])

RESULT = "gpspp_ablation.json"
BASELINE = "baseline"
Against = Literal["minutes", "epoch"]
"""What curves are drawn over."""


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes
    ----------
    table
        Of the paper.
    words
        What is different.
    model, corruption
        Changes of the configuration.
    """

    table: int
    words: str
    model: dict[str, Any] = field(default_factory=dict)
    corruption: dict[str, Any] = field(default_factory=dict)


_NO_NODES = {"noisy_nodes": False}
_NO_EDGES = {"noisy_edges": False}
_NO_BIAS, _NO_SUM = {"distance_bias": False}, {"distance_sum": False}
_NO_ATTENTION = {"attention": False}

ROWS: dict[str, Row] = {
    BASELINE: Row(0, "all parts"),
    "no-random-walk": Row(3, "without random-walk encodings", {"random_walk": False}),
    "no-laplacian": Row(3, "without Laplacian encodings", {"laplacian": False}),
    "no-degree": Row(3, "without degrees (centrality)", {"degree": False}),
    "no-shortest-paths": Row(3, "without shortest paths", {"shortest_paths": False}),
    "no-bond-lengths": Row(3, "without bond lengths", {"bond_lengths": False}),
    "no-noisy-nodes": Row(3, "without noisy nodes", _NO_NODES, {"node_noise": 0.0}),
    "no-noisy-edges": Row(3, "without noisy edges", _NO_EDGES, {"edge_noise": 0.0}),
    "no-noise": Row(
        3,
        "without noisy nodes and edges",
        {**_NO_NODES, **_NO_EDGES},
        {"node_noise": 0.0, "edge_noise": 0.0},
    ),
    "original": Row(4, "features of OGB", {"feature_set": "original"}),
    "set2": Row(4, "features of Set 2", {"feature_set": "set2"}),
    "set3": Row(4, "features of Set 3", {"feature_set": "set3"}),
    "ying21": Row(4, "features of Ying 21", {"feature_set": "ying21"}),
    "ying21-periodic": Row(
        4, "Ying 21 with group, period and type", {"feature_set": "ying21_periodic"}
    ),
    "no-edges": Row(6, "without edge features", {"edges": False, **_NO_EDGES}),
    "no-globals": Row(6, "without global features", {"globals_": False}),
    "no-sender-aggregation": Row(6, "without sums over sent", {"sender_aggregation": False}),
    "no-adjacent-aggregation": Row(6, "without adjacent nodes", {"adjacent_aggregation": False}),
    "no-mpnn": Row(6, "without message passing", {"mpnn": False, **_NO_EDGES}),
    "no-ffn": Row(6, "without FFN", {"ffn": False}),
    "no-attention": Row(6, "without attention", _NO_ATTENTION),
    "no-globals-no-attention": Row(
        6, "without global features and attention", {"globals_": False, **_NO_ATTENTION}
    ),
    "no-3d-centrality": Row(7, "without 3D centrality", _NO_SUM),
    "no-3d-bias": Row(7, "without 3D bias", _NO_BIAS),
    "no-3d-bias-centrality": Row(7, "without 3D bias and centrality", {**_NO_BIAS, **_NO_SUM}),
    "no-attention-3d-centrality": Row(
        7, "without attention and 3D centrality", {**_NO_ATTENTION, **_NO_SUM}
    ),
}
"""Rows by name; that without attention but with 3D centrality stands in Table 6."""


@dataclass(frozen=True)
class Ablation:
    """What to run.

    Attributes
    ----------
    data
        A file of molecules, or prepared stores, one for each feature set that is asked for.
    out
        Folder for the results; runs that are there already are not run again.
    rows
        Names of `ROWS`, or tables: ``table3``; none given: all.
    seeds
        How many, from `first_seed`.
    first_seed
        The first of them.
    preset
        Of the model.
    minutes, epochs
        Of each run, compilation included.
    molecules
        Of a step, the same for all rows.
    train_size, valid_size
        As in `bevatron.recipes.gpspp.data.MoleculeDataConfig`.
    lr
        Of all rows; attention without any 3D input (bias or centrality) has half of it.
    base
        A YAML file of the recipe ``gpspp`` from which every row differs.
    device
        auto, cpu, cuda.
    evaluate_every
        Epochs between validations; the end of a run is always validated.
    """

    data: tuple[Path, ...]
    out: Path
    rows: tuple[str, ...] = ()
    seeds: int = 3
    first_seed: int = 0
    preset: str = "gpspp-4"
    minutes: float | None = None
    epochs: int | None = None
    molecules: int = 1024
    train_size: float = 0.0
    valid_size: float = 0.1
    lr: float = 4e-4
    base: Path | None = None
    device: str = "auto"
    evaluate_every: int = 2

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        if not self.data:
            raise ConfigError("data: expected a file of molecules or prepared stores")
        if self.minutes is None and self.epochs is None:
            raise ConfigError("minutes: say how long a run is, with --minutes or --epochs")
        if self.seeds < 1:
            raise ConfigError(f"seeds: expected 1 or more, got {self.seeds}")
        chosen_rows(self.rows)


def chosen_rows(names: Sequence[str]) -> list[str]:
    """Return the rows that are asked for, the baseline first, in the order of the tables.

    Raises
    ------
    ConfigError
        For a name that is no row and no table.

    Examples
    --------
    >>> chosen_rows(["table4"])[:2]
    ['baseline', 'original']
    """
    tables = {f"table{row.table}" for row in ROWS.values() if row.table}
    unknown = [name for name in names if name not in ROWS and name not in tables]
    if unknown:
        known = ", ".join([*sorted(tables), *ROWS])
        raise ConfigError(f"rows: there is no '{unknown[0]}' (known: {known})")
    wanted = set(names) or set(ROWS)
    also = "no-attention" if "table7" in wanted else BASELINE
    return [
        name
        for name, row in ROWS.items()
        if name in {BASELINE, also} or name in wanted or f"table{row.table}" in wanted
    ]


def run_ablation(
    ablation: Ablation, *, jobs: int = 1, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Run all rows and seeds that are not done yet; write table, curves and picture.

    Parameters
    ----------
    ablation
        What.
    jobs
        Processes side by side, shared out over the visible GPUs; with `Ablation.minutes` each has
        one for itself.
    tell
        Given lines to show.

    Returns
    -------
    What is in the JSON file: ``rows`` of the table and all ``runs`` with their curves.

    Raises
    ------
    ConfigError
        For contradicting options, or if no data are there for the baseline.
    """
    ablation.out.mkdir(parents=True, exist_ok=True)
    names = chosen_rows(ablation.rows)
    stores, names = _stores(ablation, names, tell)
    seeds = range(ablation.first_seed, ablation.first_seed + ablation.seeds)
    cells = [(name, seed) for seed in seeds for name in names]
    waiting = [cell for cell in cells if not _file(ablation, *cell).exists()]
    if jobs <= 1:
        for name, seed in waiting:
            tell(f"{name}, seed {seed}")
            run_cell(ablation, name, seed, stores)
    else:
        _side_by_side(ablation, waiting, stores, jobs, tell)
    runs = [json.loads(_file(ablation, *cell).read_text()) for cell in cells]
    result = {"settings": _plain(ablation), "rows": table_of(runs), "runs": runs}
    write_json_atomically(ablation.out / RESULT, result, BevatronError)
    against: Against = "epoch" if ablation.minutes is None else "minutes"
    plots.save(draw(runs, against), ablation.out / "gpspp_ablation.png")
    return result


def run_cell(ablation: Ablation, name: str, seed: int, stores: dict[str, Path]) -> None:
    """Train one row with one seed and write what came of it."""
    config = configuration(ablation, name, seed, stores)
    run = build(config)
    seconds = None if ablation.minutes is None else 60 * ablation.minutes
    timed = fit_within(run, Budget(seconds, ablation.epochs))
    model: Any = run.model
    target = model.config.targets[0].name
    metric = run.monitor.removeprefix("-")
    curve = [
        {
            "minutes": record["elapsed"] / 60,
            "epoch": record["epoch"] + 1,
            "step": record["step"],
            "train": record["terms"].get("targets"),
            "valid": record["valid"].get(metric),
            "valid_3d": record["valid"].get(f"3d/{metric}"),
        }
        for record in timed.curve
        if record["valid"]
    ]
    result = {
        "row": name,
        "seed": seed,
        "table": ROWS[name].table,
        "target": target,
        "metric": metric,
        "parameters": sum(p.numel() for p in model.parameters()),
        "molecules": ablation.molecules,
        "lr": config.optim.lr,
        "epochs": timed.result.epochs,
        "steps": timed.result.steps,
        "curve": curve,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    path = _file(ablation, name, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, result, BevatronError)


def configuration(
    ablation: Ablation, name: str, seed: int, stores: dict[str, Path] | None = None
) -> GpsppRun:
    """Return the configuration of one row; see `ROWS`."""
    row = ROWS[name]
    values = {} if ablation.base is None else load_yaml(ablation.base)
    values.pop("recipe", None)
    values.setdefault("preset", ablation.preset)
    groups: dict[str, dict[str, Any]] = {
        key: dict(values.get(key) or {})
        for key in ("model", "corruption", "data", "optim", "train", "schedule")
    }
    groups["model"] |= row.model
    groups["corruption"] |= row.corruption
    groups["data"] |= {"train_size": ablation.train_size, "valid_size": ablation.valid_size}
    groups["train"] |= {
        "seed": seed, "device": ablation.device, "log_every": 10**9, "explode_factor": None,
        "evaluate_every": ablation.evaluate_every,
    }  # fmt: skip
    values |= {
        **groups,
        "output": str(ablation.out / "runs" / f"{name}-{seed}"),
        "molecules": ablation.molecules,
        "report": False,
    }
    config = GpsppRun.from_values(values)
    model = config.model
    blind = model.attention and not (model.distance_bias or model.distance_sum)
    groups["optim"]["lr"] = ablation.lr / 2 if blind else ablation.lr
    feature_set = model.feature_set
    store = (stores or {}).get(feature_set, ablation.data[0])
    groups["data"] |= {"train": [str(store)], "feature_set": feature_set}
    return GpsppRun.from_values(values)


def _stores(
    ablation: Ablation, names: list[str], tell: Callable[[str], None]
) -> tuple[dict[str, Path], list[str]]:
    """Find or prepare a store for each feature set; leave out rows that have none."""
    found: dict[str, Path] = {}
    files = []
    for path in ablation.data:
        if (path / MANIFEST).is_file():
            found[Store.open(path).manifest["settings"].get("feature_set", "")] = path
        else:
            files.append(path)
    kept = []
    for name in names:
        wanted = configuration(ablation, name, 0).model.feature_set
        if wanted not in found and files:
            out = ablation.out / "prepared" / wanted
            prepare_molecules(files, out, wanted)
            found[wanted] = out
        if wanted in found:
            kept.append(name)
        else:
            tell(f"{name}: left out, it needs a store of the feature set '{wanted}'")
    if BASELINE not in kept:
        raise ConfigError("data: no store has the feature set of the baseline")
    return found, kept


def _side_by_side(
    ablation: Ablation,
    cells: Sequence[tuple[str, int]],
    stores: dict[str, Path],
    jobs: int,
    tell: Callable[[str], None],
) -> None:
    """Run cells in processes of their own, shared out over the GPUs.

    Runs that have a time each get a GPU for themselves; those that have epochs may share one.
    """
    gpus = visible_gpus() if ablation.device != "cpu" else []
    if gpus and ablation.minutes is not None:
        jobs = min(jobs, len(gpus))
    places: SimpleQueue[str | None] = SimpleQueue()
    for job in range(jobs):
        places.put(gpus[job % len(gpus)] if gpus else None)

    def one(cell: tuple[str, int]) -> None:
        place = places.get()
        name, seed = cell
        tell(f"{name}, seed {seed}" + (f", GPU {place}" if place is not None else ""))
        path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path}
        if place:
            environment["CUDA_VISIBLE_DEVICES"] = place
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.paper.gpspp_ablation", CELL],
                input=json.dumps({**_plain(ablation), "cell": [name, seed], "stores": {
                    key: str(path) for key, path in stores.items()}}),
                text=True, capture_output=True, env=environment, check=False,
            )  # fmt: skip
        finally:
            places.put(place)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise BevatronError(f"{name}, seed {seed}: the run failed ({last})")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, cells))


def visible_gpus() -> list[str]:
    """Name the GPUs of this process as CUDA_VISIBLE_DEVICES does."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    return [str(i) for i in range(torch.cuda.device_count())]


def table_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarise runs by row: mean and spread over seeds, and what changed from the baseline."""
    by_row: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_row.setdefault(run["row"], []).append(run)
    base = {run["seed"]: run["curve"][-1]["valid"] for run in by_row.get(BASELINE, [])}
    table = []
    for name, members in by_row.items():
        last = [run["curve"][-1] for run in members]
        changes = [run["curve"][-1]["valid"] - base[run["seed"]] for run in members
                   if run["seed"] in base]  # fmt: skip
        line = {
            "table": members[0]["table"] or None,
            "row": name,
            "different": ROWS[name].words,
            "parameters": members[0]["parameters"],
            "seeds": len(members),
            "metric": members[0]["metric"],
        }
        for key in ("valid", "valid_3d", "train"):
            line |= _spread(key, [one[key] for one in last])
        line |= _spread("change", changes)
        line["minutes"] = float(np.mean([one["minutes"] for one in last]))
        line["epochs"] = float(np.mean([run["epochs"] for run in members]))
        table.append(line)
    return table


def _spread(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    mean = float(np.mean(known)) if known else None
    std = float(np.std(known, ddof=1)) if len(known) > 1 else None
    return {name: mean, f"{name}_std": std}


def draw(runs: Sequence[dict[str, Any]], against: Against = "minutes") -> Any:
    """Draw the validation error of every row against training time, a panel for each table.

    Runs that share a GPU are drawn against epochs: how long they took says nothing.
    """
    panels = []
    for table, title in (
        (3, "Inputs and noise (Table 3)"),
        (4, "Chemical features (Table 4)"),
        (6, "Parts of the block (Table 6)"),
        (7, "3D and attention (Table 7)"),
    ):
        lines = []
        own = {run["row"] for run in runs if run["table"] == table}
        if table == 7:
            own |= {"no-attention"} if own else set()
        for name in [BASELINE, *(name for name in ROWS if name in own and name != BASELINE)]:
            members = [run["curve"] for run in runs if run["row"] == name]
            if own and members:
                lines.append(_mean_curve(name, members, against))
        if lines:
            metric = runs[0]["metric"].replace("_mae", " MAE").replace("_auroc", " AUROC")
            panels.append(Panel(title, f"validation {metric}", lines))
    if not panels:
        members = [run["curve"] for run in runs]
        panels = [Panel("Baseline", "validation error", [_mean_curve(BASELINE, members, against)])]
    return plots.curves(panels, "training time (min)" if against == "minutes" else "epochs")


def _mean_curve(name: str, curves: Sequence[Sequence[dict[str, Any]]], against: Against) -> Curve:
    """Average the curves of several seeds, epoch by epoch as far as all of them go."""
    length = min(map(len, curves))
    place = np.mean([[one[against] for one in curve[:length]] for curve in curves], axis=0)
    errors = np.mean([[one["valid"] for one in curve[:length]] for curve in curves], axis=0)
    return Curve(name, place, errors, dashed=name == BASELINE)


def _file(ablation: Ablation, name: str, seed: int) -> Path:
    return ablation.out / "cells" / f"{name}-{seed}.json"


def _plain(ablation: Ablation) -> dict[str, Any]:
    values: dict[str, Any] = dict(vars(ablation))
    values["data"] = [str(path) for path in ablation.data]
    for name in ("out", "base"):
        values[name] = None if values[name] is None else str(values[name])
    return values


def _from_plain(values: dict[str, Any]) -> Ablation:
    paths = {"out": Path(values["out"]), "data": tuple(map(Path, values["data"]))}
    base = None if values["base"] is None else Path(values["base"])
    return Ablation(**{**values, **paths, "rows": tuple(values["rows"]), "base": base})


def ablate(
    data: Files,
    out: Path,
    rows: tuple[str, ...] = (),
    seeds: int = 3,
    first_seed: int = 0,
    preset: str = "gpspp-4",
    minutes: float | None = None,
    epochs: int | None = None,
    molecules: int = 1024,
    train_size: float = 0.0,
    valid_size: float = 0.1,
    lr: float = 4e-4,
    base: Path | None = None,
    device: str = "auto",
    evaluate_every: int = 2,
    jobs: int = 1,
) -> int:
    """Train GPS++ without one part after the other and tell what each is worth.

    Parameters
    ----------
    data
        A file of molecules, or prepared stores, one for each feature set.
    out
        Folder for results; runs that are there already are not run again.
    rows
        Rows, or table3, table4, table6, table7; all by default. The baseline always runs.
    seeds
        Runs of each row.
    first_seed
        The first seed.
    preset
        gpspp-16, gpspp-8, gpspp-4.
    minutes
        Of each run, compilation included.
    epochs
        Of each run.
    molecules
        Of a step, the same for all rows.
    train_size
        Molecules to train on: a share or a number; 0 = all that are not set aside.
    valid_size
        Molecules to validate with.
    lr
        Learning rate; attention without any 3D input has half of it.
    base
        A YAML file of the recipe from which every row differs.
    device
        auto, cpu or cuda.
    evaluate_every
        Epochs between validations.
    jobs
        Runs side by side, over all GPUs; with --minutes each has one for itself.
    """
    ablation = Ablation(
        data=data,
        out=out,
        rows=rows,
        seeds=seeds,
        first_seed=first_seed,
        preset=preset,
        minutes=minutes,
        epochs=epochs,
        molecules=molecules,
        train_size=train_size,
        valid_size=valid_size,
        lr=lr,
        base=base,
        device=device,
        evaluate_every=evaluate_every,
    )
    result = run_ablation(ablation, jobs=jobs, tell=say)
    shown = ("table", "row", "parameters", "seeds", "valid", "valid_std", "change", "train")
    print_rows(
        [
            {
                key: "" if row[key] is None
                else f"{row[key]:.4g}" if isinstance(row[key], float)
                else row[key]
                for key in shown
            }
            for row in result["rows"]
        ]
    )  # fmt: skip
    say(f"{out / RESULT} and {out / 'gpspp_ablation.png'}")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run the ablation of the command line; returns the exit code."""
    command = "python -m benchmarks.paper.gpspp_ablation"
    return one_sentence(lambda: call(ablate, arguments, command))


def _cell_from_input() -> int:
    """Run the cell that the process which started this one describes."""
    values = json.loads(sys.stdin.read())
    (name, seed), stores = values.pop("cell"), values.pop("stores")
    paths = {key: Path(path) for key, path in stores.items()}
    run_cell(_from_plain(values), name, seed, paths)
    return 0


if __name__ == "__main__":
    sys.exit(_cell_from_input() if sys.argv[1:] == [CELL] else main(sys.argv[1:]))
