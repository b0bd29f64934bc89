"""What the loader costs: batches a second, waiting next to a training step, transport, deaths.

Samples are structures of 96 atoms with 3,600 edges, as a store gives them; a batch has 32 of them
(3,072 atoms, about 5 MB). The same samples and batches go through torch's DataLoader.

    python -m benchmarks.data.loader [--batches 60]
"""

import argparse
import io
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from benchmarks.common.report import write_result
from torch.utils.data import DataLoader

from bevatron.data.loader import Loader, transfer
from bevatron.data.samples import STRUCTURE_FIELDS, StructureBatch, collate_structures

NUM_ATOMS, NUM_EDGES, GRAPHS = 96, 3600, 32
STEP_SECONDS = 0.05


class Structures:
    """Structures of one size, made once in every process."""

    def __init__(self, pause: float = 0.0) -> None:
        random = np.random.default_rng(0)
        lengths = {"edges": NUM_EDGES, "edge_shifts": NUM_EDGES, "group": 0}
        self.sample = {}
        for field in STRUCTURE_FIELDS:
            rows = lengths.get(field.name, NUM_ATOMS)
            shape = (rows, *field.shape) if field.ragged else field.shape
            self.sample[field.name] = random.integers(0, 9, shape).astype(field.dtype)
        self.pause = pause

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.pause:
            time.sleep(self.pause)
        return self.sample

    def describe(self, index: int) -> str:
        """Name a sample."""
        return f"structure {index}"


class Collate:
    """For torch's DataLoader: samples alone."""

    def __call__(self, samples: list[dict[str, Any]]) -> StructureBatch:
        """Put structures together."""
        return collate_structures(samples, np.arange(len(samples)), [1.0] * len(samples))


def make_plan(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    indices = np.arange(count * GRAPHS).reshape(count, GRAPHS)
    return [(row, np.ones(GRAPHS)) for row in indices]


def consume(batches: Iterable[Any], step: float) -> tuple[float, float, float]:
    """Return seconds for each batch after the first: in all, waited, and of this process's core."""
    iterator = iter(batches)
    next(iterator)
    begin, core = time.perf_counter(), time.process_time()
    waited, count = 0.0, 0
    while True:
        asked = time.perf_counter()
        if next(iterator, None) is None:
            break
        waited += time.perf_counter() - asked
        count += 1
        time.sleep(step)
    core = time.process_time() - core
    return (time.perf_counter() - begin) / count, waited / count, core / count


def compare(count: int) -> list[dict[str, Any]]:
    """Run ours and torch's loader over the same batches."""
    plan = make_plan(count)
    torch_batches = [row.tolist() for row, _ in plan]
    rows = []
    for workers in (0, 1, 2):
        for step in (0.0, STEP_SECONDS):
            with Loader(Structures(), plan, collate_structures, workers=workers) as loader:
                rows.append(row("bevatron", workers, step, *consume(loader, step)))
            theirs = DataLoader(
                Structures(),  # type: ignore[arg-type]
                batch_sampler=torch_batches,
                num_workers=workers,
                collate_fn=Collate(),
                multiprocessing_context="forkserver" if workers else None,
            )
            rows.append(row("torch DataLoader", workers, step, *consume(theirs, step)))
    return rows


def row(
    who: str, workers: int, step: float, seconds: float, waited: float, core: float
) -> dict[str, Any]:
    return {
        "what": f"{who}, {workers} workers, step of {step * 1e3:.0f} ms",
        "ms per batch": round(seconds * 1e3, 2),
        "ms waited": round(waited * 1e3, 2),
        "core ms, main process": round(core * 1e3, 2),
    }


def _echo(connection: Connection, kind: str, count: int) -> None:
    batch = Collate()([Structures().sample] * GRAPHS)
    connection.recv()
    for _ in range(count):
        if kind == "memory":
            transfer.send(connection, 0, batch)
        else:
            file = io.BytesIO()
            pickle.dump({k: getattr(v, "numpy", lambda v=v: v)() for k, v in vars(batch).items()},
                        file, protocol=5)  # fmt: skip
            connection.send_bytes(file.getbuffer())
    connection.recv()


def transport(kind: str, count: int = 60) -> dict[str, Any]:
    """Time handing over a batch that is already made, from process to process."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_echo, args=(theirs, kind, count), daemon=True)
    process.start()
    ours.send("begin")
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        if kind == "memory":
            _, extents = ours.recv()
            transfer.receive(ours, extents)
        else:
            pickle.loads(ours.recv_bytes())
        times.append(time.perf_counter() - begin)
    ours.send("end")
    process.join()
    name = "anonymous shared memory (ours)" if kind == "memory" else "pickled through the pipe"
    return {"what": f"hand over a batch: {name}", "ms per batch": round(np.median(times) * 1e3, 2)}


def seconds_to_replace() -> float:
    """Kill a worker that waits in a sample; return when its successor runs."""
    plan = make_plan(4)
    with Loader(Structures(pause=0.02), plan, collate_structures, workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        victim = loader.worker_pids
        replaced = wait_until(lambda: loader.worker_pids not in (victim, []))
        begin = time.perf_counter()
        os.kill(victim[0], signal.SIGKILL)
        seconds = replaced() - begin
        for _ in iterator:
            pass
    return seconds


def wait_until(condition: Callable[[], bool]) -> Callable[[], float]:
    """Watch a condition in a thread; calling the result gives the time when it became true."""
    times: list[float] = []

    def watch() -> None:
        while not condition():
            time.sleep(0.001)
        times.append(time.perf_counter())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def result() -> float:
        thread.join(timeout=10)
        return times[0]

    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="The loader compared with torch's DataLoader")
    parser.add_argument("--batches", type=int, default=60)
    arguments = parser.parse_args()
    rows = compare(arguments.batches)
    rows += [transport("memory"), transport("pipe")]
    deaths = [seconds_to_replace() for _ in range(5)]
    milliseconds = round(float(np.median(deaths)) * 1e3, 1)
    rows.append(
        {"what": "worker killed until its successor is started", "ms per batch": milliseconds}
    )
    write_result(
        "data/loader",
        rows,
        notes=(
            f"Batches of {GRAPHS} structures, {NUM_ATOMS} atoms and {NUM_EDGES} edges each. 'ms "
            "waited' is what a training step waits for its batch; core ms is CPU time. The "
            f"load average when the run ended was {os.getloadavg()[0]:.1f}: on a busy machine all "
            "times are longer, those of torch as well."
        ),
    )


if __name__ == "__main__":
    main()
