"""The part of ``bevatron inspect`` common to all protein stores: searches, clusters, rejects."""

import csv
import datetime as dt
import re
import textwrap
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bevatron.data.dataset import column
from bevatron.data.proteins.alignments import Alignments, sequence_key
from bevatron.data.proteins.hit_files import NamedChain
from bevatron.data.store.store import Store
from bevatron.data.summary.inspect import Row, Table
from bevatron.recipes.proteins.clusters import clusters_of
from bevatron.recipes.proteins.searches import opened_searches
from bevatron.recipes.rejects import rejects_file
from bevatron.train.report import plots
from bevatron.train.report.page import Report
from bevatron.typing import Array, FloatArray, IntArray

MOST_LISTED = 40
"""Files, sequences and components that have a row of their own."""

LONGEST_REASON = 120
"""Characters."""

OPTIONAL = "lowest_plddt", "released_before", "released_from"
"""Settings that a store has if they were given."""

# What differs between two reasons of one kind: what is quoted, numbers, lists in parentheses.
_PARTICULAR = re.compile(r"'[^']*'|\([^)]*\)|[-+]?\d[\d,.]*")


def date(day: int) -> str:
    """Return a day as an ISO date, see `bevatron.data.proteins.chain_index.day_number`."""
    return (dt.date(1970, 1, 1) + dt.timedelta(days=day)).isoformat()


def dates(days: Array) -> list[Row]:
    """Return rows with the first and the last known day."""
    known = [day for day in days.tolist() if day >= 0]
    ends = (date(min(known)), date(max(known))) if known else (None, None)
    return [("earliest release", ends[0]), ("latest release", ends[1])]


def settings(store: Store, *names: str) -> list[Row]:
    """Return rows with the settings of a store, as far as it has them."""
    known = store.manifest["settings"]
    return [(name, str(known[name])) for name in (*names, *OPTIONAL) if name in known]


def searches(store: Store, chains: Sequence[NamedChain]) -> list[Table]:
    """Return how many sequences have alignments and templates, and who has no alignment.

    Parameters
    ----------
    chains : the proteins in it
    """
    alignments, templates = opened_searches(store.path)
    named: dict[bytes, list[NamedChain]] = {}
    for chain in chains:
        key = sequence_key(chain.classes)
        named.setdefault(key, []).append(chain)
    keys = set(named)
    rows: list[Row] = []
    missing: list[Row] = []
    if alignments is not None:
        rows.append(("alignments", *_marks(depths(alignments), keys, alignments.keys())))
        known = set(alignments.keys())
        missing = [
            (f"{same[0].entry}_{same[0].names[0]}", len(same), len(same[0].classes))
            for key, same in named.items()
            if key not in known
        ]
        if len(missing) > MOST_LISTED:
            more = f"and {len(missing) - MOST_LISTED} more"
            missing = [*missing[:MOST_LISTED], (more, None, None)]
    if templates is not None:
        rows.append(("templates", *_marks(templates.counts(), keys, templates.keys())))
    headers = ("found", "sequences with", "without", "fewest", "median", "most")
    return [
        Table("Alignments and templates", headers, rows),
        Table("Sequences without alignment", ("first chain", "chains", "residues"), missing),
    ]


def _marks(numbers: IntArray, keys: set[bytes], found: list[bytes]) -> Row:
    some = numbers[numbers > 0]
    known = {key for key, number in zip(found, numbers.tolist(), strict=True) if number}
    marks = (int(some.min()), float(np.median(some)), int(some.max())) if len(some) else (0, 0, 0)
    return (len(some), len(keys - known), *marks)


def clusters(store: Store) -> IntArray:
    """Return how many distinct sequences each cluster has; peptides are in none."""
    numbers = list(clusters_of(store.path).values())
    return np.bincount(np.array(numbers, dtype=np.int64))


def clusters_table(store: Store) -> Table:
    """Return the number and the sizes of the clusters."""
    sizes = clusters(store)
    rows: list[Row] = []
    if len(sizes):
        alone = int((sizes == 1).sum())
        rows.append((len(sizes), int(sizes.sum()), alone, float(sizes.mean()), int(sizes.max())))
    return Table("Clusters", ("clusters", "sequences", "alone", "mean size", "largest"), rows)


def rejects(store: Store) -> list[Table]:
    """Count the files left out by reason, and list the first of them."""
    path = rejects_file(store)
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        listed = list(csv.reader(file))[1:]
    kinds = Counter(_shortened(_PARTICULAR.sub("…", reason)) for _, reason in listed)
    rows: list[Row] = [(file, _shortened(reason)) for file, reason in listed[:MOST_LISTED]]
    if len(listed) > MOST_LISTED:
        rows.append((f"and {len(listed) - MOST_LISTED} more", f"see {path}"))
    return [
        Table("Left out, by reason", ("reason", "files"), list(kinds.most_common(MOST_LISTED))),
        Table("Left out", ("file", "reason"), rows),
    ]


def _shortened(reason: str) -> str:
    return textwrap.shorten(reason, LONGEST_REASON, placeholder=" …")


def depths(alignments: Alignments) -> IntArray:
    """Return the rows of each alignment."""
    rows: IntArray = column(alignments.store, "num_rows").astype(np.int64)
    return rows


def known_resolution(values: Array) -> FloatArray:
    """Return the known resolutions, Å."""
    whole: FloatArray = values.astype(np.float64)
    return whole[np.isfinite(whole)]


def draw_resolution(report: Report, resolution: FloatArray, of: str) -> None:
    """Draw the known resolutions."""
    if len(resolution):
        report.figure(
            plots.histogram({"resolution": resolution}, "resolution (Å)", "Resolution", of),
            "Resolutions of the entries that have one.",
            "resolution",
        )


def draw_searches(report: Report, store: Store) -> None:
    """Draw the depths of alignments, the numbers of templates and the sizes of clusters."""
    alignments, templates = opened_searches(store.path)
    numbers = {
        "depths": (None if alignments is None else depths(alignments), "distinct rows",
                   "Alignments", "sequences", "Distinct rows of each alignment"),
        "templates": (None if templates is None else templates.counts(), "templates",
                      "Templates", "sequences", "Templates kept for each sequence with hits"),
        "clusters": (clusters(store), "distinct sequences of a cluster", "Clusters", "clusters",
                     "Distinct sequences of each cluster"),
    }  # fmt: skip
    for name, (values, what, title, of, caption) in numbers.items():
        if values is not None and len(values):
            report.figure(plots.histogram({name: values}, what, title, of), f"{caption}.", name)
