"""What Triton does once in a process, begun early: only to save time."""

import subprocess
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
