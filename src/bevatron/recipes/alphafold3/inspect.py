"""Tables and figures of ``bevatron inspect`` for a store of complexes."""

import csv
import datetime as dt
from collections import Counter
from typing import Any

import numpy as np

from bevatron.data.proteins.alignments import Alignments
from bevatron.data.proteins.complexes import describe as words_of
from bevatron.data.store.store import Store
from bevatron.data.summary.inspect import Table, counted
from bevatron.recipes.proteins import ALIGNMENTS, rejects_file
from bevatron.train.report import plots
from bevatron.train.report.page import Report
from bevatron.typing import Array, FloatArray, IntArray

Row = tuple[str | int | float | None, ...]

TYPES = ("protein", "RNA", "DNA", "ligand")
"""By the number in ``chain_type``."""

MOST_REJECTS = 40
"""Files that were left out and have a row of their own."""

LONGEST_REASON = 120
"""Characters."""


def describe(store: Store) -> list[Table]:
    """Describe a store of complexes: totals, chains, sizes, alignments, what was left out."""
    tables = [_overview(store), _chains(store), _sizes(store), _alignments(store)]
    tables += [_codes(store), _rejects(store)]
    return [table for table in tables if table.rows]


def draw(report: Report, store: Store) -> None:
    """Add figures of lengths, kinds, resolutions and depths of alignments to a report."""
    types, lengths = _column(store, "chain_type"), _column(store, "chain_length")
    tokens = sizes(store)["tokens"]
    tokens = tokens[tokens > 0]
    report.figure(
        plots.histogram(
            {"tokens": plots.Counted(*counted(tokens))}, "tokens of a complex", "Sizes", "complexes"
        ),
        "Distribution of the tokens of a complex.",
        "sizes_tokens",
    )
    polymers = {
        name: plots.Counted(*counted(lengths[types == number].astype(np.int64)))
        for number, name in enumerate(TYPES[:3])
        if (types == number).any()
    }
    if polymers:
        report.figure(
            plots.histogram(polymers, "residues of a chain", "Lengths of polymers", "chains"),
            "Distribution of the lengths of the chains.",
            "lengths",
        )
    resolution = _resolution(store)
    if len(resolution):
        report.figure(
            plots.histogram(
                {"resolution": resolution}, "resolution (Å)", "Resolution", "complexes"
            ),
            "Distribution of the resolutions that are known.",
            "resolution",
        )
    counts = np.bincount(types, minlength=len(TYPES)).astype(float)
    report.figure(
        plots.bars(TYPES, {"chains": counts}, "chains", "Kinds of chains"),
        "Number of chains of each kind.",
        "kinds",
    )
    depths = _depths(store)
    if len(depths):
        report.figure(
            plots.histogram(
                {"depth": plots.Counted(*counted(depths))}, "distinct rows", "Alignments",
                "sequences",
            ),
            "Distribution of the depths of the alignments.",
            "depths",
        )  # fmt: skip


def sizes(store: Store) -> dict[str, IntArray]:
    """Return tokens of all complexes, [n]; there are no edges."""
    return {"tokens": store.lengths("restype")}


def _overview(store: Store) -> Table:
    summary, settings = store.manifest["summary"], store.manifest["settings"]
    size = sum(int(shard["size"]) for shard in store.manifest["shards"])
    days = _column(store, "released")[store.lengths("restype") > 0]
    known = days[days >= 0]
    resolution = _resolution(store)
    rows: list[Row] = [
        ("files", summary["files"]),
        ("complexes", summary["usable"]),
        ("left out", summary["files"] - summary["usable"]),
        ("tokens", summary["tokens"]),
        ("atoms", summary["atoms"]),
        ("interfaces", int(store.lengths("interfaces").sum())),
        ("released first", _date(int(known.min())) if len(known) else None),
        ("released last", _date(int(known.max())) if len(known) else None),
        ("resolution, median (Å)", float(np.median(resolution)) if len(resolution) else None),
        ("without a resolution", summary["usable"] - len(resolution)),
        ("shards", len(store.manifest["shards"])),
        ("size on disk (MB)", size / 1e6),
        *((f"setting {key}", str(settings[key])) for key in ("components", "assembly")),
        ("fingerprint", str(store.manifest["fingerprint"])[:16]),
    ]
    return Table(str(store.path), ("", "value"), rows)


def _chains(store: Store) -> Table:
    types, lengths = _column(store, "chain_type"), _column(store, "chain_length")
    keys = _column(store, "chain_key")
    rows: list[Row] = []
    for number, name in enumerate(TYPES):
        mine = types == number
        if mine.any():
            own = lengths[mine]
            marks = (int(own.min()), float(np.median(own)), int(own.max()))
            rows.append((name, int(mine.sum()), len(np.unique(keys[mine])), *marks))
    headers = ("chains", "number", "distinct", "shortest", "median", "longest")
    return Table("Chains", headers, rows)


def _sizes(store: Store) -> Table:
    rows: list[Row] = []
    for name, field in (("tokens", "restype"), ("atoms", "ref_element")):
        values = store.lengths(field)
        values = values[values > 0]
        if len(values):
            marks = np.percentile(values, [50, 99]).tolist()
            rows.append((name, int(values.min()), float(values.mean()), *marks, int(values.max())))
    return Table("Sizes", ("per complex", "min", "mean", "median", "99 %", "max"), rows)


def _alignments(store: Store) -> Table:
    depths = _depths(store)
    if not len(depths):
        return Table("Alignments", (), [])
    row = (len(depths), int(depths.min()), float(np.median(depths)), int(depths.max()))
    return Table("Alignments", ("sequences", "fewest rows", "median", "most rows"), [row])


def _codes(store: Store) -> Table:
    found = Counter(
        code for flat, offsets in store.flat("description") for code in _absent(flat, offsets)
    )
    headers = ("component that the dictionary lacks", "complexes")
    return Table("Components left out", headers, list(found.most_common(MOST_REJECTS)))


def _absent(flat: Array, offsets: IntArray) -> list[str]:
    """Return the codes that were left out of the entries of a shard."""
    return [
        code
        for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        if stop > start
        for code in words_of({"description": flat[start:stop]})["left_out"]
    ]


def _rejects(store: Store) -> Table:
    path, rows = rejects_file(store), []
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            listed = list(csv.reader(file))[1:]
        rows = [(each[0], each[1][:LONGEST_REASON]) for each in listed[:MOST_REJECTS]]
        if len(listed) > MOST_REJECTS:
            rows.append((f"and {len(listed) - MOST_REJECTS} more", f"see {path}"))
    return Table("Left out", ("file", "reason"), list(rows))


def _depths(store: Store) -> IntArray:
    """Return the rows of each alignment."""
    folder = store.path / ALIGNMENTS
    if not folder.exists():
        return np.zeros(0, dtype=np.int64)
    rows: IntArray = _column(Alignments.open(folder).store, "num_rows").astype(np.int64)
    return rows


def _resolution(store: Store) -> FloatArray:
    found = _column(store, "resolution")[store.lengths("restype") > 0]
    known: FloatArray = found[np.isfinite(found)].astype(np.float64)
    return known


def _column(store: Store, field: str) -> Any:
    """Return a field of all entries."""
    return np.concatenate([np.array(flat) for flat, _ in store.flat(field)])


def _date(day: int) -> str:
    return (dt.date(1970, 1, 1) + dt.timedelta(days=day)).isoformat()
