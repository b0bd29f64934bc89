"""`bevatron bench`: rates of store, loader and packing on the user's own data and machine."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np

from bevatron.data.loader import Loader
from bevatron.data.packing import Algorithm, Plan, pack
from bevatron.data.samples import collate_structures
from bevatron.data.store import Store
from bevatron.recipes.structures import batch_sizes

Rows = list[dict[str, Any]]


def store_rates(path: Path, reads: int = 5000) -> Rows:
    """Time opening a store and reading random samples, checksum included."""
    began = time.perf_counter()
    store = Store.open(path)
    opened = time.perf_counter() - began
    order = np.random.default_rng(0).integers(len(store), size=reads).tolist()
    for index in order[: reads // 5]:
        store[index]
    times = []
    for index in order:
        began = time.perf_counter()
        store[index]
        times.append(time.perf_counter() - began)
    sizes = batch_sizes(store)
    return [
        {
            "samples": len(store),
            "atoms": f"{sizes['atoms'].mean():.1f}",
            "edges": f"{sizes['edges'].mean():.0f}",
            "open ms": f"{opened * 1e3:.1f}",
            "read us (median)": f"{median(times) * 1e6:.1f}",
            "read us (99 %)": f"{np.quantile(times, 0.99) * 1e6:.1f}",
        }
    ]


def loader_rates(path: Path, capacity: int, workers: Sequence[int]) -> Rows:
    """Time one epoch of collated batches for several numbers of worker processes."""
    store = Store.open(path)
    plan = _plan(store, capacity, 1, "balanced")
    rows = []
    for number in workers:
        loader = Loader(store, plan.flat(0), collate_structures, workers=number)
        began, atoms, graphs = time.perf_counter(), 0, 0
        for loaded in loader:
            atoms += loaded.batch.num_atoms
            graphs += loaded.batch.num_graphs
        seconds = time.perf_counter() - began
        rows.append(
            {
                "workers": number,
                "structures/s": f"{graphs / seconds:,.0f}",
                "atoms/s": f"{atoms / seconds:,.0f}",
                "batches/s": f"{plan.num_steps / seconds:,.0f}",
            }
        )
    return rows


def packing_figures(path: Path, capacity: int, ranks: int) -> Rows:
    """Compare the packing algorithms on the sizes of a store."""
    store = Store.open(path)
    rows = []
    for algorithm in get_args(Algorithm):
        began = time.perf_counter()
        plan = _plan(store, capacity, ranks, algorithm)
        rows.append(
            {
                "algorithm": algorithm,
                "steps": plan.num_steps,
                "fill": f"{plan.fill:.1%}",
                "largest/mean per step": f"{plan.imbalance:.3f}",
                "ms": f"{(time.perf_counter() - began) * 1e3:.1f}",
            }
        )
    return rows


def _plan(store: Store, capacity: int, ranks: int, algorithm: Algorithm) -> Plan:
    atoms = batch_sizes(store)["atoms"]
    size = max(1, int(capacity / atoms.mean())) if algorithm == "fixed_count" else None
    return pack(
        atoms,
        capacity,
        ranks,
        algorithm=algorithm,
        batch_size=size,
        oversized="alone",
        names=store.describe,
    )
