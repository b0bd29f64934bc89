"""Rank of this process in a run, and the run's torch process group.

`open_mesh` reads the environment variables of torchrun or Slurm's srun. On one process nothing is
started and every collective is a no-op. A rank that fails or dies stops the others, see
`bevatron.parallel.failures`.
"""

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from bevatron.errors import BevatronError, ConfigError
from bevatron.output import note
from bevatron.parallel import failures
from bevatron.parallel.failures import FailureWatch


@dataclass(frozen=True)
class Mesh:
    """The processes of one run, one device each.

    Attributes
    ----------
    rank, world : rank of this process and number of processes
    local_rank, local_world : the same among the processes on this machine
    device : where this process computes
    group : group of the collectives; None = all processes
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: Any = field(default=None, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes logs and checkpoints."""
        return self.rank == 0


def ranks_from_environment(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Read (rank, world, local rank, local world) from torchrun's or srun's variables.

    A batch script or an interactive shell of Slurm is one process: only a step started by srun with
    several tasks counts. Raises ConfigError if a variable is missing, is not a number, or is a rank
    that there is not.

    Examples
    --------
    >>> ranks_from_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    (1, 2, 1, 2)
    >>> ranks_from_environment({})
    (0, 1, 0, 1)
    """

    def number(name: str, default: int | None = None) -> int:
        value = environment.get(name)
        if value is None and default is not None:
            return default
        try:
            return int(value or "")
        except ValueError:
            found = "is not set" if value is None else f"is '{value}'"
            raise ConfigError(
                f"the environment variable {name} {found}, a number was expected; "
                f"start with torchrun or srun"
            ) from None

    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, world = number("RANK"), number("WORLD_SIZE")
        if not 0 <= rank < world:
            raise ConfigError(
                f"the environment variable RANK is {rank}, expected 0 to {world - 1} as WORLD_SIZE "
                f"is {world}; start with torchrun or srun"
            )
        return rank, world, number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", world)
    if number("SLURM_STEP_NUM_TASKS", 1) > 1:
        per_node = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        world = number("SLURM_STEP_NUM_TASKS")
        local_world = int(per_node.group()) if per_node else world
        return number("SLURM_PROCID"), world, number("SLURM_LOCALID"), local_world
    return 0, 1, 0, 1


def is_main_process() -> bool:
    """Whether this process prints and writes, according to the environment."""
    return ranks_from_environment(os.environ)[0] == 0


def parse_device(wanted: torch.device | str, key: str) -> torch.device:
    """Parse a device; ``auto`` is a GPU if there is one, else the CPU.

    Raises ConfigError if there are no such devices, naming ``key``.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(wanted)
    except RuntimeError:
        raise ConfigError(f"{key}: expected auto, cpu, cuda or cuda:N, got '{wanted}'") from None


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Choose this process's device: ``auto`` is a GPU if there is one, else the CPU.

    Raises ConfigError if a GPU is requested and there is none for this process.
    """
    device = parse_device(wanted, "train.device")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = local_rank if device.index is None else device.index
        if index >= count:
            if not count:
                raise ConfigError(
                    f"train.device: '{wanted}' needs a GPU, torch finds none (`bevatron env` says "
                    "why); set train.device to cpu or auto"
                )
            raise ConfigError(
                f"train.device: '{wanted}' needs GPU {index}, counting from 0, but this process "
                f"has {count}; start fewer processes or choose another"
            )
        device = torch.device("cuda", index)
    return device


def start_gpu(wanted: str) -> None:
    """Start to initialise CUDA, cuBLAS and Triton in a thread, which takes a second or two.

    Errors are ignored here: whatever needs the device will raise them.
    """

    def start() -> None:
        with suppress(ConfigError, RuntimeError):
            device = choose_device(wanted, ranks_from_environment(os.environ)[2])
            if device.type == "cuda":
                # The first matmul fixes whether cuBLAS is deterministic, before train.deterministic
                # is known. On an H200 this is the default workspace anyway.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.zeros(1, 1, device=device) @ torch.zeros(1, 1, device=device)
                if find_spec("triton") is not None:
                    from bevatron.kernels.shared import triton_compile

                    triton_compile.start()

    # Not a daemon: inside CUDA when the interpreter ends, after an early error, it would abort.
    threading.Thread(target=start, name="bevatron-gpu").start()


@contextmanager
def open_mesh(device: str = "auto", timeout_seconds: float = 1800.0) -> Iterator[Mesh]:
    """Join the processes of this run within a ``with`` block.

    CPU tensors are reduced through gloo, CUDA tensors through NCCL. Raises ConfigError for a
    missing device or an incomplete environment, and BevatronError with the message of another rank
    that failed.

    Parameters
    ----------
    device : ``auto``, ``cpu``, ``cuda`` or ``cuda:N``
    timeout_seconds : time after which a collective that some rank never joins is an error

    Examples
    --------
    >>> with open_mesh("cpu") as mesh:
    ...     mesh.world
    1
    """
    rank, world, local_rank, local_world = ranks_from_environment(os.environ)
    mesh = Mesh(rank, world, local_rank, local_world, choose_device(device, local_rank))
    if mesh.device.type == "cuda":
        torch.cuda.set_device(mesh.device)
    if world == 1 or distributed.is_initialized():
        yield mesh
        return
    _set_rendezvous(os.environ)
    backend = "cpu:gloo,cuda:nccl" if mesh.device.type == "cuda" else "gloo"
    # Otherwise NCCL would map each of a captured step's thousands of buffers into all ranks.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    timeout = timedelta(seconds=timeout_seconds)
    distributed.init_process_group(
        backend,
        store=_fresh_store(rank, world, timeout),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    watch = FailureWatch(rank, world, distributed.distributed_c10d._get_default_store())  # noqa: SLF001
    try:
        yield mesh
    except BaseException as error:
        # Do not destroy the process group: that may wait for ranks that wait for this one.
        first = watch.report(error)
        if rank == 0 and "TORCHELASTIC_RUN_ID" not in os.environ:
            # This process serves the store, so let the others read first.
            time.sleep(3 * failures.WATCH_SECONDS)
        watch.stop()
        if first is not None and first[0] != rank and not isinstance(error, BevatronError):
            raise BevatronError(f"rank {first[0]} failed: {first[1]}") from error
        raise
    distributed.barrier()
    watch.stop()
    distributed.destroy_process_group()


def divide(mesh: Mesh, last: int, timeout_seconds: float) -> tuple[Mesh, Any]:
    """Split the processes into the first ones and the ``last``, each with its own collectives.

    Returns
    -------
    (mesh, group)
        The mesh of this process's part, and the host group in which rank 0 talks to the last
        ranks; the other first ranks do not use it.
    """
    first = mesh.world - last
    timeout = timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if mesh.device.type == "cuda" else "gloo"
    own = mesh
    for begin, end in ((0, first), (first, mesh.world)):
        group = distributed.new_group(list(range(begin, end)), timeout=timeout, backend=backend)
        if begin <= mesh.rank < end:
            own = replace(mesh, rank=mesh.rank - begin, world=end - begin, group=group)
    ranks = [0, *range(first, mesh.world)]
    return own, distributed.new_group(ranks, timeout=timeout, backend="gloo")


SECONDS_TO_MEET = 20.0
"""After which a process says that it waits for the others."""

_stores: list[Store] = []
"""The rendezvous store of this process's run, followed by its part for every opening."""


def _fresh_store(rank: int, world: int, timeout: timedelta) -> Store:
    """Return a prefix of the ranks' store that no earlier process group of this run has used.

    A second group that finds the addresses of the first under its keys would connect to nobody.
    """
    if not _stores:
        _stores.append(_shared_store(rank, world, timeout))
    # torchrun's store outlives a restart, with the keys of the previous start.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _stores.append(PrefixStore(f"bevatron-{start}-{len(_stores)}", _stores[0]))
    return _stores[-1]


def _shared_store(rank: int, world: int, timeout: timedelta) -> Store:
    """Wait until all processes have met.

    In a thread: torch waits outside of Python, where neither Ctrl-C nor SIGTERM would be noticed.
    """
    found: list[Store | Exception] = []

    def meet() -> None:
        try:
            found.append(next(rendezvous("env://", rank, world, timeout=timeout))[0])
        except (RuntimeError, ValueError) as error:
            found.append(error)

    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    waiting = threading.Thread(target=meet, name="bevatron-rendezvous", daemon=True)
    waiting.start()
    waiting.join(SECONDS_TO_MEET)
    if waiting.is_alive():
        note(f"process {rank} waits at {where} until all {world} processes of the run are there")
        waiting.join()
    if isinstance(found[0], Exception):
        reason = str(found[0]).splitlines()[0].rstrip(".")
        raise BevatronError(
            f"process {rank} of {world} did not meet the others at {where} ({reason}); start as "
            "many as WORLD_SIZE says, with the same MASTER_ADDR and MASTER_PORT"
        )
    return found[0]


def _set_rendezvous(environment: "os._Environ[str]") -> None:
    """Under srun, derive the rendezvous address from the job: its first node and its own port."""
    if "MASTER_ADDR" not in environment:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
        environment["MASTER_ADDR"] = first_node(nodes) or "127.0.0.1"
    if "MASTER_PORT" not in environment:
        job = int(environment.get("SLURM_JOB_ID", "0")) + int(environment.get("SLURM_STEP_ID", "0"))
        environment["MASTER_PORT"] = str(20000 + job % 20000)


def first_node(node_list: str) -> str:
    """Return the first host of Slurm's compressed list.

    Examples
    --------
    >>> first_node("gpu[007-009,012],cpu3")
    'gpu007'
    >>> first_node("login1")
    'login1'
    """
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", node_list)
    return "" if match is None else match.group(1) + (match.group(2) or "") + match.group(3)
