"""One optimiser step: accumulation, divergence, memory."""

import dataclasses
import math
from typing import ClassVar

import pytest
import tiny
import torch

from bevatron.errors import ConfigError, DivergenceError, OutOfMemoryError
from bevatron.parallel.mesh import Mesh
from bevatron.train.loop import begin_state, fit
from bevatron.train.step import _diverged, note_loss, train_step


def step(run, groups, **changes):
    """Step once over batches of the given samples; return the result and the weights after."""
    state = begin_state(run, Mesh(), None)
    batches = [tiny.batch_of(run, indices) for indices in groups]
    result = train_step(run, state, run.model, batches, lr=0.01, mesh=Mesh(), **changes)
    return result, torch.cat([p.detach().flatten() for p in run.model.parameters()])


def test_small_batches_accumulated_equal_one_large_batch(tmp_path):
    whole, after_whole = step(tiny.make_run(tmp_path), [list(range(10))])
    parts, after_parts = step(tiny.make_run(tmp_path), [[0], [1, 2, 3, 4, 5, 6], [7, 8, 9]])
    assert parts.loss == pytest.approx(whole.loss, rel=0, abs=1e-10)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=0, abs=1e-10)
    assert parts.sizes == whole.sizes
    for name, value in whole.terms.items():
        assert parts.terms[name] == pytest.approx(value, rel=0, abs=1e-10)
    torch.testing.assert_close(after_parts, after_whole, rtol=0, atol=1e-10)
    assert sum(whole.terms.values()) == pytest.approx(whole.loss)


def test_a_repeated_sample_of_weight_zero_changes_nothing(tmp_path):
    run = tiny.make_run(tmp_path)
    without, after = step(run, [[0, 1, 2]])
    run = tiny.make_run(tmp_path)
    state = begin_state(run, Mesh(), None)
    batch = tiny.batch_of(run, [0, 1, 2, 5], [1.0, 1.0, 1.0, 0.0])
    result = train_step(run, state, run.model, [batch], lr=0.01, mesh=Mesh())
    assert result.loss == pytest.approx(without.loss, rel=1e-14)
    now = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    torch.testing.assert_close(now, after, rtol=0, atol=1e-12)


def test_notes_are_handed_through(tmp_path):
    result, _ = step(tiny.make_run(tmp_path), [[0, 1]], notes={"save": 2.0})
    assert result.notes == {"save": 2.0}


def test_clipping_limits_the_step_but_reports_the_whole_norm(tmp_path):
    free, _ = step(tiny.make_run(tmp_path, optim={"clip": None}), [[0, 1, 2]])
    clipped, _ = step(tiny.make_run(tmp_path, optim={"clip": 1e-3}), [[0, 1, 2]])
    assert clipped.grad_norm == pytest.approx(free.grad_norm)
    run = tiny.make_run(tmp_path, optim={"clip": 1e-3, "ema": None, "weight_decay": 0.0})
    state = begin_state(run, Mesh(), None)
    seen = []
    state.optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            torch.nn.utils.get_total_norm([p.grad for p in run.model.parameters()])
        )
    )
    train_step(run, state, run.model, [tiny.batch_of(run, [0, 1, 2])], lr=0.01, mesh=Mesh())
    assert float(seen[0]) == pytest.approx(1e-3, rel=1e-3)


def test_clipping_may_limit_every_parameter_by_itself(tmp_path):
    free, _ = step(tiny.make_run(tmp_path, optim={"clip": None}), [[0, 1, 2]])
    run = tiny.make_run(
        tmp_path, optim={"clip": 1e-3, "clip_norm": "tensor", "ema": None, "weight_decay": 0.0}
    )
    state = begin_state(run, Mesh(), None)
    seen = []
    state.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(float(p.grad.norm()) for p in run.model.parameters())
    )
    result = train_step(
        run, state, run.model, [tiny.batch_of(run, [0, 1, 2])], lr=0.01, mesh=Mesh()
    )
    assert result.grad_norm == pytest.approx(free.grad_norm)
    assert max(seen) == pytest.approx(1e-3, rel=1e-2)
    assert min(seen) > 0.5e-3


