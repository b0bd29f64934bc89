"""Worker processes and the thread that supervises them.

Each worker has its own socket, so the pool always knows which batches it holds. One thread of the
main process waits for results, dead workers and timed-out samples; it assigns batches to workers,
maps results into memory and pins them. The consumer only waits for the batch it needs.
"""

import contextlib
import logging
import multiprocessing
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection as connections
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from bevatron.data.dataset import SampleSource
from bevatron.data.loader import transfer
from bevatron.data.loader.failures import LeftOut, exit_text, loader_error, name_of, named, names_of
from bevatron.data.loader.turns import Key, Peers
from bevatron.data.loader.worker import IDLE, Failure, serve
from bevatron.data.processes import PRELOADED, start_without_main, usable_cpu_set
from bevatron.errors import LoaderError
from bevatron.task import Collate
from bevatron.typing import FloatArray, IntArray

logger = logging.getLogger(__name__)

TASKS_PER_WORKER = 2
"""Batches assigned to a worker: one in progress, and one ready to start."""

MOST_DEATHS = 4
"""Maximum number of workers that may die over a batch, each at another sample or before any."""


@dataclass
class Task:
    """A batch to load.

    ``deaths`` counts workers that died with it, ``blamed`` by the sample being read, or `IDLE` and
    `COLLATING`; ``unreadable`` are samples that killed two, with the reason, None where such a
    sample is an error. ``twice``: two workers have it; the first result counts.
    """

    key: Key
    indices: IntArray
    weights: FloatArray
    unreadable: dict[int, str] | None
    deaths: int = 0
    blamed: Counter[int] = field(default_factory=Counter)
    twice: bool = False


@dataclass
class Worker:
    """A process and its batches, the current one first.

    ``overdue`` is the sample whose timeout killed it, if any.
    """

    process: BaseProcess
    connection: Connection
    progress: Any
    tasks: deque[Task] = field(default_factory=deque)
    overdue: int | None = None


