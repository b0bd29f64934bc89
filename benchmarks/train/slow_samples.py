"""A loader whose samples are sometimes a hundred times slower, and whose workers are killed.

Four workers, batches of 8 samples of 4 ms each, a training step of 20 ms; every 250th batch holds a
sample of 400 ms. A worker is killed every 20 s. The same samples and batches go through torch's
DataLoader, in order and out of order. Of a store of chains: samples of AlphaFold2's initial
training, one a step, nothing is killed.

    python -m benchmarks.train.slow_samples [--batches 2000]
    python -m benchmarks.train.slow_samples STORE [--step 10]
"""

import argparse
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from benchmarks.common.arguments import add_out
from benchmarks.common.report import write_result
from torch.utils.data import DataLoader

from bevatron.data.loader import Loader
from bevatron.data.packing.draws import Draws, Source
from bevatron.data.proteins.chain_batch import ChainBatch, collate_chain
from bevatron.data.proteins.weights import chain_weights
from bevatron.recipes.alphafold2.data import ChainDataset, chain_table
from bevatron.recipes.alphafold2.run import CYCLES, published_stages
from bevatron.recipes.alphafold2.stores import open_chains

INITIAL = published_stages()["initial"]
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


class Chains(Draws):
    """Real samples: crops of chains with their alignments, of some more than of others."""

    def __init__(self, store: Path) -> None:
        table = chain_table(open_chains(store))
        table = table.take(table.usable)
        data = ChainDataset(store, table.units, table.length, INITIAL.sizes, CYCLES)
        weights = chain_weights(table.length, table.cluster)
        super().__init__([Source("chains", data, weights, 1.0)], seed=0)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return int(index), super().__getitem__(index)


def collate_chains(samples: list[Any], *_: Any) -> tuple[list[int], ChainBatch]:
    """Put numbered chains together, for both loaders."""
    numbers = [number for number, _ in samples]
    chains = [chain for _, chain in samples]
    return numbers, collate_chain(chains, np.array(numbers), [1.0] * len(numbers))


@dataclass(frozen=True)
class Case:
    """What is loaded, and how.

    Attributes
    ----------
    samples, collate : as a loader takes them
    size : samples of a batch
    step : seconds that a batch is trained on
    """

    samples: Any
    collate: Callable[..., Any]
    size: int = GRAPHS
    step: float = STEP


Batches = Iterator[tuple[list[int], list[int]]]
"""Numbers of a batch's samples, and the processes that can be killed now."""


def ours(case: Case, count: int, window: int) -> Batches:
    """Yield batches of our loader."""
    numbers = np.arange(count * case.size).reshape(count, case.size)
    plan = [(row, np.ones(case.size)) for row in numbers]
    settings = {"workers": WORKERS, "window": window, "prefetch": WINDOW}
    with Loader(case.samples, plan, case.collate, **settings) as loader:
        for loaded in loader:
            yield numbers_of(loaded.batch), loader.worker_pids


def theirs(case: Case, count: int, in_order: bool) -> Batches:
    """Yield the same from torch's DataLoader, which prefetches as many batches."""
    numbers = np.arange(count * case.size).reshape(count, case.size).tolist()
    loader: Any = DataLoader(
        case.samples,
        batch_sampler=numbers,
        num_workers=WORKERS,
        collate_fn=case.collate,
        prefetch_factor=WINDOW // WORKERS,
        in_order=in_order,
        multiprocessing_context="forkserver",
    )
    iterator = iter(loader)
    for batch in iterator:
        yield numbers_of(batch), [worker.pid for worker in iterator._workers]  # noqa: SLF001


def numbers_of(batch: Any) -> list[int]:
    return batch[0] if isinstance(batch, tuple) else batch


def consume(who: str, source: Batches, case: Case, count: int, *, kill: bool) -> dict[str, Any]:
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
                time.sleep(case.step)
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
        "samples lost": count * case.size - len(seen),
        "doubled": sum(seen.values()) - len(seen),
        "longest wait (ms)": round(1e3 * max(waits)),
        "waits above 50 ms": sum(wait > 0.05 for wait in waits),
        "share of waiting (%)": round(100 * sum(waits) / seconds, 2),
        "ended by": error or "its end",
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Slow samples and killed workers")
    parser.add_argument("store", type=Path, nargs="?", help="of chains; default: samples that wait")
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--step", type=float, default=10.0, help="of chains, ms")
    add_out(parser)
    given = parser.parse_args(argv)
    count = given.batches
    case = Case(Samples(), collate)
    if given.store is not None:
        case = Case(Chains(given.store), collate_chains, size=1, step=1e-3 * given.step)
    rows = []
    for kill in (False,) if given.store else (False, True):
        rows += [
            consume(f"bevatron, window {window}", ours(case, count, window), case, count, kill=kill)
            for window in (1, WINDOW)
        ]
        rows += [
            consume(f"torch DataLoader, {name}", theirs(case, count, order), case, count, kill=kill)
            for name, order in (("in order", True), ("out of order", False))
        ]
    load = f"The load average at the end was {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    if given.store is not None:
        notes = (
            f"{WORKERS} workers, {count} samples of AlphaFold2's initial training, one a step of "
            f"{given.step:g} ms, drawn from chains with their alignments: see "
            f"alphafold2/sample_times. All prefetch {WINDOW} samples. {load}"
        )
        write_result("alphafold2/slow_samples", rows, notes, folder=given.out)
        return
    notes = (
        f"{WORKERS} workers, {count} batches of {GRAPHS} samples of {1e3 * SAMPLE:.0f} ms, "
        f"steps of {1e3 * STEP:.0f} ms; every {SLOW_EVERY}th batch holds a sample of "
        f"{1e3 * SLOW:.0f} ms. With kills, a worker is killed every {KILL_EVERY:.0f} s. A "
        f"window of {WINDOW} batches lasts {1e3 * WINDOW * STEP:.0f} ms, longer than the slow "
        f"batch. All prefetch {WINDOW} batches. torch's loader ends with an error when a "
        "worker is killed, or waits without end for its batches: what had not arrived counts "
        f"as lost. {load}"
    )
    write_result("train/slow_samples", rows, notes, folder=given.out)


if __name__ == "__main__":
    main()
