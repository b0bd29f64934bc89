"""Requests to stop: SIGTERM, SIGUSR1 (Slurm, torchrun), SIGHUP and Ctrl-C save and leave cleanly.

A handler only sets a flag. The loop checks it once per step, all ranks agree in the reduction that
they make anyway, and then all save together. A second Ctrl-C exits at once.
"""

import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
_PREFIX = "stop/"


class StopRequests:
    """Catches the signals that ask the run to stop, for the length of a ``with`` block.

    Outside the main thread, where Python allows no handlers, nothing is caught; nor is SIGHUP where
    it is ignored (nohup).
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for name in STOP_SIGNALS:
                number = getattr(signal, name)
                if name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == "SIGINT":
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def notes(self) -> dict[str, float]:
        """Return one number per signal, to be added up over ranks."""
        return {_PREFIX + name: float(self.received == name) for name in STOP_SIGNALS}

    @staticmethod
    def agreed(totals: Mapping[str, float]) -> str | None:
        """Return the signal that any rank has received, from the sums of `notes`."""
        for name in STOP_SIGNALS:
            if totals[_PREFIX + name]:
                return name
        return None
