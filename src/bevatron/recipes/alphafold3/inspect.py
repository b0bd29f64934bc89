"""Tables and figures of ``bevatron inspect`` for a store of complexes."""

from collections import Counter

import numpy as np

from bevatron.data.dataset import column
from bevatron.data.proteins.featurize import describe as words_of
from bevatron.data.store.store import Store
from bevatron.data.summary.inspect import Row, Table, overview, sizes_table
from bevatron.recipes.alphafold3.stores import named_chains
from bevatron.recipes.proteins import inspect as common
from bevatron.train.report import plots
from bevatron.train.report.page import Report
from bevatron.typing import Array, FloatArray, IntArray

TYPES = ("protein", "RNA", "DNA", "ligand")
"""By the number in ``chain_type``."""


def describe(store: Store) -> list[Table]:
    """Describe a store of complexes: totals, chains, sizes, searches, what was left out."""
    proteins, _ = named_chains(store)
    lengths = {"tokens": store.lengths("restype"), "atoms": store.lengths("ref_element")}
    tables = [
        _overview(store),
        _chains(store),
        sizes_table("complex", lengths),
        *common.searches(store, proteins),
    ]
    tables += [common.clusters_table(store), _codes(store), *common.rejects(store)]
    return [table for table in tables if table.rows]


def draw(report: Report, store: Store) -> None:
    """Add figures of lengths, kinds, resolutions and searches to a report."""
    types, lengths = column(store, "chain_type"), column(store, "chain_length")
    tokens = sizes(store)["tokens"]
    tokens = tokens[tokens > 0]
    report.figure(
        plots.histogram({"tokens": tokens}, "tokens of a complex", "Sizes", "complexes"),
        "Tokens of each complex.",
        "sizes_tokens",
    )
    polymers = {
        name: lengths[types == number]
        for number, name in enumerate(TYPES[:3])
        if (types == number).any()
    }
    if polymers:
        report.figure(
            plots.histogram(polymers, "residues of a chain", "Lengths of polymers", "chains"),
            "Lengths of the chains.",
            "lengths",
        )
    common.draw_resolution(report, _resolution(store), "complexes")
    counts = np.bincount(types, minlength=len(TYPES)).astype(float)
    report.figure(
        plots.bars(TYPES, {"chains": counts}, "chains", "Kinds of chains"),
        "Number of chains of each kind.",
        "kinds",
    )
    common.draw_searches(report, store)


def sizes(store: Store) -> dict[str, IntArray]:
    """Return tokens of all complexes, [n]; there are no edges."""
    return {"tokens": store.lengths("restype")}


def _overview(store: Store) -> Table:
    summary = store.manifest["summary"]
    days = column(store, "released")[store.lengths("restype") > 0]
    atoms = summary["atoms"]
    resolution = _resolution(store)
    rows: list[Row] = [
        ("files", summary["files"]),
        ("complexes", summary["usable"]),
        ("left out", summary["files"] - summary["usable"]),
        ("tokens", summary["tokens"]),
        ("atoms", atoms),
        ("interfaces", int(store.lengths("interfaces").sum())),
        ("atoms not resolved", atoms - int(column(store, "resolved").sum())),
        *common.dates(days),
        ("resolution, median (Å)", float(np.median(resolution)) if len(resolution) else None),
        ("without a resolution", summary["usable"] - len(resolution)),
    ]
    filtered = [(f"left out: {name}", n) for name, n in summary["filtered"].items() if n]
    own = common.settings(store, "components", "assembly")
    return overview(store, rows, [*filtered, *own])


def _chains(store: Store) -> Table:
    types, lengths = column(store, "chain_type"), column(store, "chain_length")
    keys = column(store, "chain_key")
    rows: list[Row] = []
    for number, name in enumerate(TYPES):
        mine = types == number
        if mine.any():
            own = lengths[mine]
            marks = (int(own.min()), float(np.median(own)), int(own.max()))
            rows.append((name, int(mine.sum()), len(np.unique(keys[mine])), *marks))
    headers = ("chains", "number", "distinct", "shortest", "median", "longest")
    return Table("Chains", headers, rows)


def _codes(store: Store) -> Table:
    found = Counter(
        code for flat, offsets in store.flat("description") for code in _absent(flat, offsets)
    )
    headers = ("component that the dictionary lacks", "complexes")
    return Table("Components left out", headers, list(found.most_common(common.MOST_LISTED)))


def _absent(flat: Array, offsets: IntArray) -> list[str]:
    """Return the codes that were left out of the entries of a shard."""
    return [
        code
        for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        if stop > start
        for code in words_of({"description": flat[start:stop]})["left_out"]
    ]


def _resolution(store: Store) -> FloatArray:
    values = column(store, "resolution")[store.lengths("restype") > 0]
    return common.known_resolution(values)
