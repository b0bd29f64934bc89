"""The CPU cores nearest to a GPU, and this process's part of them.

In a machine with several sockets, memory and PCI lanes belong to one socket each: a process on
another socket reaches its GPU and its page-locked batches through the link between them.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from bevatron.data.processes import take_cpus
from bevatron.parallel.mesh import Mesh

PCI_PARTS = ("domain", "bus", "device")

_usable_before: dict[frozenset[int], set[int]] = {}
"""CPUs allowed before this process was pinned, so that a later run divides the same set."""


def parse_cpus(text: str) -> set[int]:
    """Parse a Linux list of CPUs.

    Examples
    --------
    >>> sorted(parse_cpus("0-2,8"))
    [0, 1, 2, 8]
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def list_cpus(cpus: Sequence[int] | set[int]) -> str:
    """Format a Linux list of CPUs.

    Examples
    --------
    >>> list_cpus({0, 1, 2, 8})
    '0-2,8'
    """
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def cpus_near(gpu: int) -> set[int]:
    """Return the CPUs nearest to a visible GPU, or none if the system does not report them."""
    found = torch.cuda.get_device_properties(gpu)
    domain, bus, device = (getattr(found, f"pci_{part}_id", -1) for part in PCI_PARTS)
    return near_pci(f"{domain:04x}:{bus:02x}:{device:02x}.0") if bus >= 0 else set()


def near_pci(address: str, root: Path = Path("/")) -> set[int]:
    """Return the CPUs nearest to a PCI device such as ``0000:3b:00.0``."""
    try:
        return parse_cpus((root / f"sys/bus/pci/devices/{address}/local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def share_of(
    gpu: int, near: Sequence[set[int]], usable: set[int], root: Path = Path("/")
) -> list[int]:
    """Choose the CPUs of the process that computes on a GPU.

    Parameters
    ----------
    gpu : index of the GPU
    near : CPUs nearest to each GPU of the processes on this machine
    usable : CPUs that the process may use
    root : root of the file system, for tests

    Returns
    -------
    list
        The usable CPUs nearest to it, as whole cores with all their threads; GPUs that share
        their nearest CPUs get equal parts. All usable CPUs if none is known to be near.
    """
    own = near[gpu] & usable
    rivals = [number for number, cpus in enumerate(near) if cpus & usable == own]
    if not own:
        return sorted(usable)
    cores: dict[int, list[int]] = {}
    for cpu in sorted(own):
        cores.setdefault(_first_thread(cpu, root), []).append(cpu)
    parts, place = len(rivals), rivals.index(gpu)
    if len(cores) < parts:
        return sorted(own)
    whole = sorted(cores)
    chosen = whole[len(whole) * place // parts : len(whole) * (place + 1) // parts]
    return sorted(cpu for core in chosen for cpu in cores[core])


def _first_thread(cpu: int, root: Path) -> int:
    """Return the first CPU of a CPU's core."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return min(parse_cpus(path.read_text()), default=cpu)
    except (OSError, ValueError):
        return cpu


def keep_near_gpu(mesh: Mesh) -> str | None:
    """Pin this process to its part of the CPUs near its GPU; return a line for the log.

    Worker processes inherit it. Nothing changes without a GPU, or if the system has no CPU masks.
    """
    if mesh.device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return None
    present, gpu = os.sched_getaffinity(0), torch.cuda.current_device()
    usable = _usable_before.get(frozenset(present), present)
    visible = torch.cuda.device_count()
    near = [cpus_near(number) for number in range(min(visible, max(mesh.local_world, gpu + 1)))]
    # Processes that each see a single GPU do not know which CPUs the others use.
    alone = mesh.local_world == 1 or visible >= mesh.local_world
    cpus = share_of(gpu, near, usable) if alone else sorted(near[gpu] & usable or usable)
    if set(cpus) == present:
        return None
    _usable_before[frozenset(cpus)] = usable
    take_cpus(cpus, shared=not alone)
    return f"CPUs: {list_cpus(cpus)}, near {mesh.device}"
