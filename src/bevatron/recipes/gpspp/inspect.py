"""Tables and figures of ``bevatron inspect`` for a store of molecules."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np

from bevatron.data.dataset import column
from bevatron.data.store.store import Store
from bevatron.data.summary.inspect import Row, Table, overview, sizes_table
from bevatron.train.report import plots
from bevatron.train.report.page import Report
from bevatron.typing import IntArray


def describe(store: Store) -> list[Table]:
    """Describe a store of molecules: totals, targets, sizes, elements, rejected rows."""
    summary, usable = store.manifest["summary"], store.lengths("atom_features") > 0
    tables = [
        _overview(store, summary),
        _targets(store, summary),
        sizes_table("molecule", {name: n[usable] for name, n in _lengths(store).items()}),
        _elements(summary),
        _reasons(summary),
    ]
    return [table for table in tables if table.rows]


def draw(report: Report, store: Store) -> None:
    """Add figures of sizes and targets to a report."""
    for name, lengths in _lengths(store).items():
        figure = plots.histogram(
            {name: lengths}, f"{name} per molecule", f"Sizes in {name}", "molecules"
        )
        report.figure(figure, f"Number of {name} per molecule.", f"sizes_{name}")
    targets = column(store, "targets")
    for number, name in enumerate(store.manifest["settings"]["targets"]):
        known = targets[np.isfinite(targets[:, number]), number]
        if len(known):
            figure = plots.histogram({name: known}, name, f"Target {name}", "molecules")
            report.figure(figure, f"Values of the target {name}.", f"target_{number}")


def sizes(store: Store) -> dict[str, IntArray]:
    """Return atoms and directed bonds of all molecules, [n] each."""
    return {"atoms": store.lengths("atom_features"), "edges": store.lengths("bonds")}


def _lengths(store: Store) -> dict[str, IntArray]:
    return {"atoms": store.lengths("atom_features"), "bonds": store.lengths("bonds") // 2}


def _overview(store: Store, summary: Mapping[str, Any]) -> Table:
    rows = [
        ("rows", len(store)),
        ("molecules", summary["molecules"] - summary["unusable"]),
        ("unusable rows", summary["unusable"]),
        ("with a 3D structure", summary["with_3d"]),
        ("of several parts", summary["disconnected"]),
        ("of one atom", summary["single_atoms"]),
        ("atoms", summary["atoms"]),
        ("bonds", summary["bonds"]),
        ("files", len(store.manifest["sources"])),
    ]
    return overview(store, rows, [("feature set", store.manifest["settings"]["feature_set"])])


def _targets(store: Store, summary: Mapping[str, Any]) -> Table:
    rows: list[Row] = []
    for number, name in enumerate(store.manifest["settings"]["targets"]):
        found = summary["targets"][str(number)]
        known = found["known"]
        if not known:
            rows.append((name, 0, None, None, None, None))
            continue
        mean = found["sum"] / known
        spread = sqrt(max(found["sum_squares"] / known - mean**2, 0.0))
        rows.append((name, known, mean, spread, found["min"], found["max"]))
    return Table("Targets", ("target", "labels", "mean", "std", "min", "max"), rows)


def _elements(summary: Mapping[str, Any]) -> Table:
    from ase.data import chemical_symbols

    found = sorted(summary.get("elements", {}).items(), key=lambda each: int(each[0]))
    rows: list[Row] = [(chemical_symbols[int(number)], count) for number, count in found]
    return Table("Elements", ("element", "atoms"), rows)


def _reasons(summary: Mapping[str, Any]) -> Table:
    found = sorted(summary.get("reasons", {}).items(), key=lambda each: -each[1])
    return Table("Left out", ("reason", "rows"), list(found))
