"""Prepared launches take what Triton would compile, and leave to it what they do not know."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from bevatron import kernels  # noqa: E402
from bevatron.testing import assert_close  # noqa: E402

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("compiled_launches.py")
SOURCE = Path(kernels.__file__).parents[2]
DEVICE = "cuda" if GPU else "cpu"


def test_direct_launches_equal_triton_s():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | {"PYTHONPATH": str(SOURCE)},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_launches_are_prepared_after_a_rehearsal_that_has_loaded_them():
    lines = (
        "from bevatron.kernels.shared.triton_compile import nothing_launched",
        "with nothing_launched():",
        "    from bevatron.kernels.shared import triton_launch",
        "assert not triton_launch._is_observed()",
    )
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_views_that_are_not_aligned_are_right_after_aligned_ones():
    memory = torch.randn(33 * 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    weight, bias = torch.randn(2, 65, device=DEVICE)
    with kernels.use("triton"):
        for _ in range(2):
            for first in (0, 1, 4, 3):
                x = memory[first : first + 32 * 64].view(32, 64).requires_grad_()
                w = weight[first % 2 :][:64]
                y = kernels.layer_norm(x, w, bias[:64])
                wanted = torch.nn.functional.layer_norm(x, (64,), w, bias[:64])
                assert_close(y, wanted, 1e-5)
                along = torch.ones_like(y).cumsum(1)
                found, right = (torch.autograd.grad(r, x, along)[0] for r in (y, wanted))
                assert_close(found, right, 1e-4)


def test_replaced_tiles_apply_to_prepared_launches():
    tiles = importlib.import_module("bevatron.kernels.pair.pair_attention.tiles")
    launches = importlib.import_module("bevatron.kernels.pair.pair_attention.triton_launches")
    q = torch.randn(1, 2, 1, 32, 16, device=DEVICE)
    given = (q, q, q, None, None, None, q, 1.0, True, False)
    before = launches.forward_launches(*given)
    assert launches.forward_launches(*given) is before
    with tiles.replaced(forward=tiles.Tiles(16, 16, 4, 1)):
        assert launches.forward_launches(*given)[0] == 4
    assert launches.forward_launches(*given)[0] == before[0] == 2


def test_a_kernel_is_loaded_after_torch_frees_its_cache(
    monkeypatch,
):
    from bevatron.kernels.shared.triton_launch import Launch

    done = []

    class Kernel:
        def __getitem__(self, grid):
            def launch(*tensors):
                done.append("launched")
                if "emptied" not in done:
                    raise RuntimeError(f"Triton Error [CUDA]: {message}")

            return launch

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: "captured" in done)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    message = "out of memory"
    Launch(Kernel(), (1,))(torch.zeros(1))
    assert done == ["launched", "emptied", "launched"]
    for message, before in (("invalid argument", []), ("out of memory", ["captured"])):
        done[:] = before
        with pytest.raises(RuntimeError, match=message):
            Launch(Kernel(), (1,))(torch.zeros(1))
        assert done == [*before, "launched"]