class Pool:
    """Workers that load the batches of successive plans.

    Parameters
    ----------
    dataset, collate : pickled once for all workers
    window, prefetch, sample_timeout, leave_out, pin_memory
        As for `bevatron.data.loader.Loader`.
    peers : processes that make batches of the same plans in turns with this one
    """

    def __init__(
        self,
        dataset: SampleSource,
        collate: Collate,
        num_workers: int,
        *,
        window: int,
        prefetch: int,
        sample_timeout: float | None,
        leave_out: bool,
        pin_memory: bool,
        peers: Peers,
    ) -> None:
        self._dataset = dataset
        self._payload = _pickled(dataset, collate)
        self._peers = peers
        self._window, self._prefetch = window, prefetch
        self._sample_timeout, self._leave_out = sample_timeout, leave_out
        self._device = torch.cuda.current_device() if pin_memory else None
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._changed = threading.Condition()
        self._closed = False
        self._failure: LoaderError | None = None  # of the thread
        self._generation = 0
        self._batches: Sequence[tuple[IntArray, FloatArray]] = ()
        self._next = self._oldest = 0
        self._delivered: set[int] = set()
        self._ready: dict[int, Any] = {}
        self._early: dict[Key, Any] = {}  # from processes that have begun a later plan
        self._workers: list[Worker | None] = [None] * num_workers
        self._bell, self._ring = self._context.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._watch, name="bevatron-loader", daemon=True)
        self._thread.start()

    def begin(self, batches: Sequence[tuple[IntArray, FloatArray]], first: int = 0) -> int:
        """Start from a batch, by default the first; earlier work in progress is dropped.

        Returns
        -------
        int
            Generation to pass to `take`.
        """
        with self._changed:
            self._generation += 1
            self._batches = batches
            self._oldest, self._next = first, self._peers.own(first)
            self._delivered.clear()
            begun = [key for key in self._early if key[0] == self._generation]
            self._ready = {key[1]: self._early.pop(key) for key in begun}
        self._wake()
        return self._generation

    def take(self, generation: int) -> tuple[int, Any, list[LeftOut]] | None:
        """Wait for the next batch; return position, batch and missing samples; None at the end.

        Raises LoaderError if the batch could not be loaded, or `begin` was called again;
        ConnectionError if the process whose turn it is has ended.
        """
        with self._changed:
            if generation != self._generation:
                raise LoaderError("another loop restarted this loader; use one loader per loop")
            if self._oldest >= len(self._batches):
                return None
            while (position := self._due()) is None:
                if self._closed:
                    raise self._failure or LoaderError(
                        "the loader was closed while a batch was waited for"
                    )
                self._peers.check(self._oldest)
                self._changed.wait()
            batch = self._ready.pop(position)
            self._delivered.add(position)
            while self._oldest in self._delivered:
                self._delivered.remove(self._oldest)
                self._oldest += 1
        if isinstance(batch, LoaderError):
            raise batch
        self._wake()
        return position, *batch

    def close(self) -> None:
        """Stop all workers; safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)

    @property
    def processes(self) -> list[BaseProcess]:
        """The running processes."""
        return [worker.process for worker in self._workers if worker is not None]

    def _due(self) -> int | None:
        """Return the first finished batch that is at most window - 1 ahead of the oldest."""
        for position in range(self._oldest, self._oldest + self._window):
            if position in self._ready:
                return position
        return None

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._ring.send_bytes(b"!")

    # The methods below run in the supervising thread.

    def _watch(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            while not self._closed:
                self._assign()
                self._wait_for_events()
                self._stop_slow_samples()
        except BaseException as error:  # the consumer must not wait forever
            logger.exception("the loader's thread failed")
            problem = LoaderError(f"the loader failed: {type(error).__name__}: {error}")
            with self._changed:
                self._failure, self._closed = problem, True
                self._changed.notify_all()
        finally:
            self._stop_workers()

    def _assign(self) -> None:
        """Assign batches to the workers with the fewest: those that are stuck, then the next."""
        while True:
            with self._changed:
                loads = [len(w.tasks) if w is not None else 0 for w in self._workers]
                slot = loads.index(min(loads))
                if loads[slot] >= TASKS_PER_WORKER:
                    return
                task = self._stuck(slot)
                if task is None:
                    waiting = self._next - self._oldest - len(self._delivered)
                    full = waiting >= self._prefetch
                    if full or self._next >= len(self._batches):
                        return
                    indices, weights = self._batches[self._next]
                    unreadable: dict[int, str] | None = {} if self._leave_out else None
                    task = Task((self._generation, self._next), indices, weights, unreadable)
                    self._next += self._peers.size
            worker = self._workers[slot]
            if worker is None:
                worker = self._workers[slot] = self._start()
            worker.tasks.append(task)
            _send(worker, task)

    def _stuck(self, slot: int) -> Task | None:
        """Find a batch that waits behind a slow one while all others are a round ahead of it."""
        busy = [worker for worker in self._workers if worker is not None and worker.tasks]
        for worker in busy:
            if worker is self._workers[slot] or len(worker.tasks) < TASKS_PER_WORKER:
                continue
            task = worker.tasks[1]
            generation, position = task.key
            round_later = generation, position + len(self._workers) * self._peers.size
            ahead = all(w.tasks[0].key > round_later for w in busy if w is not worker)
            if ahead and not task.twice and generation == self._generation:
                task.twice = True
                return task
        return None

    def _start(self) -> Worker:
        ours, theirs = self._context.Pipe(duplex=True)
        progress = self._context.RawArray("d", [-1.0, 0.0])
        process = self._context.Process(
            target=serve,
            args=(theirs, self._payload, progress, usable_cpu_set()),
            name="bevatron-loader-worker",
            daemon=True,
        )
        start_without_main(process, needs_main=b"__main__" in self._payload)
        theirs.close()
        return Worker(process, ours, progress)

    def _wait_for_events(self) -> None:
        workers = [worker for worker in self._workers if worker is not None]
        by_event: dict[Any, Worker] = {}
        for worker in workers:
            by_event[worker.connection] = worker
            by_event[worker.process.sentinel] = worker
        lines = set(self._peers.lines.values())
        timeout = None
        if self._sample_timeout is not None and any(worker.tasks for worker in workers):
            timeout = min(self._sample_timeout / 4, 0.25)
        seen = set()
        for event in connections.wait([self._bell, *lines, *by_event], timeout):
            if event is self._bell:
                while self._bell.poll():
                    self._bell.recv_bytes()
            elif event in lines:
                self._hear(event)
            elif id(by_event[event]) not in seen:
                seen.add(id(by_event[event]))
                self._attend(by_event[event])

    def _attend(self, worker: Worker) -> None:
        """Receive the results of a worker, and replace it if it died."""
        try:
            while worker.connection.poll():
                self._accept(worker)
        except (EOFError, OSError, RuntimeError, pickle.UnpicklingError):
            worker.process.kill()
            worker.process.join(timeout=5)
        if worker.process.exitcode is not None:
            self._replace(worker)

    def _accept(self, worker: Worker) -> None:
        key, answer = worker.connection.recv()
        if isinstance(answer, Failure):
            self._give_up(key, self._failed(worker.tasks[0], answer))
        else:
            with transfer.received_file(worker.connection) as file:
                self._peers.hand_on(key, answer, file)
                made = transfer.load(file, answer)
            self._put(key, made)
        worker.tasks.popleft()

    def _hear(self, line: Connection) -> None:
        """Take what another process has made."""
        found = self._peers.read(line)
        if found is not None:
            self._put(*found)
            return
        with self._changed:
            self._changed.notify_all()  # it has ended

    def _give_up(self, key: Key, error: LoaderError) -> None:
        self._peers.tell(key, error)
        self._put(key, error)

    def _put(self, key: Key, made: Any) -> None:
        """Keep a batch, with what was left out of it, or an error in its place."""
        if not isinstance(made, LoaderError):
            batch, unreadable = made
            if self._device is not None and hasattr(batch, "pin_memory"):
                batch = batch.pin_memory()
            made = batch, named(self._dataset, unreadable)
        with self._changed:
            if key[0] > self._generation:
                self._early[key] = made
            elif key[0] == self._generation and not self._is_done(key[1]):
                self._ready[key[1]] = made
                self._changed.notify_all()

    def _is_done(self, position: int) -> bool:
        """Whether a batch of the current plan has arrived, taken or not."""
        return position < self._oldest or position in self._delivered or position in self._ready

    def _replace(self, worker: Worker) -> None:
        """Replace a dead process: once per batch, or once per sample that may be left out."""
        slot = self._workers.index(worker)
        self._workers[slot] = None
        worker.connection.close()
        tasks = worker.tasks
        if tasks:
            sample = int(worker.progress[0]) if worker.overdue is None else worker.overdue
            tasks[0].deaths += 1
            tasks[0].blamed[sample] += 1
            cause = self._cause_of_death(worker)
            if self._leaves_out(tasks[0], worker, sample):
                logger.warning("a loader worker died: %s", cause)
            elif _is_deadly(tasks[0], sample):
                self._give_up(tasks[0].key, self._deadly(tasks.popleft(), worker, cause))
            else:
                logger.warning("a loader worker died: %s; it is started again", cause)
        with self._changed:
            current = deque(
                task
                for task in tasks
                if task.key[0] == self._generation and not self._is_done(task.key[1])
            )
        if current:
            fresh = self._workers[slot] = self._start()
            fresh.tasks = current
            for task in current:
                _send(fresh, task)

    def _leaves_out(self, task: Task, worker: Worker, sample: int) -> bool:
        """Leave out a sample that killed two workers; return whether to try the batch again."""
        if task.unreadable is None or sample < 0:
            return False
        if task.blamed[sample] > 1:
            exit_of = exit_text(worker.process.exitcode)
            slow = f"reading it took over {self._sample_timeout:g} s"
            task.unreadable[sample] = exit_of if worker.overdue is None else slow
        return True

    def _stop_slow_samples(self) -> None:
        """Kill workers that exceed the time limit of a sample."""
        if self._sample_timeout is None:
            return
        for worker in self._workers:
            if worker is None or not worker.tasks or worker.progress[0] < 0:
                continue
            sample, begin = int(worker.progress[0]), worker.progress[1]
            if worker.overdue is None and time.monotonic() - begin > self._sample_timeout:
                worker.overdue = sample
                worker.process.kill()

    def _cause_of_death(self, worker: Worker) -> str:
        if worker.overdue is not None:
            return f"reading {self._name(worker.overdue)} took over {self._sample_timeout:g} s"
        sample = int(worker.progress[0])
        reading = f" while reading {self._name(sample)}" if sample >= 0 else ""
        return f"{exit_text(worker.process.exitcode)}{reading}"

    def _deadly(self, task: Task, worker: Worker, cause: str) -> LoaderError:
        if worker.overdue is not None:
            return LoaderError(
                f"{self._name(worker.overdue)}: reading it took longer than "
                f"{self._sample_timeout:g} s, also at the second attempt; fix or leave out the "
                f"sample or raise the time limit of a sample"
            )
        return LoaderError(
            f"batch {task.key[1]} ended {'two' if task.deaths == 2 else task.deaths} worker "
            f"processes ({cause}); "
            f"its samples: {names_of(self._dataset, task.indices)}"
        )

    def _failed(self, task: Task, failure: Failure) -> LoaderError:
        return loader_error(self._dataset, task.key[1], task.indices, failure)

    def _name(self, sample: int) -> str:
        return name_of(self._dataset, sample)

    def _stop_workers(self) -> None:
        workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            worker.connection.close()
            worker.process.kill()
        for worker in workers:
            worker.process.join(timeout=5)
            if worker.process.exitcode is not None:
                worker.process.close()
        self._workers = []
        self._ring.close()
        self._bell.close()
        with self._changed:
            self._ready.clear()
            self._closed = True
            self._changed.notify_all()


def _is_deadly(task: Task, sample: int) -> bool:
    """Whether a batch, not a kill from outside, is the likely cause of its workers' deaths."""
    at_work = sample != IDLE
    return (at_work and task.blamed[sample] > 1) or task.deaths > MOST_DEATHS


def _pickled(dataset: SampleSource, collate: Collate) -> bytes:
    try:
        return pickle.dumps((dataset, collate))
    except Exception as error:
        raise LoaderError(
            f"the data set or the collate function cannot be sent to worker processes "
            f"({type(error).__name__}: {error}); define them at the top level of a module or use "
            f"workers=0"
        ) from error


def _send(worker: Worker, task: Task) -> None:
    # The sentinel reports a dead worker, and its tasks are assigned again.
    with contextlib.suppress(OSError):
        worker.connection.send((task.key, task.indices, task.weights, task.unreadable))
