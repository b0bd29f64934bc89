"""Tables and figures of ``bevatron inspect`` for a store of chains."""

import numpy as np

from bevatron.data.dataset import column
from bevatron.data.store.store import Store
from bevatron.data.summary.inspect import Row, Table, overview
from bevatron.recipes.alphafold2.data import MAX_RESOLUTION, MOST_OF_ONE, chain_table
from bevatron.recipes.alphafold2.stores import named_chains
from bevatron.recipes.proteins import inspect as common
from bevatron.train.report import plots
from bevatron.train.report.page import Report
from bevatron.typing import Array, FloatArray, IntArray

LONG = 2000
"""Residues; longer chains, of which crops show only small parts, are counted."""


def describe(store: Store) -> list[Table]:
    """Describe a store of chains: totals, chains, what filters remove, searches, clusters."""
    tables = [_overview(store), _chains(store), _filters(store)]
    tables += common.searches(store, named_chains(store))
    tables += [common.clusters_table(store), *common.rejects(store)]
    return [table for table in tables if table.rows]


def draw(report: Report, store: Store) -> None:
    """Add figures of lengths, resolved residues, resolutions and searches to a report."""
    report.figure(
        plots.histogram(
            sizes(store),
            "residues of a chain", "Lengths", "chains",
        ),
        "Lengths of the chains.",
        "lengths",
    )  # fmt: skip
    report.figure(
        plots.histogram(
            {"resolved": _resolved(store)}, "share of the residues that is resolved",
            "Resolved residues", "chains",
        ),
        "Share of each chain's residues whose CA is resolved.",
        "resolved",
    )  # fmt: skip
    common.draw_resolution(report, common.known_resolution(_resolution(store)), "files")
    common.draw_searches(report, store)


def sizes(store: Store) -> dict[str, IntArray]:
    """Return residues of all chains, [n]; there are no edges."""
    return {"residues": column(store, "chain_length").astype(np.int64)}


def _overview(store: Store) -> Table:
    summary = store.manifest["summary"]
    resolution = common.known_resolution(_resolution(store))
    rows: list[Row] = [
        ("files", summary["files"]),
        ("files with chains", summary["usable"]),
        ("left out", summary["files"] - summary["usable"]),
        ("chains", summary["chains"]),
        ("residues", summary["residues"]),
        *common.dates(column(store, "released")[_usable(store)]),
        ("resolution, median (Å)", float(np.median(resolution)) if len(resolution) else None),
        ("without a resolution", summary["usable"] - len(resolution)),
    ]
    return overview(store, rows, common.settings(store))


def _chains(store: Store) -> Table:
    lengths, keys = sizes(store)["residues"], column(store, "chain_key")
    if not len(lengths):
        return Table("Chains", (), [])
    marks = np.percentile(lengths, [50, 99]).tolist()
    row = (len(lengths), len(np.unique(keys)), int(lengths.min()), *marks, int(lengths.max()))
    headers = ("chains", "distinct", "shortest", "median", "99 %", "longest")
    return Table("Chains", headers, [row])


def _filters(store: Store) -> Table:
    """Count the chains that training leaves out, and others that users may want to."""
    lengths, keys = sizes(store)["residues"], column(store, "chain_key")
    if not len(lengths):
        return Table("Filters", (), [])
    bad = _of_chains(store, np.greater_equal(_resolution(store, every=True), MAX_RESOLUTION))
    simple = np.greater(column(store, "most_of_one"), MOST_OF_ONE)
    undated = _of_chains(store, np.less(column(store, "released"), 0))
    rows: list[Row] = [
        (f"resolution of {MAX_RESOLUTION:g} Å or worse", int(bad.sum()), "not trained on"),
        (f"more than {MOST_OF_ONE:.0%} of one residue", int(simple.sum()), "not trained on"),
        ("all others", int(chain_table(store).usable.sum()), "trained on"),
        ("copies of an earlier sequence", len(keys) - len(np.unique(keys)), "weighted"),
        (f"longer than {LONG} residues", int((lengths > LONG).sum()), "cropped"),
        ("less than half resolved", int((_resolved(store) < 0.5).sum()), ""),
        ("without a date", int(undated.sum()), "see templates of any date"),
    ]
    return Table("Filters", ("chains", "number", "in training"), rows)


def _of_chains(store: Store, of_entry: Array) -> Array:
    """Repeat the values of each entry for its chains."""
    return np.repeat(of_entry, store.lengths("chain_length"))


def _resolved(store: Store) -> FloatArray:
    share: FloatArray = column(store, "resolved") / np.maximum(sizes(store)["residues"], 1)
    return share


def _usable(store: Store) -> Array:
    return np.greater(store.lengths("chain_length"), 0)


def _resolution(store: Store, *, every: bool = False) -> FloatArray:
    values: FloatArray = column(store, "resolution").astype(np.float64)
    return values if every else values[_usable(store)]
