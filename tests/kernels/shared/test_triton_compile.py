"""What Triton does once in a process, begun early: only to save time."""

import os
import select
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")

from bevatron.kernels.shared import triton_compile  # noqa: E402


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no driver"), subprocess.CalledProcessError(1, "cc"), ImportError("ptxas")],
)
def test_failures_at_the_start_are_left_to_the_first_kernel(monkeypatch, error):
    """Where a compiler lacks headers, the driver's own module cannot be built."""

    def current_target():
        raise error

    active = SimpleNamespace(get_current_target=current_target)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    triton_compile.start()


COMPILES = """
import time
from types import SimpleNamespace
from bevatron.kernels.shared import triton_compile

def slowly(*_):
    print("compiles", flush=True)
    time.sleep(60)

triton_compile._is_new = slowly
kernel = SimpleNamespace(kernel=SimpleNamespace(src=""))
triton_compile._compile_all([kernel, kernel], None, 2, lambda said: None)
"""


def test_processes_that_compile_end_with_a_process_that_is_killed():
    running = subprocess.Popen([sys.executable, "-c", COMPILES], stdout=subprocess.PIPE, bufsize=0)
    for _ in range(2):
        assert running.stdout.readline() == b"compiles\n"
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    while select.select([running.stdout], [], [], 10)[0]:
        if not running.stdout.read(99):
            return  # nobody has it open any more
    pytest.fail("they live on")
