"""The planned memory of a step is what the step allocates."""

import copy

import numpy as np
import pytest
import tiny
import torch
from test_mace import make_run
from torch import nn

from bevatron.data.packing import Draws, Source
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.parallel.axial import own
from bevatron.parallel.mesh import Mesh
from bevatron.task import Loss, StepNumbers
from bevatron.train import Stage, StageConfig, description, memory_plan
from bevatron.train.loop import begin_state
from bevatron.train.memory_plan import (
    LiveBytes,
    NotPlannableError,
    kept_by_module,
    plan_memory,
)
from bevatron.train.profiling.autograd_memory import saved_bytes_by_module
from bevatron.train.run import SamplesApart, SamplesInGroups
from bevatron.train.step import train_step

NUMBERS = StepNumbers(0, 0)


class Wide(nn.Module):
    """Layers of a width; perhaps each is computed again in the backward pass."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            if self.again:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


def wide_run(folder, again, fused, **train):
    return tiny.make_run(
        folder,
        model=Wide(again),
        task=tiny.WideTask(),
        train={"dtype": "float32", **train},
        optim={"clip": 1.0, "ema": 0.9, "fused": fused},
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_the_plan_is_what_a_real_step_allocates(tmp_path, again, fused):
    run = wide_run(tmp_path, again, fused)
    batch = tiny.batch_of(run, list(range(30)) * 8)
    planned = plan_memory(run, batch, gpu=False)
    copied = copy.deepcopy((run.model, run.task, batch))
    with LiveBytes() as live:
        step = memory_plan._Step(
            *memory_plan._set_up(run, *copied[:2], NUMBERS), live, captured=False
        )
        real = step.planned(copied[2], None)
    assert planned == real
    weights = sum(p.numel() for p in run.model.parameters()) * 4
    assert planned.weights == weights
    rows = len(batch.points)
    if again:  # of all layers the inputs, of one what is inside
        assert planned.activations < 3 * rows * 4 * (4 * 256 + 2 * 1024) + 2 * weights
    else:
        assert planned.activations > rows * 4 * 4 * 2 * 1024


def test_what_autograd_keeps_is_planned_without_the_memory(tmp_path):
    run = wide_run(tmp_path, False, True)
    batch = tiny.batch_of(run, list(range(30)) * 8)
    kept = {name: saved.total for name, saved in kept_by_module(run, batch).items()}
    counts = run.task.normalisers(batch)
    excluded = [*run.model.parameters(), *vars(batch).values()]
    excluded = [tensor for tensor in excluded if isinstance(tensor, torch.Tensor)]
    real = saved_bytes_by_module(
        run.model, lambda: run.task.loss(run.model, batch, counts).total, excluded
    )
    assert kept == {name: saved.total for name, saved in real.items()}
    assert sum(kept.values()) > 4 * 2 * 1024 * 4 * len(batch.points)


@custom_op("test_scratch", fake="x")
def scratch(x: torch.Tensor) -> torch.Tensor:
    return (x.new_empty(100 * x.numel()).zero_()[: x.numel()] + x).contiguous()


def test_what_an_operator_allocates_inside_counts():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), LiveBytes() as live:
        x = torch.zeros(256)
        scratch(x)
    assert live.peak == 1024 * (1 + 100 + 1)
    assert live.now == 1024


def test_a_plan_for_a_gpu_changes_nothing_here(tmp_path):
    def losses(run):
        state = begin_state(run, Mesh(), None)
        batch = tiny.batch_of(run, [0, 1, 2])
        return [
            train_step(run, state, state.model, [batch], lr=0.01, mesh=Mesh()).loss
            for _ in range(2)
        ]

    expected = losses(make_run(tmp_path / "one"))
    run = make_run(tmp_path / "two")
    batch = tiny.batch_of(run, [0, 1, 2])
    launched = plan_memory(run, batch, gpu=True, captured=False)
    captured = plan_memory(run, batch, gpu=True, captured=True)
    larger = plan_memory(run, tiny.batch_of(run, [0, 1, 2] * 4), gpu=True, captured=True)
    assert captured.batch == 2 * launched.batch
    assert (launched.workspaces, captured.workspaces) == (2 * 2**25, 3 * 2**25)
    assert larger.activations > 2 * captured.activations
    assert losses(run) == expected


def test_a_step_on_a_gpu_that_looks_at_values_is_told(tmp_path):
    class Looking(tiny.WideTask):
        def loss(self, model, batch, normalisers):
            assert float(batch.points.sum()) != 1.0
            return super().loss(model, batch, normalisers)

    run = wide_run(tmp_path, again=False, fused=None)
    run.task = Looking()
    with pytest.raises(NotPlannableError, match="depends on values of its batch"):
        plan_memory(run, tiny.batch_of(run, [0, 1]), gpu=True)


def test_of_processes_that_share_a_sample_the_memory_of_one_is_described(tmp_path):
    class Shared(tiny.WideTask):
        def loss(self, model, batch, normalisers):
            x = own(batch.points.float().repeat(1, 86)[:, :256], 0)
            return Loss(model(x).square().mean(), {})

    run = wide_run(tmp_path, again=False, fused=False)
    run.task = Shared()
    batch = tiny.batch_of(run, list(range(30)) * 8)
    needed = []
    for run.sharing in (SamplesApart(), SamplesInGroups(4)):
        planned = description._planned(run, batch, None, False, False, NUMBERS)
        needed.append(planned.activations)
    assert needed[1] < 0.5 * needed[0]


def test_what_was_derived_from_an_unchanging_batch_counts(tmp_path):
    from bevatron.data.samples import collate_graphs
    from bevatron.data.samples.graphs import WholeGraph

    nodes, edges = 1000, 3000
    drawn = np.random.default_rng(0)
    sample = {
        "num_nodes": np.array(nodes),
        "edges": np.unique(drawn.integers(nodes, size=(edges, 2), dtype=np.int32), axis=0),
        "features": drawn.standard_normal((nodes, 64)).astype(np.float32),
        "labels": drawn.integers(3, size=nodes),
        "masks": np.eye(3, dtype=bool)[drawn.integers(3, size=nodes)],
    }
    batch = collate_graphs([WholeGraph(sample)], np.array([0]), [1.0])
    batch.graph.derived("weights", lambda graph: {"of edges": [graph.edges.new_zeros(10_000)]})
    found = {len(tensor.untyped_storage()) for tensor in memory_plan._tensors_of(batch)}
    assert {nodes * 64 * 4, 10_000 * batch.edges.itemsize, batch.edges.nbytes} <= found


def test_a_copy_that_is_validated_beside_training_counts(tmp_path):
    run = wide_run(tmp_path, again=False, fused=True)
    beside = wide_run(tmp_path, again=False, fused=True, evaluate_beside=True)
    batch = run.task.collate([run.train[0]], np.zeros(1, dtype=np.int64), [1.0])
    one, two = (plan_memory(each, batch, gpu=False) for each in (run, beside))
    assert two.weights == 2 * one.weights
    assert two.peak == one.peak + one.weights


def test_where_a_step_has_several_batches_the_gradient_of_those_before_counts(tmp_path):
    run = wide_run(tmp_path, again=False, fused=True)
    batch = run.task.collate([run.train[0]], np.zeros(1, dtype=np.int64), [1.0])
    draws = Draws([Source("all", run.train, np.ones(len(run.train)))], 0)

    def peak(batches):
        config = StageConfig(steps=1, samples_per_step=batches * run.settings.batch.size)
        run.stages = [Stage("only", config, draws, run.sizes)]
        return plan_memory(run, batch, captured=True).peak

    gradient = 4 * sum(weight.numel() for weight in run.model.parameters())
    assert peak(2) == peak(1) + gradient


def test_a_captured_step_takes_the_gaps_in_its_pool(tmp_path):
    mib = 2**20

    class Gaps(tiny.WideTask):
        def loss(self, model, batch, normalisers):
            first = torch.empty(12 * mib, dtype=torch.uint8, device=batch.points.device)
            second = torch.empty_like(first)
            del first, second  # two segments of 12 MiB: neither holds what comes
            torch.empty(16 * mib, dtype=torch.uint8, device=batch.points.device)
            return super().loss(model, batch, normalisers)

    run = wide_run(tmp_path, again=False, fused=True)
    batch = run.task.collate([run.train[0]], np.zeros(1, dtype=np.int64), [1.0])
    without = plan_memory(run, batch)
    run.task = Gaps()
    assert plan_memory(run, batch).peak == without.peak + (12 + 12 + 16) * mib
    launched, captured = (plan_memory(run, batch, captured=how) for how in (False, True))
    assert launched.activations == captured.activations == 24 * mib
    assert launched.gaps == 0
