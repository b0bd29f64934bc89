"""The content of a store, and how batches would fill ranks, as plain tables.

Only the manifest and the sample lengths are read, so a store of a million structures is described
within seconds.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.packing import Algorithm, CostModel, Plan, pack
from bevatron.data.store.store import Store
from bevatron.errors import StoreError
from bevatron.output import counted, span
from bevatron.typing import IntArray

MOST_ROWS = 40
"""Maximum number of rows for files or groups; the others share one row."""


Row = tuple[str | int | float | None, ...]


@dataclass(frozen=True)
class Table:
    """A table to print or to put into a report; None is an empty cell."""

    title: str
    headers: tuple[str, ...]
    rows: list[Row]

    def records(self) -> list[dict[str, str | int | float | None]]:
        """Return the rows as mappings from the header of each column."""
        return [dict(zip(self.headers, row, strict=True)) for row in self.rows]


def describe(store: Store) -> list[Table]:
    """Describe a store of structures: overview, files, labels, sizes, elements, groups.

    Raises StoreError if the store holds no structures or was prepared without a summary.
    """
    summary = _summary(store)
    tables = [_overview(store, summary), _files(store, summary), _labels(summary), _sizes(store)]
    tables += [_elements(summary), _groups(summary)]
    return [table for table in tables if table.rows]


def neighbours_by_file(store: Store) -> dict[str, tuple[IntArray, IntArray]]:
    """Return the histogram of neighbours per atom for each file.

    Returns
    -------
    By name of the file: numbers of neighbours that occur, and the number of atoms with each.
    """
    result = {}
    for number, part in _summary(store)["files"].items():
        histogram = part.get("neighbours", {}).get("histogram", {})
        degrees = np.array([int(degree) for degree in histogram], dtype=np.int64)
        atoms = np.array(list(histogram.values()), dtype=np.int64)
        result[_file_name(store.manifest["sources"], number)] = (degrees, atoms)
    return result


@dataclass(frozen=True)
class PlanStatistics:
    """The plan of one algorithm and the time to compute it."""

    name: str
    plan: Plan
    seconds: float


def compare_plans(
    atoms: IntArray,
    edges: IntArray,
    capacity: int,
    num_ranks: int,
    cost: CostModel | None = None,
    seed: int = 0,
    names: Callable[[int], str] | None = None,
) -> list[PlanStatistics]:
    """Plan an epoch with a fixed number of structures, with Algorithm 1 and with ours.

    The fixed number is the mean number of structures in our batches, so that all plans have about
    the same number of steps; its batches obey no capacity. A structure above capacity gets a batch
    of its own.

    Parameters
    ----------
    atoms, edges : [n]
        Sizes of the structures.
    capacity : maximum number of atoms in a batch
    num_ranks : number of processes that share the epoch
    cost : the cost to balance over ranks; atoms by default
    names : returns the name of a structure for messages
    """
    balance = (cost or CostModel())(atoms, edges)

    def timed(name: str, algorithm: Algorithm, size: int | None = None) -> PlanStatistics:
        begin = time.perf_counter()
        plan = pack(
            atoms,
            capacity,
            num_ranks,
            seed,
            algorithm=algorithm,
            balance=balance,
            batch_size=size,
            oversized="alone",
            names=names,
        )
        return PlanStatistics(name, plan, time.perf_counter() - begin)

    ours = timed("balanced", "balanced")
    size = max(1, round(len(atoms) / ours.plan.num_batches))
    fixed = timed(f"fixed ({size})", "fixed_count", size)
    return [fixed, timed("Algorithm 1", "algorithm1"), ours]


def plan_table(
    plans: Sequence[PlanStatistics], capacity: int, num_ranks: int, unit: str, samples: str
) -> Table:
    """Tabulate plans of batches of ``samples``; ``unit`` is what the capacity counts."""
    rows: list[Row] = []
    for each in plans:
        plan = each.plan
        sizes = plan.batch_sizes
        worst = float(plan.step_imbalance.max(initial=1.0))
        rows.append(
            (
                each.name,
                plan.num_steps,
                span(sizes.min(), sizes.max()),
                100 * plan.fill,
                100 * (plan.imbalance - 1),
                100 * (worst - 1),
                plan.num_repeats,
                1000 * each.seconds,
            )
        )
    headers = (
        "batches",
        "steps",
        f"{samples} per batch",
        "fill (%)",
        "slowest rank over mean (%)",
        "worst step (%)",
        "repeats",
        "ms to plan",
    )
    title = f"One epoch on {counted(num_ranks, 'rank')}, {capacity:,} {unit} per batch"
    return Table(title, headers, rows)


def overview(store: Store, rows: Sequence[Row], more: Sequence[Row] = ()) -> Table:
    """Return the first table of any store: ``rows``, its size, ``more``, its fingerprint."""
    size = sum(int(shard["size"]) for shard in store.manifest["shards"])
    every: list[Row] = [
        *rows,
        ("shards", len(store.manifest["shards"])),
        ("size on disk (MB)", size / 1e6),
        *more,
        ("fingerprint", str(store.manifest["fingerprint"])[:16]),
    ]
    return Table(str(store.path), ("property", "value"), every)


def sizes_table(of: str, sizes: Mapping[str, IntArray]) -> Table:
    """Return the range of sizes of samples, by name; those of 0 are none."""
    rows: list[Row] = []
    for name, lengths in sizes.items():
        values = lengths[lengths > 0]
        if len(values):
            marks = np.percentile(values, [50, 99]).tolist()
            rows.append((name, int(values.min()), float(values.mean()), *marks, int(values.max())))
    return Table("Sizes", (f"per {of}", "min", "mean", "median", "99 %", "max"), rows)


def _summary(store: Store) -> Mapping[str, Any]:
    summary = store.manifest.get("summary") or {}
    if "all" not in summary or "files" not in summary:
        raise StoreError(f"{store.path}: has no summary of structures; it is another kind of store")
    return summary


def _file_name(sources: Sequence[str], number: str) -> str:
    """Return the path of a file relative to the common folder of all files."""
    if int(number) >= len(sources):
        return f"file {number}"
    shared = os.path.commonpath([str(Path(source).parent) for source in sources])
    return os.path.relpath(sources[int(number)], shared) if shared else sources[int(number)]


def _overview(store: Store, summary: Mapping[str, Any]) -> Table:
    whole = summary["all"]
    settings = [
        ("cutoff (Å)" if name == "cutoff" else name, value)
        for name, value in store.manifest["settings"].items()
        if isinstance(value, int | float | str)
    ]
    heads = summary.get("heads", {})
    several = [(f"head {head}: structures", n) for head, n in heads.items() if len(heads) > 1]
    rows = [
        ("structures", len(store)),
        ("atoms", int(whole.get("atoms", 0))),
        ("edges", int(whole.get("edges", 0))),
        ("files", len(store.manifest["sources"])),
    ]
    return overview(store, rows, [*settings, *several])


def _files(store: Store, summary: Mapping[str, Any]) -> Table:
    files = list(summary["files"].items())
    rows: list[Row] = []
    for number, part in files[:MOST_ROWS]:
        neighbours = part.get("neighbours", {})
        structures, atoms = part["structures"], part["atoms"]
        rows.append(
            (
                _file_name(store.manifest["sources"], number),
                structures,
                _range(part["sizes"]["atoms"], atoms / structures),
                _range(neighbours, part["edges"] / atoms) if neighbours else "",
                *(_percent(part["labels"][name], structures) for name in _LABELS),
            )
        )
    if len(files) > MOST_ROWS:
        rest = sum(part["structures"] for _, part in files[MOST_ROWS:])
        rows.append((f"{len(files) - MOST_ROWS} more", rest, "", "", "", "", ""))
    headers = ("file", "structures", "atoms", "neighbours")
    return Table("Files", (*headers, *_LABELS), rows)


def _labels(summary: Mapping[str, Any]) -> Table:
    whole = summary["all"]
    structures = whole["structures"]
    rows: list[Row] = []
    for name in _LABELS:
        text = ""
        if name == "energy" and "energy_per_atom" in whole:
            part = whole["energy_per_atom"]
            mean = part["sum"] / whole["labels"]["energy"]
            text = f"{part['min']:.6g} to {part['max']:.6g}, mean {mean:.6g} eV/atom"
        if name == "forces" and whole.get("forces", {}).get("components"):
            part = whole["forces"]
            rms = np.sqrt(part["sum_squares"] / part["components"])
            text = f"RMS {rms:.3g}, largest component {part['max']:.3g} eV/Å"
        count = whole["labels"][name]
        rows.append((name, count, _percent(count, structures), text))
    if whole["labels"]["none"]:
        count = whole["labels"]["none"]
        rows.append(("no label at all", count, _percent(count, structures), ""))
    return Table("Labels", ("label", "structures", "share", "values"), rows)


def _sizes(store: Store) -> Table:
    shares = (0, 0.05, 0.5, 0.95, 1)
    rows: list[Row] = []
    for name, field in (("atoms", "atomic_numbers"), ("edges", "edges")):
        lengths = store.lengths(field)
        if len(lengths):
            low, five, middle, most, high = np.quantile(lengths, shares, method="lower").tolist()
            rows.append((name, low, five, middle, float(lengths.mean()), most, high))
    headers = ("per structure", "min", "5 %", "median", "mean", "95 %", "max")
    return Table("Sizes", headers, rows)


def _elements(summary: Mapping[str, Any]) -> Table:
    from ase.data import chemical_symbols

    counts = summary["all"].get("elements", {})
    total = sum(counts.values())
    rows: list[Row] = [
        (chemical_symbols[int(z)], counts[z], _percent(counts[z], total))
        for z in sorted(counts, key=int)
    ]
    return Table("Elements", ("element", "atoms", "share"), rows)


def _groups(summary: Mapping[str, Any]) -> Table:
    groups = sorted(summary.get("groups", {}).items(), key=lambda item: -item[1])
    total = sum(count for _, count in groups)
    rows: list[Row] = [
        (name or "(none)", count, _percent(count, total)) for name, count in groups[:MOST_ROWS]
    ]
    if len(groups) > MOST_ROWS:
        rest = sum(count for _, count in groups[MOST_ROWS:])
        rows.append((f"{len(groups) - MOST_ROWS} more", rest, _percent(rest, total)))
    return Table("Groups", ("group", "structures", "share"), rows if len(groups) > 1 else [])


_LABELS = ("energy", "forces", "stress")


def _range(part: Mapping[str, Any], mean: float) -> str:
    low, high = part["min"], part["max"]
    return span(low, high) + ("" if low == high else f", mean {mean:.3g}")


def _percent(part: float, whole: float) -> str:
    """Format a share; 0 % and 100 % only if exact."""
    if not whole:
        return ""
    value = 100 * part / whole
    if 0 < value < 0.1:
        return "< 0.1 %"
    if 99.9 < value < 100:
        return "> 99.9 %"
    return f"{value:.3g} %" if value < 99.95 else "100 %"
