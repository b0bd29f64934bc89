"""Number of worker processes, and starting them without importing the user's script."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, spawn
from multiprocessing.process import BaseProcess
from typing import Any


def usable_cpus() -> int:
    """Count the CPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def own_cpus() -> int:
    """Count the CPUs of this process, shared equally by the local ranks of torchrun."""
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return max(usable_cpus() // ranks, 1)


PRELOADED = (
    "torch",
    "bevatron.data.loader.worker",
    "bevatron.data.samples",
    "bevatron.data.store.prepare",
)
"""Modules that the fork server imports, once for all processes it starts."""


def start_fork_server() -> None:
    """Start the server that worker processes are forked from; it imports while this one goes on."""
    if not sys.platform.startswith("linux"):
        return
    forkserver.set_forkserver_preload(list(PRELOADED))
    with _without_stop_signals():
        forkserver.ensure_running()


@contextmanager
def _without_stop_signals() -> Iterator[None]:
    """Block the signals by which schedulers announce the end of a job, for processes started."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_without_main(process: BaseProcess, *, needs_main: bool = False) -> None:
    """Start a process that does not import the user's script, unless it needs it.

    multiprocessing imports the main script in every new process, in case it defines functions or
    classes sent there. That costs a second or more, and a script without a main guard would run
    again.

    Schedulers announce the end of a job by SIGUSR1 or SIGUSR2 to all its processes, and the main
    process decides what to do. The new process, and the fork server if this starts it, inherit a
    mask that blocks both signals.

    Parameters
    ----------
    process
        Not started yet; start method spawn or forkserver.
    needs_main
        Whether the script defines an object sent to it (its pickle names ``__main__``).
    """
    original = spawn.get_preparation_data

    def reduced(name: str) -> dict[str, Any]:
        data = original(name)
        if not needs_main and name == process.name:
            data.pop("init_main_from_name", None)
            data.pop("init_main_from_path", None)
        return data

    spawn.get_preparation_data = reduced
    try:
        with _without_stop_signals():
            process.start()
    finally:
        spawn.get_preparation_data = original
