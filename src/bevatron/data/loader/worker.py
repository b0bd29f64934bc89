"""The worker process: read the samples of a batch, collate them, send the batch."""

import os
import pickle
import signal
import time
import traceback
from collections.abc import Mapping, MutableSequence, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from bevatron.data.dataset import Replaceable, SampleSource
from bevatron.data.loader import transfer
from bevatron.errors import LoaderError
from bevatron.task import Collate
from bevatron.typing import FloatArray, IntArray

IDLE, COLLATING = -1.0, -2.0
"""Values of a worker's first progress cell while no sample is being read."""

STAND_INS = 3
"""Maximum number of samples tried in place of one that cannot be read."""


@dataclass(frozen=True)
class Failure:
    """An exception while loading a batch.

    Attributes
    ----------
    sample : the sample being read; None if the exception was raised while collating
    message : type and text of the exception
    traceback : as Python prints it
    """

    sample: int | None
    message: str
    traceback: str


Unreadable = tuple[int, str]
"""The index of a sample that could not be read twice, and why."""


class SampleError(Exception):
    """A sample could not be read; ``__cause__`` is the exception."""

    def __init__(self, sample: int | None) -> None:
        super().__init__(sample)
        self.sample = sample


def make_batch(
    dataset: SampleSource,
    collate: Collate,
    indices: IntArray,
    weights: FloatArray,
    progress: MutableSequence[float],
    unreadable: Mapping[int, str] | None = None,
) -> tuple[Any, list[Unreadable]]:
    """Read samples and collate them.

    Raises SampleError for any exception, and if no sample is left.

    Parameters
    ----------
    progress : two cells: the sample being read and its start time
    unreadable
        Samples that are known to be slow or deadly, and why. With it, a sample that
        fails twice is left out, or replaced if the data set is `Replaceable`.

    Returns
    -------
    (batch, what was left out)
    """
    samples: list[Any] = []
    chosen: list[int] = []
    places: list[int] = []
    left_out: list[Unreadable] = []
    for place, index in enumerate(indices.tolist()):
        found = _read_any(dataset, index, progress, unreadable, left_out)
        if found is not None:
            chosen.append(found[0])
            samples.append(found[1])
            places.append(place)
    if left_out and not samples:
        first, reason = left_out[0]
        raise SampleError(first) from LoaderError(f"{reason}; no sample of the batch is left")
    if left_out:
        indices, weights = np.array(chosen, dtype=np.int64), weights[places]
    progress[0] = COLLATING
    try:
        return collate(samples, indices, weights.tolist()), left_out
    except Exception as error:
        raise SampleError(None) from error
    finally:
        progress[0] = IDLE


def _read(dataset: SampleSource, index: int, progress: MutableSequence[float]) -> Any:
    progress[1] = time.monotonic()
    progress[0] = float(index)
    try:
        return dataset[index]
    except Exception as error:
        raise SampleError(index) from error


def _read_any(
    dataset: SampleSource,
    index: int,
    progress: MutableSequence[float],
    unreadable: Mapping[int, str] | None,
    left_out: list[Unreadable],
) -> tuple[int, Any] | None:
    """Read a sample, else a replacement; None if there is none."""
    if unreadable is None:
        return index, _read(dataset, index, progress)
    candidates = [index]
    if isinstance(dataset, Replaceable):
        candidates += [dataset.substitute(index, attempt) for attempt in range(1, 1 + STAND_INS)]
    for candidate in candidates:
        reason = unreadable.get(candidate)
        for last in (False, True):
            if reason is not None:
                break
            try:
                return candidate, _read(dataset, candidate, progress)
            except SampleError as error:
                reason = failure_of(error).message if last else None
        left_out.append((candidate, str(reason)))
    return None


def failure_of(error: SampleError) -> Failure:
    """Describe the cause of a failure in picklable form."""
    cause = error.__cause__
    text = "".join(traceback.format_exception(cause))
    message = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    return Failure(error.sample, message.replace("\n", " "), text)


def serve(
    connection: Connection,
    payload: bytes,
    progress: MutableSequence[float],
    cpus: AbstractSet[int] = frozenset(),
) -> None:
    """Load batches until the connection closes; the main function of a worker process.

    ``cpus`` are those of the main process: the fork server began before it chose them.
    """
    if cpus:
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)
    # Ctrl-C and scheduler signals reach all processes; the main process handles them, and this one
    # exits with it.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    torch.set_num_threads(1)
    dataset, collate, broken = _open(payload)
    while True:
        try:
            task: Sequence[Any] | None = connection.recv()
        except (EOFError, OSError):
            return
        if task is None:
            return
        try:
            _answer(connection, dataset, collate, broken, task, progress)
        except (BrokenPipeError, ConnectionResetError):
            return


def _open(payload: bytes) -> tuple[Any, Any, Failure | None]:
    try:
        dataset, collate = pickle.loads(payload)  # noqa: S301  made by our own main process
    except Exception as error:  # noqa: BLE001  the main process reports any exception
        wrapped = SampleError(None)
        wrapped.__cause__ = error
        return None, None, failure_of(wrapped)
    return dataset, collate, None


def _answer(
    connection: Connection,
    dataset: Any,
    collate: Any,
    broken: Failure | None,
    task: Sequence[Any],
    progress: MutableSequence[float],
) -> None:
    key, indices, weights, unreadable = task
    if broken is not None:
        connection.send((key, broken))
        return
    try:
        made = make_batch(dataset, collate, indices, weights, progress, unreadable)
    except SampleError as error:
        progress[0] = IDLE
        connection.send((key, failure_of(error)))
        return
    try:
        transfer.send(connection, key, made)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        wrapped = SampleError(None)
        wrapped.__cause__ = error
        connection.send((key, failure_of(wrapped)))
