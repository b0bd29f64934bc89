"""Calls of benchmarks that share GPUs: they prepare at once and are timed one after another.

Of calls on several GPUs only one should exchange through NCCL at a time: the GPUs do not give their
time slices to the same process at once, and every exchange waits for both.
"""

import argparse
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bevatron.parallel.collectives import barrier
from bevatron.parallel.mesh import Mesh

PATIENCE = 150
"""Seconds for which a call that is ready waits for the others: one may have failed."""


def add_calls(parser: argparse.ArgumentParser) -> None:
    """Add ``--turns`` of calls at once, and ``--nccl`` of a call."""
    parser.add_argument("--turns", nargs=2, metavar=("N", "FOLDER"), help="of N calls at once")
    parser.add_argument(
        "--nccl", nargs="*", default=[], metavar="NAME=VALUE", help="settings, without NCCL_"
    )


def set_nccl(given: argparse.Namespace) -> str:
    """Set what NCCL reads when it starts; return how that is called in tables."""
    for setting in given.nccl:
        name, value = setting.split("=")
        os.environ[f"NCCL_{name}"] = value
    return " ".join(given.nccl) or "default"


@contextmanager
def turn(given: argparse.Namespace, mesh: Mesh) -> Iterator[None]:
    """Wait until all calls that take turns are ready, and then for the turn of this one."""
    if given.turns is None:
        yield
        return
    count, folder = int(given.turns[0]), Path(given.turns[1])
    with (folder / "turn").open("w") as lock:
        if mesh.is_main:
            (folder / f"ready-{os.getpid()}").touch()
            last = time.monotonic() + PATIENCE
            while len([*folder.glob("ready-*")]) < count and time.monotonic() < last:
                time.sleep(0.05)
            fcntl.flock(lock, fcntl.LOCK_EX)
        barrier(mesh)
        yield
        barrier(mesh)
