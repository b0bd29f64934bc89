"""Processes of one machine that follow the same plan take turns making its batches.

Each makes every ``size``-th batch with its own workers. The worker's memory file is passed to the
others, which map it too: a batch is made once and never copied.
"""

import pickle
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bevatron.data.loader import transfer
from bevatron.errors import LoaderError

Key = tuple[int, int]
"""Number of the plan and position in it."""


@dataclass(frozen=True)
class Turns:
    """The place of this process among those that take turns.

    Attributes
    ----------
    index, size : of this process, and of them all
    connect
        Connects them; all call it together. Returns a connection to each other process by its
        index, or none on any of them if that is not possible: each then makes all batches.
    """

    index: int
    size: int
    connect: Callable[[], Mapping[int, Connection]]


class Peers:
    """The other processes, connected; none if ``turns`` is None.

    Attributes
    ----------
    lines : connections to those that have not ended
    index, size : of this process, and of them all
    """

    def __init__(self, turns: Turns | None) -> None:
        self.lines = {} if turns is None else dict(turns.connect())
        self.size = 1 + len(self.lines)
        self.index = 0 if turns is None or not self.lines else turns.index

    def own(self, position: int) -> int:
        """Return the first position from this one on whose batch this process makes."""
        return position + (self.index - position) % self.size

    def check(self, position: int) -> None:
        """Raise ConnectionError if the process that makes this batch has ended.

        It is not a `LoaderError`, and none of the operating system's: how that process ended says
        more (`bevatron.parallel.failures`).
        """
        maker = position % self.size
        if maker != self.index and maker not in self.lines:
            raise ConnectionError("a process that makes batches for this one has ended")

    def hand_on(self, key: Key, extents: Any, file: int) -> None:
        """Give the others a batch that a worker of this process has written."""
        for line in self.lines.values():
            with suppress(OSError):  # one that has ended is noticed when it is read
                transfer.send_file(line, key, extents, file)

    def hand_over(self, key: Key, made: Any) -> None:
        """Give the others a batch that this process has made itself."""
        if self.lines:
            with transfer.written(made) as (file, extents):
                self.hand_on(key, extents, file)

    def wait(self, key: Key) -> Any:
        """Wait for a batch of another process, or an error in its place."""
        while True:
            self.check(key[1])
            found = self.read(self.lines[key[1] % self.size])
            if found is not None and found[0] == key:  # not of a loop that was left
                return found[1]

    def tell(self, key: Key, error: LoaderError) -> None:
        """Tell the others that a batch cannot be made, and why."""
        for line in self.lines.values():
            with suppress(OSError):
                line.send((key, error))

    def read(self, line: Connection) -> tuple[Key, Any] | None:
        """Read what has arrived: a key with a batch or an error; None if the other has ended.

        Raises OSError or RuntimeError if this process lacks memory or descriptors to map a batch.
        """
        with ExitStack() as stack:
            try:
                key, answer = line.recv()
                if isinstance(answer, LoaderError):
                    return key, answer
                file = stack.enter_context(transfer.received_file(line))
            except (EOFError, OSError, pickle.UnpicklingError):
                line.close()
                self.lines = {k: one for k, one in self.lines.items() if one is not line}
                return None
            return key, transfer.load(file, answer)

    def close(self) -> None:
        """Close the connections."""
        for line in self.lines.values():
            line.close()
