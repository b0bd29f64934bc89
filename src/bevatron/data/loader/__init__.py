"""Batches of a plan, prefetched by worker processes."""

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

from bevatron.data.dataset import SampleSource
from bevatron.data.loader.ahead import Ahead
from bevatron.data.loader.failures import LeftOut, loader_error, name_of, named
from bevatron.data.loader.pool import Pool
from bevatron.data.loader.turns import Peers, Turns
from bevatron.data.loader.worker import SampleError, Unreadable, failure_of, make_batch
from bevatron.data.processes import own_cpus
from bevatron.errors import LoaderError
from bevatron.task import Collate
from bevatron.typing import FloatArray, IntArray

__all__ = ["LeftOut", "LoadedBatch", "Loader", "default_workers"]

B = TypeVar("B")


@dataclass(frozen=True)
class LoadedBatch(Generic[B]):
    """A collated batch.

    Attributes
    ----------
    batch : return value of ``collate``
    position : place among the loader's batches, from 0 also where ``plan.flat(rank, start)`` begins
    waited_seconds : time the consumer waited for it
    left_out : samples that it lacks because they could not be read
    """

    batch: B
    position: int
    waited_seconds: float
    left_out: Sequence[LeftOut] = ()


class Loader:
    """Prefetch the batches of a plan, in a thread or in worker processes.

    Unlike torch's DataLoader it knows which batch every worker holds. A dead worker is detected at
    once and restarted for the same batch; if that batch kills a second worker, or a sample raises
    an exception or times out twice, a `LoaderError` names the samples; with ``leave_out`` such a
    sample is left out and the batch says so. All others of the plan arrive once. Batches arrive
    through anonymous shared memory without a copy.

    Workers start with the first batch, or when `set_batches` is called, and live until `close`,
    across the epochs set by `set_batches`. They are fresh processes (not forks of this one). If the
    main script defines the data set or ``collate``, workers import it and it needs ``if __name__ ==
    "__main__":``. Raises LoaderError while iterating, for a batch that cannot be loaded, after all
    batches before it.

    Parameters
    ----------
    dataset
        Picklable; every worker opens it again. ``dataset[i]`` is a sample and ``describe(i)`` its
        name.
    batches : (indices, weights) of each batch in order, such as ``plan.flat(rank, start)``
    collate : (samples, indices, weights) -> batch; picklable
    workers
        Number of worker processes; 0 collates in this process on demand. None makes batches in a
        thread of this process while each takes under a millisecond, then in as many processes as
        `default_workers` says; in processes at once with a window, ``leave_out`` or ``turns``.
    window
        1 keeps the order of the plan. With w > 1 a finished batch may overtake unfinished ones, if
        it is less than w positions ahead of the first of them.
    prefetch
        Maximum number of batches in progress or ready; None is two per worker, or one for each
        worker of all processes with the same plan, if they are more.
    sample_timeout
        Time limit in seconds for reading one sample, after which the worker is killed. Without
        workers it is checked only after the sample was read. None is no limit.
    leave_out
        Make batches without samples that fail twice; in a `bevatron.data.dataset.Replaceable` data
        set others replace them. Without workers there is then no time limit.
    pin_memory : copy batches to pinned memory in the background; ignored without CUDA
    turns
        For processes that follow the same plan at the same pace: their workers take turns, each
        batch being made once for all of them. Not with a window.

    Examples
    --------
    >>> from bevatron.data.packing import pack
    >>> plan = pack([3, 1, 2, 2], capacity=4, num_ranks=1)
    >>> class Squares:
    ...     def __len__(self): return 4
    ...     def __getitem__(self, i): return {"x": i * i}
    ...     def describe(self, i): return f"number {i}"
    >>> def add(samples, indices, weights): return sum(s["x"] for s in samples)
    >>> with Loader(Squares(), plan.flat(0), add, workers=0) as loader:
    ...     sum(loaded.batch for loaded in loader)
    14
    """

    def __init__(
        self,
        dataset: SampleSource,
        batches: Sequence[tuple[IntArray, FloatArray]],
        collate: Collate,
        *,
        workers: int | None = None,
        window: int = 1,
        prefetch: int | None = None,
        sample_timeout: float | None = None,
        leave_out: bool = False,
        pin_memory: bool = False,
        turns: Turns | None = None,
    ) -> None:
        self.workers = default_workers() if workers is None else workers
        self._in_thread = workers is None and window == 1 and not leave_out and turns is None
        if self.workers < 0 or window < 1 or (prefetch is not None and prefetch < 1):
            raise LoaderError(
                f"the loader needs workers >= 0, window >= 1 and prefetch >= 1, "
                f"got {self.workers}, {window} and {prefetch}"
            )
        if sample_timeout is not None and sample_timeout <= 0:
            raise LoaderError(f"the time limit of a sample must be above 0, got {sample_timeout}")
        if turns is not None and window > 1:
            raise LoaderError(
                f"processes that take turns need the plan's order, but the window is {window}"
            )
        per_worker = 2 if turns is None else max(2, turns.size)
        _check_batches(batches)
        self._dataset, self._collate, self._batches = dataset, collate, batches
        self._sample_timeout, self._leave_out = sample_timeout, leave_out
        self._pin = pin_memory and torch.cuda.is_available()
        self._settings: dict[str, Any] = {
            "window": window,
            # A window wider than the prefetch would have no effect.
            "prefetch": max(
                prefetch or per_worker * self.workers, window if prefetch is None else 1
            ),
            "sample_timeout": sample_timeout,
            "leave_out": leave_out,
            "pin_memory": self._pin,
        }
        self._turns = turns
        self._peers: Peers | None = None
        self._loops = 0
        self._pool: Pool | None = None
        self._ahead: Ahead | None = None
        self._lock = threading.Lock()
        self._generation: int | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def set_batches(self, batches: Sequence[tuple[IntArray, FloatArray]]) -> None:
        """Set the batches of the next epoch; they begin to be loaded at once."""
        _check_batches(batches)
        self._stop_ahead()
        self._batches = batches
        if self._in_thread:
            self._begin_ahead()
        elif self.workers:
            self._begin_workers()

    def __iter__(self) -> Iterator[LoadedBatch[Any]]:
        return self._in_process() if self.workers == 0 else self._prefetched()

    def close(self) -> None:
        """Stop the workers; iterating again starts new ones."""
        self._stop_ahead()
        if self._end is not None:
            self._end()
        if self._peers is not None:
            self._peers.close()
        self._pool = self._end = self._generation = self._peers = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the running workers."""
        processes = self._pool.processes if self._pool is not None else []
        return [process.pid for process in processes if process.pid is not None]

    def _running(self) -> Pool:
        if self._pool is None:
            peers = self._connected()
            self._pool = Pool(
                self._dataset, self._collate, self.workers, peers=peers, **self._settings
            )
            self._end = weakref.finalize(self, self._pool.close)
        return self._pool

    def _connected(self) -> Peers:
        if self._peers is None:
            self._peers = Peers(self._turns)
        return self._peers

    def _begin_workers(self, first: int = 0) -> None:
        self._generation = self._running().begin(self._batches, first)

    def _begin_ahead(self) -> None:
        loader = weakref.ref(self)  # a thread that waits for room must not keep it
        first = len(self._batches)  # that workers load

        def hand_over(position: int) -> None:
            nonlocal first
            one = loader()
            if one is None:
                return
            with one._lock:  # noqa: SLF001
                # Other batches may have been set meanwhile. The consumer may lose patience just as
                # the thread hands over: whoever is further behind counts.
                if one._ahead is made and position < first:  # noqa: SLF001
                    first, one._in_thread = position, False  # noqa: SLF001
                    one._begin_workers(position)  # noqa: SLF001

        with self._lock:
            made = self._ahead = Ahead(
                self._dataset,
                self._collate,
                self._batches,
                hand_over,
                patience=self._sample_timeout,
                pin_memory=self._pin,
            )
            self._ahead_ends = weakref.finalize(self, made.stop)

    def _stop_ahead(self) -> None:
        with self._lock:  # not while the thread is waited for, which may need it
            ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._ahead_ends()

    def _prefetched(self) -> Iterator[LoadedBatch[Any]]:
        anew = self._in_thread if self._ahead is None else self._ahead.begun
        if anew:
            self.set_batches(self._batches)
        if self._ahead is not None and not self._ahead.begun:
            for position, batch, waited in self._ahead:
                yield LoadedBatch(batch, position, waited)
            if self._in_thread:
                return
        pool = self._running()
        generation, self._generation = self._generation, None
        if generation is None:
            generation = pool.begin(self._batches)
        while True:
            begin = time.perf_counter()
            try:
                taken = pool.take(generation)
            except BaseException:
                self.close()
                raise
            if taken is None:
                return
            position, batch, left_out = taken
            yield LoadedBatch(batch, position, time.perf_counter() - begin, left_out)

    def _in_process(self) -> Iterator[LoadedBatch[Any]]:
        peers = self._connected()
        self._loops += 1
        for position in range(len(self._batches)):
            begin, key = time.perf_counter(), (self._loops, position)
            if peers.own(position) == position:
                try:
                    made = self._make(position)
                except LoaderError as error:
                    peers.tell(key, error)
                    raise
                peers.hand_over(key, made)
            else:
                made = peers.wait(key)
                if isinstance(made, LoaderError):
                    raise made
            batch, left_out = made
            if self._pin and hasattr(batch, "pin_memory"):
                batch = batch.pin_memory()
            waited = time.perf_counter() - begin
            yield LoadedBatch(batch, position, waited, named(self._dataset, left_out))

    def _make(self, position: int) -> tuple[Any, list[Unreadable]]:
        indices, weights = self._batches[position]
        data, leave_out = self._dataset, self._leave_out
        progress = _Stopwatch(data, None if leave_out else self._sample_timeout)
        unreadable: dict[int, str] | None = {} if leave_out else None
        try:
            return make_batch(data, self._collate, indices, weights, progress, unreadable)
        except SampleError as error:
            failure = failure_of(error)
            raise loader_error(self._dataset, position, indices, failure) from error.__cause__


class _Stopwatch(list[float]):
    """Progress cells that raise when the next sample starts and the last one took too long."""

    def __init__(self, dataset: SampleSource, limit: float | None) -> None:
        super().__init__([-1.0, 0.0])
        self._dataset, self._limit = dataset, limit

    def __setitem__(self, cell: Any, value: Any) -> None:
        if self._limit is not None and self[0] >= 0:
            seconds = time.monotonic() - self[1]
            if seconds > self._limit:
                name = name_of(self._dataset, int(self[0]))
                super().__setitem__(0, -1.0)
                raise LoaderError(
                    f"{name}: reading it took {seconds:.3g} s, longer than {self._limit:g} s; mend "
                    f"or leave out the sample or raise the time limit of a sample"
                )
        super().__setitem__(cell, value)


def _check_batches(batches: Any) -> None:
    """Refuse what holds no pairs of arrays, such as ``plan[rank]``; LoaderError."""
    try:
        indices, weights = batches[0] if len(batches) else (np.zeros(1), np.zeros(1))
        fits = indices.shape == weights.shape != ()
    except (AttributeError, TypeError, ValueError):
        fits = False
    if not fits:
        raise LoaderError(
            "batches: expected a sequence of pairs of arrays (indices, weights), such as "
            f"plan.flat(rank), got {type(batches).__name__} of something else"
        )


def default_workers() -> int:
    """Return the default number of workers: the CPUs of this process, shared by local ranks.

    One CPU is left for the training process; at most 16.
    """
    return max(min(own_cpus() - 1, 16), 1)
