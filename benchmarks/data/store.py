"""How long the store takes to open and to give a sample, its checksum verified.

Samples have 100 atoms and 4500 edges (about 95 KB), as a 5 Å cutoff gives in condensed matter. All
pages are in the system's page cache. "mapped": the pages were touched by this process before;
"first touch": a new process's first access, where the system maps the pages one by one.

    python -m benchmarks.data.store [--samples 8192] [--repeats 5]
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.report import write_result

from bevatron.data.samples import STRUCTURE_FIELDS
from bevatron.data.store.prepare import write_store
from bevatron.data.store.shards import Columns
from bevatron.data.store.store import Store

ATOMS, EDGES = 100, 4500
ROWS = {
    "atomic_numbers": ATOMS,
    "positions": ATOMS,
    "forces": ATOMS,
    "edges": EDGES,
    "edge_shifts": EDGES,
    "group": 8,
}


def columns(num_samples: int, per_shard: int) -> Iterator[Columns]:
    """Random content in the shape of real samples."""
    rng = np.random.default_rng(0)
    for start in range(0, num_samples, per_shard):
        n = min(per_shard, num_samples - start)
        arrays = {
            field.name: rng.integers(
                0, 2, (n * ROWS[field.name] if field.ragged else n, *field.shape)
            ).astype(field.dtype)
            for field in STRUCTURE_FIELDS
        }
        yield Columns(n, arrays, {name: np.arange(n + 1) * rows for name, rows in ROWS.items()})


def times(function: Callable[[int], Any], order: list[int]) -> np.ndarray:
    """Microseconds of each call."""
    clock = time.perf_counter_ns
    result = np.empty(len(order))
    for place, index in enumerate(order):
        begin = clock()
        function(index)
        result[place] = (clock() - begin) / 1e3
    return result


def row(what: str, microseconds: np.ndarray) -> dict[str, Any]:
    """One line of the table."""
    p50, p99 = np.percentile(microseconds, [50, 99])
    return {
        "access": what,
        "p50 [us]": round(float(p50), 1),
        "p99 [us]": round(float(p99), 1),
        "mean [us]": round(float(microseconds.mean()), 1),
        "GB/s": round(SAMPLE_BYTES / float(p50) / 1e3, 1),
    }


SAMPLE_BYTES = sum(
    (ROWS[f.name] if f.ragged else 1) * int(np.prod(f.shape)) * np.dtype(f.dtype).itemsize
    for f in STRUCTURE_FIELDS
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        write_store(path, STRUCTURE_FIELDS, columns(arguments.samples, 512))
        begin = time.perf_counter()
        store = Store(path, resident_limit=None)
        opened = time.perf_counter() - begin
        begin = time.perf_counter()
        store.lengths("edges")
        planned = time.perf_counter() - begin
        order = rng.permutation(len(store)).tolist()
        small = order[:128]  # 12 MB: stays in the CPU's cache
        rows = [row("random order, first touch", times(store.__getitem__, order))]
        orders = [rng.permutation(len(store)).tolist() for _ in range(arguments.repeats)]
        rows += [
            row(
                "random order, mapped",
                np.concatenate([times(store.__getitem__, o) for o in orders]),
            ),
            row("in order, mapped", np.concatenate([times(store.__getitem__, sorted(order))])),
            row(
                "128 samples again and again",
                np.concatenate([times(store.__getitem__, small) for _ in range(40)])[128:],
            ),
        ]
        limited = Store(path)
        rows.append(row("random order, at most 512 MiB mapped", times(limited.__getitem__, order)))
    write_result(
        "data/store",
        rows,
        notes=(
            f"{arguments.samples} samples of {ATOMS} atoms and {EDGES} edges, "
            f"{SAMPLE_BYTES / 1e3:.0f} KB each ({arguments.samples * SAMPLE_BYTES / 1e6:.0f} MB), "
            "from a warm page cache, checksum verified; single calls timed one by one on one core. "
            f"The store opened in {opened * 1e3:.1f} ms; the lengths of all samples took "
            f"{planned * 1e3:.1f} ms."
        ),
    )


if __name__ == "__main__":
    main()
