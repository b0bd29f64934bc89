"""Tables and figures of ``bevatron inspect`` for a store of molecules."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np

from bevatron.data.dataset import column
from bevatron.data.store.store import Store
from bevatron.data.summary.inspect import Table, counted
from bevatron.train.report import plots
from bevatron.train.report.page import Report
from bevatron.typing import IntArray

Row = tuple[str | int | float | None, ...]


def describe(store: Store) -> list[Table]:
    """Describe a store of molecules: totals, targets, sizes, elements, rejected rows."""
    summary = store.manifest["summary"]
    tables = [
        _overview(store, summary),
        _targets(store, summary),
        _sizes(store),
        _elements(summary),
        _reasons(summary),
    ]
    return [table for table in tables if table.rows]


def draw(report: Report, store: Store) -> None:
    """Add figures of sizes and targets to a report."""
    for name, lengths in (
        ("atoms", store.lengths("atom_features")),
        ("bonds", store.lengths("bonds") // 2),
    ):
        values, counts = counted(lengths)
        figure = plots.histogram(
            {name: plots.Counted(values, counts)}, f"{name} per molecule", f"Sizes in {name}"
        )
        report.figure(figure, f"Number of {name} per molecule.", f"sizes_{name}")
    targets = column(store, "targets")
    for number, name in enumerate(store.manifest["settings"]["targets"]):
        known = targets[np.isfinite(targets[:, number]), number]
        if not len(known):
            continue
        # Binned here: a bar for each of a million distinct labels would take forever.
        counts, edges = np.histogram(known, bins=min(100, max(10, len(known) // 20)))
        middle = (edges[1:] + edges[:-1]) / 2
        figure = plots.histogram({name: plots.Counted(middle, counts)}, name, f"Target {name}")
        report.figure(figure, f"Values of the target {name}.", f"target_{number}")


def sizes(store: Store) -> dict[str, IntArray]:
    """Return atoms and directed bonds of all molecules, [n] each."""
    return {"atoms": store.lengths("atom_features"), "edges": store.lengths("bonds")}


def _overview(store: Store, summary: Mapping[str, Any]) -> Table:
    size = sum(int(shard["size"]) for shard in store.manifest["shards"])
    rows: list[Row] = [
        ("rows", len(store)),
        ("molecules", summary["molecules"] - summary["unusable"]),
        ("unusable rows", summary["unusable"]),
        ("with a 3D structure", summary["with_3d"]),
        ("of several parts", summary["disconnected"]),
        ("of one atom", summary["single_atoms"]),
        ("atoms", summary["atoms"]),
        ("bonds", summary["bonds"]),
        ("files", len(store.manifest["sources"])),
        ("shards", len(store.manifest["shards"])),
        ("size on disk (MB)", size / 1e6),
        ("feature set", store.manifest["settings"]["feature_set"]),
        ("fingerprint", str(store.manifest["fingerprint"])[:16]),
    ]
    return Table(str(store.path), ("", "value"), rows)


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


def _sizes(store: Store) -> Table:
    rows: list[Row] = []
    usable = store.lengths("atom_features") > 0
    for name, lengths in (
        ("atoms", store.lengths("atom_features")),
        ("bonds", store.lengths("bonds") // 2),
    ):
        values = lengths[usable]
        if len(values):
            marks = np.percentile(values, [50, 99]).tolist()
            rows.append((name, int(values.min()), float(values.mean()), *marks, int(values.max())))
    return Table("Sizes", ("per molecule", "min", "mean", "median", "99 %", "max"), rows)


def _elements(summary: Mapping[str, Any]) -> Table:
    from ase.data import chemical_symbols

    found = sorted(summary.get("elements", {}).items(), key=lambda each: int(each[0]))
    rows: list[Row] = [(chemical_symbols[int(number)], count) for number, count in found]
    return Table("Elements", ("element", "atoms"), rows)


def _reasons(summary: Mapping[str, Any]) -> Table:
    found = sorted(summary.get("reasons", {}).items(), key=lambda each: -each[1])
    return Table("Left out", ("reason", "rows"), list(found))
