"""Steps with products in float16: the loss is scaled, what overflows is left out."""

import dataclasses
import json

import numpy as np
import pytest
import tiny
import torch

from bevatron.errors import ConfigError, DivergenceError
from bevatron.parallel.mesh import Mesh
from bevatron.task import Loss
from bevatron.train.capture.step import captured_step
from bevatron.train.loop import begin_state, fit
from bevatron.train.precision import FIRST, PATIENCE, LossScale, autocast_context
from bevatron.train.settings import TrainConfig
from bevatron.train.state import Progress
from bevatron.train.step import train_step


class Narrow(tiny.TinyTask):
    """The tiny task, made for 16 bits, with gradients times a factor."""

    allows_autocast = True

    def __init__(self, steepness=1.0, **options):
        super().__init__(**options)
        self.steepness = steepness

    def loss(self, model, batch, normalisers):
        # Forces are a derivative, which is not made for float16.
        with torch.autocast("cpu", enabled=False):
            loss = super().loss(model, batch, normalisers)
        total = Steep.apply(loss.total, self.steepness)
        return Loss(total, loss.terms)

    def predict(self, model, batch):
        with torch.autocast("cpu", enabled=False):
            return super().predict(model, batch)


class Steep(torch.autograd.Function):
    """The same number; its gradient times a factor overflows where a float16 would."""

    @staticmethod
    def forward(ctx, x, steepness):
        ctx.steepness = steepness
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return (gradient * ctx.steepness).half().to(gradient) / ctx.steepness, None


def make_run(folder, steepness=1.0, autocast="float16", **changes):
    train = TrainConfig(dtype="float32", device="cpu", epochs=1, autocast=autocast, **changes)
    run = tiny.make_run(folder)
    settings = dataclasses.replace(run.settings, train=train)
    return dataclasses.replace(run, task=Narrow(steepness), settings=settings)


def step(run, state):
    return train_step(run, state, run.model, [tiny.batch_of(run, [0, 1, 2])], lr=0.01, mesh=Mesh())


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters()]).clone()


def test_a_scaled_step_is_the_plain_one(tmp_path):
    found = []
    for autocast in (None, "float16"):
        run = make_run(tmp_path, autocast=autocast)
        run.model.float()
        state = begin_state(run, Mesh(), None)
        state.progress.loss_scale = LossScale(factor=1024.0)
        result = step(run, state)
        found.append((result.grad_norm, weights(run)))
    assert found[1][0] == pytest.approx(found[0][0], rel=2e-2)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=1e-4)


def test_a_step_that_overflows_is_left_out_and_the_factor_halved(tmp_path):
    run = make_run(tmp_path, steepness=4.0)
    state = begin_state(run, Mesh(), None)
    before = weights(run)
    factors = []
    for _ in range(4):
        factors.append(state.progress.loss_scale.factor if state.progress.loss_scale else FIRST)
        result = step(run, state)
        if not np.isfinite(result.grad_norm):
            assert torch.equal(weights(run), before)
            assert not state.optimizer.state
            assert all(p.grad is None for p in run.model.parameters())
    # 65504 / 4 is the largest factor that does not overflow.
    assert factors == [FIRST, FIRST / 2, FIRST / 4, FIRST / 8]
    assert np.isfinite(result.grad_norm)
    assert not torch.equal(weights(run), before)


def test_a_gradient_that_overflows_by_itself_is_an_error(tmp_path):
    run = make_run(tmp_path, steepness=1e6)
    state = begin_state(run, Mesh(), None)
    state.progress.loss_scale = LossScale(factor=1.0)
    with pytest.raises(DivergenceError, match="the gradient became"):
        step(run, state)


def test_many_sound_steps_double_the_factor():
    scale = LossScale(factor=8.0)
    assert all(scale.take(1.0) for _ in range(PATIENCE - 1))
    assert scale.factor == 8.0
    assert scale.take(1.0)
    assert (scale.factor, scale.sound_steps) == (16.0, 0)
    scale = LossScale(factor=1.0)
    assert scale.take(float("inf"))
    assert scale.factor == 1.0


def test_the_factor_goes_into_checkpoints():
    progress = Progress(loss_scale=LossScale(32.0, 7))
    again = Progress.from_json(json.loads(json.dumps(progress.to_json())))
    assert again == progress
    old = progress.to_json()
    del old["loss_scale"]
    assert Progress.from_json(old).loss_scale is None


def test_a_run_in_float16_learns(tmp_path):
    run = make_run(tmp_path, steepness=4.0)
    fit(run)
    records = tiny.records(tmp_path)
    norms = [record["grad_norm"] for record in records if record["kind"] == "step"]
    assert norms[0] is None
    assert None not in norms[3:]
    epoch = [record for record in records if record["kind"] == "epoch"]
    assert all(np.isfinite(record["grad_norm"]) for record in epoch)


def test_it_is_not_captured(tmp_path):
    run = make_run(tmp_path, cuda_graphs=True)
    with pytest.raises(ConfigError, match="float16 may have to be skipped"):
        captured_step(run, begin_state(run, Mesh(), None), Mesh(), print)


def test_products_are_in_float16():
    with autocast_context(TrainConfig(dtype="float32", autocast="float16"), torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
