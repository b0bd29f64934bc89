"""The trainer on a GPU."""

import os
import signal
import subprocess
import sys

import pytest
import test_mace
import test_toy_system
import tiny
import torch
from safetensors.torch import load_file

from bevatron.errors import OutOfMemoryError
from bevatron.train.loop import fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = {"train": {"epochs": 2, "device": "cuda"}}


def test_a_gpu_gives_the_losses_of_a_cpu(tmp_path):
    fit(tiny.make_run(tmp_path / "cpu"))
    fit(tiny.make_run(tmp_path / "gpu", **GPU))
    found, expected = tiny.losses(tmp_path / "gpu"), tiny.losses(tmp_path / "cpu")
    assert found == pytest.approx(expected, rel=1e-10)


def test_fused_and_plain_optimisers_agree(tmp_path):
    fit(tiny.make_run(tmp_path / "plain", **GPU, optim={"fused": False}))
    fit(tiny.make_run(tmp_path / "fused", **GPU, optim={"fused": True}))
    plain = tiny.losses(tmp_path / "plain")
    assert tiny.losses(tmp_path / "fused") == pytest.approx(plain, rel=1e-10)


def test_a_stopped_run_goes_on_with_the_same_random_numbers(tmp_path):
    class Noisy(tiny.TinyTask):
        stop_at = None

        def loss(self, model, batch, normalisers):
            if len(self.seen) == self.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            noise = torch.rand((), device=batch.points.device, dtype=batch.points.dtype)
            found = super().loss(model, batch, normalisers)
            return tiny.Loss(found.total * (1 + noise), found.terms)

    fit(tiny.make_run(tmp_path / "whole", task=Noisy(), **GPU))
    stopped = Noisy()
    stopped.stop_at = 5
    fit(tiny.make_run(tmp_path / "cut", task=stopped, **GPU))
    fit(tiny.make_run(tmp_path / "cut", task=Noisy(), resume=True, **GPU))
    assert tiny.losses(tmp_path / "cut") == pytest.approx(
        tiny.losses(tmp_path / "whole"), rel=1e-12
    )


def test_too_little_memory_is_one_sentence(tmp_path):
    class Hungry(tiny.TinyTask):
        def loss(self, *args):
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
            return super().loss(*args)

    with pytest.raises(OutOfMemoryError, match=r"cuda:0 ran out of memory at a batch of"):
        fit(tiny.make_run(tmp_path, task=Hungry(), **GPU))


def test_workers_and_pinned_batches(tmp_path):
    fit(tiny.make_run(tmp_path / "plain", **GPU))
    fit(tiny.make_run(tmp_path / "workers", **GPU, loader={"workers": 2, "pin": True}))
    plain = tiny.losses(tmp_path / "plain")
    assert tiny.losses(tmp_path / "workers") == pytest.approx(plain, rel=1e-12)


def test_steps_whose_work_differs_are_replayed_by_graphs_of_their_own(tmp_path):
    test_toy_system.check_numbered_steps(tmp_path, "cuda")


@pytest.mark.parametrize("graphs", [None, False])
def test_validation_on_a_stream_of_its_own_changes_nothing(tmp_path, graphs):
    train = {**GPU["train"], "epochs": 4, "cuda_graphs": graphs}
    fit(test_mace.make_run(tmp_path / "in_line", train=train))
    fit(test_mace.make_run(tmp_path / "beside", train={**train, "evaluate_beside": True}))
    found, expected = tiny.losses(tmp_path / "beside"), tiny.losses(tmp_path / "in_line")
    assert found == pytest.approx(expected, rel=1e-10)
    in_line, beside = (
        [record["valid"] for record in tiny.records(tmp_path / name) if record["kind"] == "epoch"]
        for name in ("in_line", "beside")
    )
    assert len(beside) == 4
    for found, expected in zip(beside, in_line, strict=True):
        assert found == pytest.approx(expected, rel=1e-10)


def test_several_averages_are_those_of_a_cpu(tmp_path):
    optim = {"ema": (0.9, 0.99), "fused": True}
    for device in ("cpu", "cuda"):
        train = {"epochs": 2, "device": device}
        fit(tiny.make_run(tmp_path / device, optim=optim, train=train))
    for name in ("weights.safetensors", "ema-0.99/weights.safetensors"):
        expected, found = (load_file(tmp_path / device / name) for device in ("cpu", "cuda"))
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12)


EARLY = """
import threading, torch
from bevatron.parallel.mesh import start_gpu
from bevatron.train.precision import arithmetic
from bevatron.train.settings import TrainConfig
start_gpu("cuda")
[each.join() for each in threading.enumerate() if each.name == "bevatron-gpu"]
with arithmetic(TrainConfig(deterministic=True), None):
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
"""


def test_a_gpu_that_was_started_early_computes_deterministically():
    """torch looks only once, at its first matmul, whether cuBLAS is set up for that."""
    environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", EARLY], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
