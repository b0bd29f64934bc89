"""A loader whose samples are sometimes a hundred times slower, and whose workers are killed.

Four workers, batches of 8 samples of 4 ms each, a training step of 20 ms; every 250th batch holds a
sample of 400 ms. A worker is killed every 20 s. The same samples and batches go through torch's
DataLoader, in order and out of order.

    python -m benchmarks.train.slow_samples [--batches 2000]
"""

import argparse
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import numpy as np
from benchmarks.common.report import write_result
from torch.utils.data import DataLoader

from bevatron.data.loader import Loader

GRAPHS, WORKERS, SAMPLE, SLOW, STEP = 8, 4, 0.004, 0.4, 0.02
SLOW_EVERY, KILL_EVERY, WINDOW = 250, 20.0, 24


class Samples:
    """Numbers that take their time."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> int:
        time.sleep(SLOW if index % (SLOW_EVERY * GRAPHS) == SLOW_EVERY * GRAPHS // 2 else SAMPLE)
        return index

    def describe(self, index: int) -> str:
        """Name a sample."""
        return f"number {index}"


def collate(samples: list[int], *_: Any) -> list[int]:
    """Put samples together, for both loaders."""
    return samples


def ours(count: int, window: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield batches and the processes that can be killed now."""
    numbers = np.arange(count * GRAPHS).reshape(count, GRAPHS)
    plan = [(row, np.ones(GRAPHS)) for row in numbers]
    settings = {"workers": WORKERS, "window": window, "prefetch": WINDOW}
    with Loader(Samples(), plan, collate, **settings) as loader:
        for loaded in loader:
            yield loaded.batch, loader.worker_pids


def theirs(count: int, in_order: bool) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the same from torch's DataLoader, which prefetches as many batches."""
    numbers = np.arange(count * GRAPHS).reshape(count, GRAPHS).tolist()
    loader: Any = DataLoader(
        Samples(),  # type: ignore[arg-type]
        batch_sampler=numbers,
        num_workers=WORKERS,
        collate_fn=collate,
        prefetch_factor=WINDOW // WORKERS,
        in_order=in_order,
        multiprocessing_context="forkserver",
    )
    iterator = iter(loader)
    for batch in iterator:
        yield batch, [worker.pid for worker in iterator._workers]  # noqa: SLF001


def consume(
    who: str, source: Iterator[tuple[list[int], list[int]]], count: int, *, kill: bool
) -> dict[str, Any]:
    """Train on the batches; count what arrives and how long each step waits."""
    choice = random.Random(0)
    seen: Counter[int] = Counter()
    waits: list[float] = []
    kills, error = 0, ""
    with closing(source):  # type: ignore[type-var]
        batch, pids = next(source)
        began = killed = time.monotonic()
        seen.update(batch)
        try:
            while True:
                time.sleep(STEP)
                if kill and time.monotonic() - killed > KILL_EVERY and pids:
                    with suppress(ProcessLookupError):
                        os.kill(choice.choice(pids), signal.SIGKILL)
                        kills += 1
                    killed = time.monotonic()
                asked = time.monotonic()
                batch, pids = next(source)
                waits.append(time.monotonic() - asked)
                seen.update(batch)
        except StopIteration:
            pass
        except Exception as problem:  # noqa: BLE001  what a peer does is the result
            error = type(problem).__name__
    seconds = time.monotonic() - began
    return {
        "loader": who,
        "kills": kills,
        "batches": len(waits) + 1,
        "samples lost": count * GRAPHS - len(seen),
        "doubled": sum(seen.values()) - len(seen),
        "longest wait (ms)": round(1e3 * max(waits)),
        "waits above 50 ms": sum(wait > 0.05 for wait in waits),
        "share of waiting (%)": round(100 * sum(waits) / seconds, 2),
        "ended by": error or "its end",
    }


def main() -> None:
    """Measure, print and keep the table."""
    parser = argparse.ArgumentParser(description="Slow samples and killed workers")
    parser.add_argument("--batches", type=int, default=2000)
    count = parser.parse_args().batches
    rows = []
    for kill in (False, True):
        rows += [
            consume(f"bevatron, window {window}", ours(count, window), count, kill=kill)
            for window in (1, WINDOW)
        ]
        rows += [
            consume(f"torch DataLoader, {name}", theirs(count, in_order), count, kill=kill)
            for name, in_order in (("in order", True), ("out of order", False))
        ]
    write_result(
        "train/slow_samples",
        rows,
        notes=(
            f"{WORKERS} workers, {count} batches of {GRAPHS} samples of {1e3 * SAMPLE:.0f} ms, "
            f"steps of {1e3 * STEP:.0f} ms; every {SLOW_EVERY}th batch holds a sample of "
            f"{1e3 * SLOW:.0f} ms. With kills, a worker is killed every {KILL_EVERY:.0f} s. A "
            f"window of {WINDOW} batches lasts {1e3 * WINDOW * STEP:.0f} ms, longer than the slow "
            f"batch. All prefetch {WINDOW} batches. torch's loader ends with an error when a "
            "worker is killed, or waits without end for its batches: what had not arrived counts "
            "as lost. The "
            f"load average at the end was {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
        ),
    )


if __name__ == "__main__":
    main()