class Halved(tiny.TinyTask):
    """A task that may be computed with 16-bit products, and notes when it is."""

    allows_autocast = True
    halved: ClassVar[list] = []

    def loss(self, model, batch, normalisers):
        self.halved.append(torch.is_autocast_enabled("cpu"))
        with torch.autocast("cpu", enabled=False):
            return super().loss(model, batch, normalisers)


def test_products_in_16_bits_are_for_tasks_that_allow_them(tmp_path):
    run = tiny.make_run(tmp_path, train={"dtype": "float32", "autocast": "bfloat16"})
    with pytest.raises(ConfigError, match=r"train\.autocast: this model does not allow matmuls"):
        begin_state(run, Mesh(), None)
    run = dataclasses.replace(run, task=Halved())
    Halved.halved.clear()
    step(run, [[0, 1, 2]])
    assert Halved.halved == [True]
    with pytest.raises(ConfigError, match=r"needs train\.dtype float32, not float64"):
        tiny.make_run(tmp_path, train={"dtype": "float64", "autocast": "bfloat16"})


def test_a_model_loaded_for_predictions_is_trained_in_training_mode(tmp_path):
    run = tiny.make_run(tmp_path)
    run.model.eval()
    assert begin_state(run, Mesh(), None).model.training


@pytest.mark.parametrize("bad", ["poison", "scale_at"])
def test_a_loss_gone_wrong_stops_the_run_before_it_spoils_the_weights(tmp_path, bad):
    good = tiny.make_run(tmp_path / "good", count=60, train={"epochs": 1})
    fit(good)
    seen = good.task.seen
    assert len(seen) > 12
    sample = seen[-1][0]
    run = tiny.make_run(
        tmp_path / "bad",
        count=60,
        task=tiny.TinyTask(**{bad: sample}),
        train={"epochs": 1},
        checkpoint={"every_steps": 1},
    )
    with pytest.raises(DivergenceError, match=rf"cloud {sample}\b") as caught:
        fit(run)
    assert f"step {len(seen)} " in str(caught.value)
    assert "\n" not in str(caught.value)
    newest = max((tmp_path / "bad" / "checkpoints").iterdir())
    assert newest.name == f"step-{len(seen) - 1:08d}"
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_a_gradient_that_is_not_finite_is_noticed_though_the_loss_is(tmp_path):
    class Kink(tiny.TinyTask):
        def loss(self, model, batch, normalisers):
            found = super().loss(model, batch, normalisers)
            root = torch.sqrt(model.second.bias.abs().sum() * 0)
            return tiny.Loss(found.total + root, found.terms)

    with pytest.raises(DivergenceError, match="the gradient became nan"):
        fit(tiny.make_run(tmp_path, task=Kink()))


def test_an_explosion_is_a_loss_far_above_its_recent_average():
    progress = tiny_progress([1.0] * 12)
    assert not _diverged(progress, 900.0, 1.0, 1000.0)
    assert _diverged(progress, 1100.0, 1.0, 1000.0)
    assert not _diverged(progress, 1100.0, 1.0, None)
    assert _diverged(progress, math.nan, 1.0, None)
    assert not _diverged(tiny_progress([1.0] * 3), 1e9, 1.0, 1000.0)


def tiny_progress(losses):
    from bevatron.train.state import Progress

    progress = Progress()
    for loss in losses:
        note_loss(progress, loss)
    return progress


def test_the_recent_average_is_a_mean_at_first_and_forgets_later():
    assert tiny_progress([1.0, 2.0, 6.0]).loss_average == pytest.approx(3.0)
    assert tiny_progress([100.0] * 20 + [1.0] * 200).loss_average == pytest.approx(1.0, rel=1e-2)


def test_out_of_memory_says_the_batch_and_what_to_set(tmp_path):
    class Full(tiny.TinyTask):
        def loss(self, *args):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutOfMemoryError) as caught:
        fit(tiny.make_run(tmp_path, task=Full()))
    assert "atoms" in str(caught.value)
    assert "batch.capacity (now 20 atoms)" in str(caught.value)
    assert "optim.accumulate (now 1)" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(OutOfMemoryError, match=r"at a single sample of 1 graphs, \d atoms"):
        step(tiny.make_run(tmp_path / "one", task=Full()), [[3]])
