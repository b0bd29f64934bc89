"""The output of `bevatron env`: versions, devices, and which kernels run here or why not."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from bevatron import __version__

OPTIONAL_PACKAGES: dict[str, str] = {
    "triton": "comes with a CUDA build of torch",
    "rdkit": "pip install 'bevatron[molecules]'",
    "gemmi": "pip install 'bevatron[proteins]'",
    "biotite": "pip install 'bevatron[ccd]'",
    "ase-db-backends": "pip install 'bevatron[aselmdb]'",
    "tensorboard": "pip install 'bevatron[tensorboard]'",
    "wandb": "pip install 'bevatron[wandb]'",
    "mace-torch": "pip install mace-torch; only to read and write its pickled .model files",
}
"""Distribution name -> where it comes from."""

REQUIRED_PACKAGES = (
    "torch",
    "numpy",
    "pyarrow",
    "xxhash",
    "safetensors",
    "vesin",
    "ase",
    "rich",
    "tyro",
    "pyyaml",
    "jaxtyping",
    "matplotlib",
)

DISTRIBUTED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS")
SETTINGS_VARIABLES = (
    *("BEVATRON_KERNELS", "BEVATRON_MODELS", "TRITON_INTERPRET", "TRITON_CACHE_DIR"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY"),
)


def describe_environment() -> list[tuple[str, list[tuple[str, str]]]]:
    """Collect the environment as sections of (name, value) rows.

    Returns
    -------
    Sections in printing order; nothing is written and nothing is fetched.
    """
    return [
        ("bevatron", list(_bevatron())),
        ("packages", [(name, _version(name) or "MISSING") for name in REQUIRED_PACKAGES]),
        ("optional packages", list(_optional())),
        ("devices", list(_devices())),
        ("operators", list(_operators())),
        ("set in the environment", list(_variables())),
    ]


def _bevatron() -> Iterator[tuple[str, str]]:
    yield "version", __version__
    yield "installed in", str(Path(__file__).resolve().parents[1])
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.machine()}"


def _optional() -> Iterator[tuple[str, str]]:
    for name, source in OPTIONAL_PACKAGES.items():
        yield name, _version(name) or f"not installed ({source})"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    from bevatron.data.loader import default_workers
    from bevatron.data.processes import usable_cpu_set, usable_cpus
    from bevatron.parallel.affinity import cpus_near, list_cpus

    memory = _memory_gib()
    yield (
        "cpu",
        f"{usable_cpus()} usable of {os.cpu_count()} cores"
        + (f", {memory:.1f} GiB of memory" if memory else ""),
    )
    yield "cpu threads", _threads()
    yield "cpu affinity", list_cpus(usable_cpu_set()) or "any"
    workers = f"{default_workers()} for each process that trains on a GPU"
    yield "loader workers", f"{workers}, of 1 thread each, on the CPUs of their process"
    if torch.version.cuda is None and torch.version.hip is None:
        yield "gpu", "none: this build of torch is for CPUs only"
    elif not torch.cuda.is_available():
        yield "gpu", f"none visible, although torch is built for CUDA {torch.version.cuda}"
    else:
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            kind = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
            near = list_cpus(cpus_near(index)) or "not known"
            yield f"gpu {index}", f"{kind}, nearest CPUs: {near}"
    backends = [
        name
        for name, there in (
            ("gloo", torch.distributed.is_gloo_available()),
            ("nccl", torch.distributed.is_nccl_available()),
        )
        if there
    ]
    yield "distributed", ", ".join(backends) or "not available"


def _threads() -> str:
    """Return the number of torch's CPU threads, and the reason."""
    import torch

    from bevatron.parallel.threads import NODES_PER_THREAD, VARIABLES, idle_cpus, threads_for

    given = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    if given:
        return f"{torch.get_num_threads()} ({', '.join(given)})"
    most = threads_for(sys.maxsize)
    return (
        f"1 for each {NODES_PER_THREAD} atoms or nodes of a batch, at most {most}; predictions use "
        f"idle cores only, now {min(idle_cpus(), most)} (OMP_NUM_THREADS sets the number)"
    )


def _memory_gib() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        return None


def _operators() -> Iterator[tuple[str, str]]:
    import torch

    from bevatron import kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    by_choice: dict[str, list[str]] = {}
    for operator in kernels.implementations():
        by_choice.setdefault(kernels.explain(operator, device).partition(": ")[2], []).append(
            operator
        )
    for choice, operators in by_choice.items():
        implementation, _, why = choice.partition(" ")
        yield f"{implementation} {why}".strip(), ", ".join(operators)


def _variables() -> Iterator[tuple[str, str]]:
    for name in (*SETTINGS_VARIABLES, *DISTRIBUTED_VARIABLES):
        if name in os.environ:
            yield name, os.environ[name]
