"""The ablations of the GPS++ paper, trained at equal batch size.

Rows follow Tables 3 (inputs, noisy nodes and edges), 4 (chemical features), 6 (parts of a block)
and 7 (3D bias, 3D centrality and attention) of arXiv 2302.02947. All rows of a seed see the same
molecules; every run ends with its learning rate at zero.

    python -m benchmarks.paper.gpspp_ablation STORE... --out cells --epochs 10 --seeds 1
    python -m benchmarks.paper.gpspp_ablation --collect cells

A store holds the features of one set, `bevatron prepare --feature-set`; rows whose set is missing
are skipped. Runs that are already in the folder are not repeated, so several commands, with
different rows or seeds and CUDA_VISIBLE_DEVICES, can share it. Attention without any 3D input (bias
or centrality) has half the learning rate.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from benchmarks.common.arguments import add_rows, read_all
from benchmarks.common.report import add_picture, hardware, spread, versions, write_result
from benchmarks.common.training import epochs_walked, whole_schedule

from bevatron.config import load_yaml, merged
from bevatron.data.store.store import Store
from bevatron.errors import BevatronError
from bevatron.files import write_json_atomically
from bevatron.recipes.gpspp.run import GpsppRun, build
from bevatron.train.loop import fit
from bevatron.train.report import plots
from bevatron.train.report.plots import Curve, Panel

BASELINE = "baseline"
Against = Literal["minutes", "epoch"]
"""What curves are drawn over."""


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes
    ----------
    table : of the paper
    words : what is different
    model, corruption : changes of the configuration
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


PAPER = {
    "no-random-walk": "+1.2",
    "no-laplacian": "about 0",
    "no-degree": "about 0",
    "no-bond-lengths": "about 0",
    "no-noisy-edges": "about 0",
    "no-3d-centrality": "+0.6",
    "no-3d-bias": "+1.1",
    "no-3d-bias-centrality": "+5.1",
    "no-attention-3d-centrality": "+4.3",
    "no-attention": "+0.9",
}
"""Changes of the validation error in meV as far as known: arXiv 2302.02947, its text and Table 7.

Which line of Table 7 is which is read from its text.
"""
NOTES = (
    "Validation MAE of {target} in meV, mean ± standard deviation over seeds; {preset} on "
    "{train:,} molecules with 3D masked 1:3:1, {molecules} a step, {steps} steps. Minutes are of "
    "training beside other work on the same GPU, including validation, capture of the steps and, "
    "in the first rows (the baseline), compilation of kernels: they compare rows only roughly. "
    "Change: of the 2D error against the baseline of the same seed, and its spread. Paper: 16 "
    "layers, 200 epochs on 3.4 million molecules (known values only); a change below the spread "
    "is not significant."
)


def chosen_rows(names: Sequence[str]) -> list[str]:
    """Return the requested rows, the baseline first, in the order of the tables.

    Examples
    --------
    >>> chosen_rows(["table4"])[:2]
    ['baseline', 'original']
    """
    tables = {f"table{row.table}" for row in ROWS.values() if row.table}
    unknown = [name for name in names if name not in ROWS and name not in tables]
    if unknown:
        known = ", ".join([*sorted(tables), *ROWS])
        raise SystemExit(f"rows: there is no '{unknown[0]}' (known: {known})")
    wanted = set(names) or set(ROWS)
    also = "no-attention" if "table7" in wanted else BASELINE
    return [
        name
        for name, row in ROWS.items()
        if name in {BASELINE, also} or name in wanted or f"table{row.table}" in wanted
    ]


def configuration(
    options: argparse.Namespace, name: str, seed: int, stores: dict[str, Path] | None = None
) -> GpsppRun:
    """Return the configuration of one row; see `ROWS`."""
    row = ROWS[name]
    values = {} if options.base is None else load_yaml(options.base)
    values.pop("recipe", None)
    values.setdefault("preset", options.preset)
    values = merged(merged(values, whole_schedule(options.epochs or 1, options.evaluate_every)), {
        "model": row.model,
        "corruption": row.corruption,
        "data": {"train_size": options.train_size, "valid_size": options.valid_size},
        "train": {"seed": seed, "device": options.device},
        "output": str(options.out / "runs" / f"{name}-{seed}"),
        "molecules": options.molecules,
    })  # fmt: skip
    model = GpsppRun.from_values(values).model
    blind = model.attention and not (model.distance_bias or model.distance_sum)
    store = (stores or {}).get(model.feature_set, options.out)
    return GpsppRun.from_values(merged(values, {
        "optim": {"lr": options.lr / 2 if blind else options.lr},
        "data": {"train": [str(store)], "feature_set": model.feature_set},
    }))  # fmt: skip


def run_rows(options: argparse.Namespace) -> None:
    """Train all rows and seeds that are not done yet."""
    stores = {
        Store.open(path).manifest["settings"].get("feature_set", ""): path
        for path in options.stores
    }
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in chosen_rows(options.rows):
            config = configuration(options, name, seed, stores)
            path = options.out / f"{name}-{seed}.json"
            if config.model.feature_set not in stores:
                print(f"{name}: left out, it needs a store of '{config.model.feature_set}'")
            elif not path.exists():
                result = {"row": name, "seed": seed, "preset": options.preset, **train(config)}
                write_json_atomically(path, result, BevatronError)
                print(path, json.dumps(result["curve"][-1]), flush=True)


def train(config: GpsppRun) -> dict[str, Any]:
    run = build(config)
    result = fit(run)
    model: Any = run.model
    metric = run.monitor.removeprefix("-")
    return {
        "preset": config.preset,
        "target": model.config.targets[0].name,
        "metric": metric,
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_molecules": len(run.train),
        "molecules": config.molecules,
        "lr": config.optim.lr,
        "epochs": result.epochs,
        "steps": result.steps,
        "curve": [
            {
                "minutes": record["elapsed"] / 60,
                "epoch": record["epoch"] + 1,
                "step": record["step"],
                "train": record["terms"].get("targets"),
                "valid": record["valid"].get(metric),
                "valid_3d": record["valid"].get(f"3d/{metric}"),
            }
            for record in epochs_walked(config.output)
            if record["valid"]
        ],
        "hardware": hardware(next(model.parameters()).device.type),
        "versions": versions(),
    }


def table_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarise runs by row: mean and spread over seeds, and what changed from the baseline."""
    by_row: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: ([*ROWS].index(run["row"]), run["seed"])):
        by_row[run["row"]].append(run)
    base = {run["seed"]: run["curve"][-1]["valid"] for run in by_row[BASELINE]}
    table = []
    for name, members in by_row.items():
        last = [run["curve"][-1] for run in members]
        known = [(r["curve"][-1]["valid"], r["seed"]) for r in members if r["seed"] in base]
        changes = [error - base[seed] for error, seed in known]
        table.append(
            {
                "table": ROWS[name].table or "",
                "row": name,
                "parameters": f"{members[0]['parameters'] / 1e6:.1f} M",
                "seeds": len(members),
                "valid 2D": spread([1e3 * one["valid"] for one in last]),
                "valid 3D": spread([1e3 * x for one in last if (x := one["valid_3d"]) is not None]),
                "change": "" if name == BASELINE else spread([1e3 * x for x in changes], sign="+"),
                "paper": PAPER.get(name, ""),
                "lr": members[0]["lr"],
                "epochs": round(statistics.mean(run["epochs"] for run in members)),
                "minutes": f"{statistics.mean(one['minutes'] for one in last):.2f}",
            }
        )
    return table


