"""A thread that makes the batches of a plan ahead of the consumer, while each takes little time.

Receiving a batch from a worker process costs the training process half a millisecond, and workers
take a second to start: small batches are made faster than that.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bevatron.data.dataset import SampleSource
from bevatron.data.loader.worker import SampleError, make_batch
from bevatron.errors import LoaderError
from bevatron.task import Collate
from bevatron.typing import FloatArray, IntArray

logger = logging.getLogger(__name__)

QUICK_SECONDS = 1e-3
"""Seconds a batch, of CPU time and of waiting for it, up to which workers gain nothing on average.

Not wall-clock time: while the consumer computes, this thread also waits for the interpreter's lock.
"""

SPARE_SECONDS = 0.02
"""Additional time for the first batches, which open the files of the data set."""

DEPTH = 8
"""Number of batches made ahead."""

STOP_SECONDS = 10.0
"""Timeout for an unfinished batch when the thread ends."""


class Ahead:
    """Makes the batches of one plan in order, until they take long or one cannot be read.

    Parameters
    ----------
    hand_over
        Called once with the position of the first batch that is left to workers, who try again what
        could not be read.
    patience : seconds for a batch; None = no limit

    Attributes
    ----------
    begun : whether somebody iterates over the batches
    """

    def __init__(
        self,
        dataset: SampleSource,
        collate: Collate,
        batches: Sequence[tuple[IntArray, FloatArray]],
        hand_over: Callable[[int], None],
        *,
        patience: float | None,
        pin_memory: bool,
    ) -> None:
        self._dataset, self._collate, self._batches = dataset, collate, batches
        self._hand_over, self._patience = hand_over, patience
        self._device = torch.cuda.current_device() if pin_memory else None
        self._made: queue.Queue[Any] = queue.Queue(DEPTH)
        self._spare, self._stopped = SPARE_SECONDS, False
        self.begun = False
        self._thread = threading.Thread(target=self._run, name="bevatron-batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, Any, float]]:
        """Iterate over position, batch and the seconds that it was waited for."""
        following, self.begun = 0, True
        while not self._stopped:
            began = time.monotonic()
            try:
                made = self._made.get(timeout=self._patience)
            except queue.Empty:
                self._stopped = True
                self._hand_over(following)
                return
            if isinstance(made, LoaderError):
                raise made
            if made is None:
                break
            waited = time.monotonic() - began
            self._spare -= waited
            following = made[0] + 1
            yield *made, waited
        if self._stopped:
            raise LoaderError("another loop restarted this loader; use one loader per loop")

    def stop(self) -> None:
        """End the thread; it delivers no further batches.

        It is waited for: a thread within C++ when the interpreter ends would abort the process.
        """
        hangs, self._stopped = self._stopped, True  # the consumer has lost patience with it before
        with contextlib.suppress(queue.Empty):
            while True:
                self._made.get_nowait()  # the thread may wait for room
        self._made.put(None)
        if not hangs and threading.current_thread() is not self._thread:
            self._thread.join(timeout=STOP_SECONDS)

    def _run(self) -> None:
        try:
            self._make()
        except BaseException as error:  # the consumer must not wait forever
            logger.exception("the loader's thread failed")
            self._made.put(LoaderError(f"the loader failed: {type(error).__name__}: {error}"))

    def _make(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        for position, (indices, weights) in enumerate(self._batches):
            if self._spare < 0:
                self._leave(position)
                return
            began = time.thread_time()
            try:
                batch, _ = make_batch(self._dataset, self._collate, indices, weights, [0.0, 0.0])
            except SampleError:
                self._leave(position)
                return
            if self._device is not None and hasattr(batch, "pin_memory"):
                batch = batch.pin_memory()
            earned = QUICK_SECONDS - (time.thread_time() - began)
            self._spare = min(self._spare + earned, SPARE_SECONDS)
            self._made.put((position, batch))
            if self._stopped:
                return
        self._made.put(None)

    def _leave(self, position: int) -> None:
        """Deliver the remaining batches."""
        problem = None
        if not self._stopped:
            try:
                self._hand_over(position)
            except LoaderError as error:
                problem = error
        self._made.put(problem)
