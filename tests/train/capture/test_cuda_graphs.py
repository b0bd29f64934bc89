"""Captured steps on a GPU give what launched ones give."""

import pytest
import tiny
import torch
from test_captured_step import (
    assert_same_steps,
    equal,
    of_one_element,
    prepared,
    stepped,
    weights_of,
)
from test_mace import make_run

from bevatron import kernels
from bevatron.data.processes import own_cpus
from bevatron.errors import ConfigError, DivergenceError
from bevatron.models.mace import LossConfig, MaceTask
from bevatron.parallel.mesh import Mesh
from bevatron.train.capture import step_graphs, transfers
from bevatron.train.capture.cuda_graphs import GraphPool, NotCapturableError
from bevatron.train.capture.step import CapturedStep, obstacle
from bevatron.train.loop import fit
from bevatron.train.step import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_work_is_replayed_on_new_numbers():
    pool = GraphPool(torch.device("cuda"))
    source, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")

    def work() -> None:
        total.copy_(source * 2)

    replay = pool.capture(work)
    source.fill_(5.0)
    replay()
    assert total.tolist() == [10.0] * 3


SECOND = 2_000_000_000
"""Clock cycles of a GPU, about."""


@pytest.mark.skipif(own_cpus() < 2, reason="kernels are compiled ahead by other processes")
def test_rehearsed_work_comes_between_what_is_launched_before_and_after_it():
    pool = GraphPool(torch.device("cuda"))
    values, seen = torch.zeros(9, device="cuda"), []

    def work() -> None:
        seen.append(values * 2)
        torch.cuda._sleep(SECOND // 2)
        values.add_(1)

    # Twice: the first launch of a kernel loads it, and the first memory is allocated, which waits.
    for expected in ([2.0, 4.0], [10.0, 12.0]):
        torch.cuda.synchronize()
        seen.clear()
        torch.cuda._sleep(SECOND)
        values.fill_(expected[0] / 2)
        pool.compile_ahead(work, print)
        seen.append(values * 2)
        assert [one.tolist() for one in seen] == [[each] * 9 for each in expected]


def test_work_that_waits_is_refused_and_harms_nothing():
    pool = GraphPool(torch.device("cuda"))
    values = torch.ones(3, device="cuda")
    with pytest.raises(NotCapturableError, match="it waits for the GPU in"):
        pool.capture(lambda: values.sum().item())
    assert pool.capture(lambda: values.add_(1)) is not None


def test_work_that_is_refused_comes_before_what_is_launched_after_it():
    pool = GraphPool(torch.device("cuda"))
    values = torch.zeros(9, device="cuda")

    def work() -> None:
        torch.cuda._sleep(SECOND // 2)
        values.add_(1)
        values.sum().item()

    # Twice: the first launch of a kernel loads it, and the first memory is allocated, which waits.
    for expected in (4.0, 8.0):
        with pytest.raises(NotCapturableError):
            pool.capture(work)
        seen = values * 2
        assert seen.tolist() == [expected] * 9


MESH = Mesh(device=torch.device("cuda"))
ONE = {"one_element": True}


@pytest.mark.parametrize(("dtype", "rel"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("implementation", ["reference", "auto"])
def test_captured_steps_equal_launched_ones(tmp_path, monkeypatch, dtype, rel, implementation):
    settings = {"train": {"dtype": dtype}, **(ONE if implementation == "reference" else {})}
    with kernels.use(implementation):
        expected = stepped(tmp_path, "plain", MESH, **settings)
        found = stepped(tmp_path, "captured", MESH, **settings)
        monkeypatch.setattr(transfers, "SMALL_BATCH", 0)  # batches come on a stream of their own
        beside = stepped(tmp_path, "captured", MESH, **settings)
    assert_same_steps(found, expected, rel)
    assert_same_steps(beside, expected, rel)


@pytest.mark.own_process  # to read memory that is not mapped any more ends it
def test_memory_of_a_graph_that_still_runs_is_not_given_back(tmp_path, monkeypatch):
    class Slow(MaceTask):
        def loss(self, *args):
            torch.cuda._sleep(100_000_000)
            return super().loss(*args)

    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    # As shapes of drawn batches come: one after the other, each in place of the one before.
    monkeypatch.setattr(step_graphs, "memory_limit", lambda _: 1)
    groups = [[0], [*range(10)], [*range(10)] * 4]
    run, state = prepared(tmp_path, MESH)
    expected = [
        train_step(run, state, state.model, [tiny.batch_of(run, group)], lr=0.01, mesh=MESH).loss
        for group in groups
    ]
    run, state = prepared(tmp_path, MESH, task=Slow())
    step = CapturedStep(run, state, MESH)
    found, launched = [], step([tiny.batch_of(run, groups[0])], lr=0.01)
    for group in groups[1:]:
        following = step([tiny.batch_of(run, group)], lr=0.01)
        found.append(launched.result().loss)
        launched = following
    assert [*found, launched.result().loss] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", ["weighted", "universal"])
def test_stress_and_all_losses_can_be_captured(tmp_path, kind):
    loss = LossConfig(kind=kind, stress_weight=1.0)
    with kernels.use("reference"):
        figures, _ = stepped(tmp_path, "captured", MESH, task=MaceTask(loss), **ONE)
    assert all(torch.isfinite(torch.tensor(one.loss)) for one in figures)


def test_a_gradient_that_is_no_number_spoils_nothing(tmp_path):
    with kernels.use("reference"):
        run, state = prepared(tmp_path, MESH, **ONE)
        step = CapturedStep(run, state, MESH)
        step([tiny.batch_of(run, [0, 1, 2])], lr=0.01).result()
        before = weights_of(state)
        bad = tiny.batch_of(run, [3, 4])
        bad.energy[0] = float("inf")
        launched = step([bad], lr=0.01)
        later = step([tiny.batch_of(run, [5, 6])], lr=0.01)
        torch.cuda.synchronize()
        assert equal(weights_of(state), before)
        with pytest.raises(DivergenceError, match="molecule 3; molecule 4"):
            launched.result()
        with pytest.raises(DivergenceError):
            later.result()


def test_nothing_is_in_the_way_of_capturing(tmp_path):
    run, state = prepared(tmp_path, MESH)
    assert obstacle(run, state, MESH) is None
    run, state = prepared(tmp_path, MESH, train={"compile": True})
    assert obstacle(run, state, MESH) == "train.compile is on"


def test_a_run_with_captured_steps_has_the_losses_of_a_plain_one(tmp_path):
    losses = {}
    for name, captured in (("plain", False), ("captured", True)):
        train = {"epochs": 3, "device": "cuda", "dtype": "float64", "cuda_graphs": captured}
        optim = {"ema": 0.9, "accumulate": 2}
        run = make_run(tmp_path / name, train=train, optim=optim, checkpoint={"every_steps": 2})
        with kernels.use("reference"):
            fit(of_one_element(run))
        losses[name] = tiny.losses(tmp_path / name)
    assert losses["captured"] == pytest.approx(losses["plain"], rel=1e-9)


def test_a_model_that_waits_is_trained_without_capturing(tmp_path):
    train = {"epochs": 1, "device": "cuda", "dtype": "float64"}
    with kernels.use("reference"):
        fit(make_run(tmp_path, train=train))
    log = (tmp_path / "log.txt").read_text()
    assert "steps are not captured as CUDA graphs: it waits for the GPU in" in log
    with kernels.use("reference"), pytest.raises(ConfigError, match=r"train.cuda_graphs: no step"):
        fit(make_run(tmp_path / "asked", train={**train, "cuda_graphs": True}))