def collect(folder: Path, results: Path) -> None:
    runs = [run for run in read_all(folder) if "curve" in run]
    first = runs[0]
    notes = NOTES.format(
        target=first["target"],
        preset=first["preset"],
        train=first["train_molecules"],
        molecules=first["molecules"],
        steps=max(run["steps"] for run in runs),
    )
    path = write_result(
        "gpspp/ablation",
        table_of(runs),
        notes=notes,
        extra={"runs": runs},
        folder=results,
        measured_on=first,
    )
    add_picture(draw(runs, "epoch"), path)
    add_picture(draw(runs, "minutes"), path, "time")


def draw(runs: Sequence[dict[str, Any]], against: Against = "minutes") -> Any:
    """Draw the validation error of every row against training time, a panel for each table.

    Runs that share a GPU are plotted against epochs, because their times are meaningless.
    """
    panels = []
    for table, title in (
        (3, "Inputs and noise (Table 3)"),
        (4, "Chemical features (Table 4)"),
        (6, "Parts of the block (Table 6)"),
        (7, "3D and attention (Table 7)"),
    ):
        lines = []
        own = {run["row"] for run in runs if ROWS[run["row"]].table == table}
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


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    made.add_argument("stores", type=Path, nargs="*", metavar="STORE")
    add_rows(made, "gpspp-ablation-cells")
    made.add_argument("--rows", nargs="*", default=[], help="or table3, table4 ...; all by default")
    made.add_argument("--seeds", type=int, default=3, help="runs of each row")
    made.add_argument("--first-seed", type=int, default=0)
    made.add_argument("--preset", default="gpspp-4")
    made.add_argument("--epochs", type=int, help="of each run")
    made.add_argument("--molecules", type=int, default=1024, help="of a step")
    made.add_argument("--train-size", type=float, default=0.0, help="0 = all that are left")
    made.add_argument("--valid-size", type=float, default=0.1, help="a share or a number")
    made.add_argument("--lr", type=float, default=4e-4)
    made.add_argument("--base", type=Path, help="a YAML file from which every row differs")
    made.add_argument("--device", default="auto")
    made.add_argument("--evaluate-every", type=int, default=2, help="epochs")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.collect is not None:
        collect(options.collect, options.results)
    elif not options.stores or options.epochs is None:
        parser().error("expected a STORE and --epochs (or --collect FOLDER)")
    else:
        run_rows(options)


if __name__ == "__main__":
    main()
