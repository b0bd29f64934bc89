"""CPU threads of torch: few for small batches, and never more than idle cores.

OpenMP threads spin while they wait for each other. If other processes need the cores too, two
threads can be twenty times slower than one, and a small batch gains nothing from several anyway.
Setting OMP_NUM_THREADS or MKL_NUM_THREADS fixes the number everywhere.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bevatron.data.processes import own_cpus

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

NODES_PER_THREAD = 32
"""Atoms or nodes of a batch per thread; fewer take less time than waking the thread."""


def threads_for(nodes: int, *, idle: bool = False) -> int:
    """Choose the number of threads for batches of some size on the CPU.

    Parameters
    ----------
    nodes : atoms or nodes in a batch
    idle
        Leave out the cores that other processes use right now. Only for results that need not
        repeat to the last bit, because sums depend on the number of threads.

    Returns
    -------
    At most torch's current number, as set by `torch.set_num_threads`.
    """
    now = torch.get_num_threads()
    if any(os.environ.get(name) for name in VARIABLES):
        return now
    cores = min(own_cpus(), idle_cpus()) if idle else own_cpus()
    return max(min(now, cores, nodes // NODES_PER_THREAD), 1)


def idle_cpus() -> int:
    """Count the CPUs of the machine that no other process uses; at least 1."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return os.cpu_count() or 1
    return max((os.cpu_count() or 1) - (running - 1), 1)


@contextmanager
def few_threads(nodes: int, device: torch.device) -> Iterator[None]:
    """Use as many threads as a batch on the CPU deserves, within a ``with`` block."""
    before = torch.get_num_threads()
    wanted = threads_for(nodes, idle=True) if device.type == "cpu" and before > 1 else before
    if wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
