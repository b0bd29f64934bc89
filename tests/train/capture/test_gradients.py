"""Gradients of captured work: in one flat buffer, bucket by bucket as they become ready."""

import pytest
import tiny
import torch

from bevatron.parallel import data_parallel
from bevatron.parallel.mesh import Mesh
from bevatron.train.capture import gradients
from bevatron.train.capture.cuda_graphs import GraphPool
from bevatron.train.capture.gradients import GradientBuckets
from bevatron.train.capture.step import CapturedStep
from bevatron.train.capture.step_graphs import StepGraphs
from bevatron.train.loop import begin_state
from bevatron.train.memory_plan import LiveBytes
from bevatron.train.optim import FusedAdamEMA


def test_buckets_are_noted_as_they_are_completed_and_gradients_add_up(monkeypatch):
    """The layer that is defined last is the first; one has no part and one is used twice."""
    monkeypatch.setattr(data_parallel, "BUCKET_BYTES", 100)
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4)).double()
    optimizer = FusedAdamEMA(layers.parameters())
    buckets = GradientBuckets(optimizer, Mesh())
    expected = None
    for x in torch.randn(2, 3, 4, dtype=torch.float64):
        loss = layers[1](layers[0](layers[0](layers[3](x).tanh()).tanh())).square().sum()
        found = torch.autograd.grad(
            loss, [*layers.parameters()], retain_graph=True, materialize_grads=True,
            allow_unused=True,
        )  # fmt: skip
        expected = (
            found if expected is None else [a + b for a, b in zip(found, expected, strict=True)]
        )
        buckets.differentiate(loss)
    assert buckets._noted == [1, 0, 4, 2, 3]
    for one, other in zip(optimizer.gradients, expected, strict=True):
        assert torch.equal(one, other)
    assert not layers[0].weight._backward_hooks


def test_gradients_do_not_wait_for_the_last_of_a_bucket(monkeypatch):
    """Of five of 128 bytes in one bucket two or fewer wait."""
    monkeypatch.setattr(gradients, "WAITING_BYTES", 256)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(5)).double()
    optimizer = FusedAdamEMA(layers.parameters())
    buckets, added, add = GradientBuckets(optimizer, Mesh()), [], torch._foreach_add_

    def noted(own, others):
        added.append(len(own))
        add(own, others)

    monkeypatch.setattr(torch, "_foreach_add_", noted)
    loss = torch.nn.Sequential(*layers)(torch.randn(3, 4, dtype=torch.float64)).square().sum()
    expected = torch.autograd.grad(loss, [*layers.parameters()], retain_graph=True)
    buckets.differentiate(loss)
    assert (added, buckets._noted) == ([2, 2, 1], [0])
    for one, other in zip(optimizer.gradients, expected, strict=True):
        assert torch.equal(one, other)


def test_a_gradient_of_other_strides_is_added_apart(monkeypatch):
    """One among all would make torch launch a kernel for each of all."""
    torch.manual_seed(0)
    parts = [torch.nn.Parameter(torch.randn(3, n)) for n in (2, 4)]
    whole = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = FusedAdamEMA([whole[0], *parts, whole[1]])
    calls, add = [], torch._foreach_add_

    def noted(own, others):
        calls.append({a.stride() == b.stride() for a, b in zip(own, others, strict=True)})
        add(own, others)

    monkeypatch.setattr(torch, "_foreach_add_", noted)
    loss = (whole[0] * whole[1] * torch.cat(parts, 1).square().sum(1)).sum()
    expected = torch.autograd.grad(loss, optimizer.parameters, retain_graph=True)
    GradientBuckets(optimizer, Mesh()).differentiate(loss)
    assert sorted(calls, key=str) == [{False}, {True}]
    for one, other in zip(optimizer.gradients, expected, strict=True):
        assert torch.equal(one, other)


class Done:
    def wait(self):
        pass


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sums_beside_a_replay_wait_for_the_buckets_of_this_replay(monkeypatch, device):
    """The third replay is long under way when sums of its gradients are asked for."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(data_parallel, "BUCKET_BYTES", 100)
    monkeypatch.setattr(gradients, "broadcast_json", lambda noted, _: noted)
    summed = []

    def all_reduce(piece, **_):
        summed.append(piece.sum())
        return Done()

    monkeypatch.setattr(gradients.distributed, "all_reduce", all_reduce)
    weight = torch.nn.Parameter(torch.zeros(40, device=device))
    other = torch.nn.Parameter(torch.zeros(40, device=device))
    optimizer = FusedAdamEMA([weight, other])
    buckets = GradientBuckets(optimizer, Mesh(world=2, device=torch.device(device)))

    def work():
        if device == "cuda":
            torch.cuda._sleep(10**8)
        buckets.differentiate(weight.sum() + 2 * other.sum())

    replay = GraphPool(torch.device(device)).capture(work)
    for number in range(3):
        optimizer.gradient.zero_()
        summed.clear()
        replay()
        buckets.sum()
        if device == "cuda":
            torch.cuda.synchronize()
        assert sorted(float(x) for x in summed) == [40.0, 80.0], number


def test_a_rehearsal_holds_no_more_gradients_than_a_step_and_leaves_none(tmp_path, monkeypatch):
    """The kernel that forgets them may be left out of it, as all of Triton's are."""
    monkeypatch.setattr(gradients, "WAITING_BYTES", 2**20)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(24)))
    run = tiny.make_run(tmp_path, model=model, task=tiny.WideTask(), train={"dtype": "float32"})
    state, batch = begin_state(run, Mesh(), None), tiny.batch_of(run, [0])
    update = CapturedStep(run, state, Mesh())._update
    graphs = StepGraphs(run, state, Mesh(), update, rows=1)
    graphs.begin(None, batch, run.task.normalisers(batch), lambda _: None)
    monkeypatch.setattr(FusedAdamEMA, "warm_up", lambda self: None)
    with LiveBytes() as live:
        live.note([*model.parameters(), update.gradient])
        before = live.now
        graphs._rehearse(batch)
    assert live.peak - before < 3 * 2**20  # a quarter of a MiB each, 6 together
    assert not update.gradient.any()
