"""Number of worker processes, and starting them without importing the user's script."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


def usable_cpus() -> int:
    """Count the CPUs that this process may use: of its affinity, within the quota of its cgroup."""
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = cpu_quota()
    return cpus if quota >= cpus else max(math.ceil(quota), 1)


def usable_cpu_set() -> set[int]:
    """Return the CPUs of this process's affinity; none where the system has no such masks."""
    affinity = getattr(os, "sched_getaffinity", None)
    return set(affinity(0)) if affinity else set()


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many CPUs' time the cgroups of this process allow; infinity without a limit.

    Parameters
    ----------
    root : root of the file system, for tests
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    quotas = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the path may be that of the host while its own group is mounted on top.
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = base / path.lstrip("/")
        folders = {base, group, *(p for p in group.parents if p.is_relative_to(base))}
        quotas += [_quota_of(folder) for folder in folders]
    return min(quotas)


def _quota_of(folder: Path) -> float:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()[:2]
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


_taken: set[int] = set()
"""CPUs that no other rank on this machine uses; none = they share all of them."""


def take_cpus(cpus: Iterable[int], *, shared: bool) -> None:
    """Restrict this process to some CPUs, ``shared`` with other local ranks or its own."""
    os.sched_setaffinity(0, cpus)
    _taken.clear()
    _taken.update(() if shared else cpus)


def own_cpus() -> int:
    """Count the CPUs of this process, shared equally by the local ranks of torchrun."""
    if _taken:
        return min(len(_taken), usable_cpus())
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return max(usable_cpus() // ranks, 1)


SAFE_PATH = "PYTHONSAFEPATH"
"""Variable that keeps the current folder out of a new interpreter's path."""

PRELOADED = (
    "torch",
    "bevatron.data.loader.worker",
    "bevatron.data.samples",
    "bevatron.data.store.prepare",
)
"""Modules that the fork server imports, once for all processes it starts."""


def start_fork_server() -> None:
    """Start the server that worker processes are forked from; it imports in the background."""
    if not sys.platform.startswith("linux"):
        return
    forkserver.set_forkserver_preload(list(PRELOADED))
    with _sheltered():
        forkserver.ensure_running()


@contextmanager
def _sheltered() -> Iterator[None]:
    """Block what a terminal and the end of a job send to all processes, for processes started.

    They begin as ``python -c``, which would import a torch.py of the current folder.
    """
    safe = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    resource_tracker.ensure_running()  # its start lets Ctrl-C through again
    left = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, left)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.environ.pop(SAFE_PATH)
        if safe is not None:
            os.environ[SAFE_PATH] = safe


_one_thread = threading.Lock()


def start_without_main(process: BaseProcess, *, needs_main: bool = False) -> None:
    """Start a process that does not import the user's script, unless it needs it.

    multiprocessing imports the main script in every new process, in case it defines functions or
    classes sent there. That costs a second or more, and a script without a main guard would run
    again.

    A terminal sends Ctrl-C, and SIGHUP when it closes, to all processes of a job, and schedulers
    announce its end to them by SIGUSR1 or SIGUSR2; the main process decides what to do. The new
    process, and the fork server if this starts it, inherit a mask that blocks these signals: to
    ignore them is not enough, as RDKit installs a handler of its own while it makes poses.

    Parameters
    ----------
    process : not started yet; start method spawn or forkserver
    needs_main : whether the script defines an object sent to it (its pickle names ``__main__``)
    """
    with _one_thread:  # the loaders of training and of validation start workers in threads
        original = spawn.get_preparation_data

        def reduced(name: str) -> dict[str, Any]:
            data = original(name)
            if not needs_main and name == process.name:
                data.pop("init_main_from_name", None)
                data.pop("init_main_from_path", None)
            return data

        spawn.get_preparation_data = reduced
        try:
            with _sheltered():
                _start(process)
        finally:
            spawn.get_preparation_data = original


def _start(process: BaseProcess) -> None:
    """Start a process; retry if the fork server was killed and not yet known to be dead."""
    for pause in (0.05, 0.2, 1.0):
        try:
            process.start()
        except (ConnectionError, EOFError):
            time.sleep(pause)
        else:
            return
    process.start()
