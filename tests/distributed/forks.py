"""Ranks that are forked, since torch is imported already, and the port at which they meet."""

import gc
import importlib
import itertools
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

FIRST, LAST, EACH = 12_000, 30_000, 64
_numbers = itertools.count()


def free_port() -> int:
    """Return a port that is free, and that no other process of tests will take.

    The system's own choice may go to anybody before the ranks listen. These lie below what it
    chooses from, and every process has a range by its id.
    """
    for number in itertools.islice(_numbers, EACH):
        port = FIRST + (EACH * os.getpid() + number % EACH) % (LAST - FIRST)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"no free port between {FIRST} and {LAST}")


def fork(world: int, run: Callable[[int], int | None], output: Callable[[int], Path]) -> list[int]:
    """Call ``run(rank)``, which may return an exit code, in processes that write to files."""
    importlib.import_module("torch._dynamo")  # or every process imports it, for seconds
    port, children = free_port(), []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            _be_rank(rank, world, port, run, output(rank))
        children.append(child)
    return children


def _be_rank(rank, world, port, run, output):
    code = 99
    # Garbage of the parent is not finalised here: a loader would join threads this process lacks.
    gc.freeze()
    if rank and "shape_checks" in sys.modules:  # every process would prepare the same checks anew
        sys.modules["shape_checks"].checking = False
    forkserver._forkserver.__init__()  # that of the parent cannot be used: it is no child of this
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
        code = run(rank) or 0
    except BaseException as error:
        sys.stderr.write(f"error: {error}\n")
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_of(processes: list[int], seconds: float) -> list[int | None]:
    """Wait for processes; kill those that are not over in time and return None for them."""
    deadline, codes = time.monotonic() + seconds, []
    for process in processes:
        done = 0
        while not done and time.monotonic() < deadline:
            done, status = os.waitpid(process, os.WNOHANG)
            time.sleep(0.002)
        if not done:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        codes.append(os.waitstatus_to_exitcode(status) if done else None)
    return codes
