"""Steps over padded batches whose figures are read later; on a CPU the same without capture."""

import dataclasses
import os
import signal
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file
from test_mace import make_run

from bevatron.data.packing.draws import Draws, Source
from bevatron.errors import ConfigError, DivergenceError
from bevatron.models.mace import MACE, LossConfig, MaceTask
from bevatron.models.mace.losses import StageTwo
from bevatron.parallel.groups import Group, Pending
from bevatron.parallel.mesh import Mesh
from bevatron.train.capture import cuda_graphs, step_graphs
from bevatron.train.capture.prediction import CapturedPrediction
from bevatron.train.capture.step import CapturedStep, obstacle
from bevatron.train.logger import read_journal
from bevatron.train.loop import begin_state, fit
from bevatron.train.run import BesideGraphs, Stage
from bevatron.train.settings import StageConfig
from bevatron.train.step import train_step

MESH = Mesh()
OPTIM = {"ema": 0.9, "clip": 1.0}
GROUPS = ([[0, 1, 2]], [[3, 4], [5, 6]], [[7, 8, 9]], [[9, 1], [2, 4, 6]])
LEARNING_RATES = (0.01, 0.02, 0.005, 0.01)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Let runs on a CPU take the captured step."""
    from bevatron.train.capture import step as captured_step

    monkeypatch.setattr(captured_step, "obstacle", lambda *_: None)


def prepared(folder: Path, mesh=MESH, *, one_element=False, **groups):
    """A run and its state, fresh; perhaps of a single element, whose atoms need no sorting."""
    run = make_run(folder, **{"optim": OPTIM, **groups})
    if one_element:
        of_one_element(run)
    return run, begin_state(run, mesh, None)


def of_one_element(run):
    """Make a run's atoms all hydrogen and its model to match."""
    for sample in run.train.samples:
        sample["atomic_numbers"] = np.ones_like(sample["atomic_numbers"])
    torch.manual_seed(2)
    energies = ((-1.0,),)
    run.model = MACE(
        dataclasses.replace(run.model.config, atomic_numbers=(1,), atomic_energies=energies)
    )
    return run


def stepped(folder, step_kind, mesh=MESH, **settings):
    """Figures of some steps and the state after them."""
    accumulate = {"optim": {**OPTIM, "accumulate": 2}}
    run, state = prepared(folder, mesh, **{**accumulate, **settings})
    captured = CapturedStep(run, state, mesh) if step_kind == "captured" else None
    figures, waiting = [], []
    for whole, lr in zip(GROUPS, LEARNING_RATES, strict=True):
        group = whole[: run.settings.optim.accumulate]
        batches = [tiny.batch_of(run, one) for one in group]
        if captured is None:
            figures.append(train_step(run, state, state.model, batches, lr=lr, mesh=mesh))
            continue
        waiting.append(captured(batches, lr=lr))
        if len(waiting) > 1:
            figures.append(waiting.pop(0).result())
    figures += [one.result() for one in waiting]
    return figures, state


def assert_same_steps(found, expected, rel):
    """Both are what `stepped` returns."""
    for one, other in zip(found[0], expected[0], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=rel)
        assert one.terms == pytest.approx(other.terms, rel=rel)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=rel)
        assert one.sizes == other.sizes
    state, plain = found[1], expected[1]
    assert state.ema.updates == plain.ema.updates
    for one, other in zip(state.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=10 * rel, atol=rel)
    for name, average in plain.ema.averages.items():
        assert torch.allclose(state.ema.averages[name], average, rtol=10 * rel, atol=rel)


@pytest.mark.parametrize(("accumulate", "clip_norm"), [(2, "global"), (2, "tensor"), (1, "global")])
def test_padded_steps_and_those_of_the_fused_optimiser_equal_torchs(
    tmp_path, accumulate, clip_norm
):
    optim = {**OPTIM, "accumulate": accumulate, "clip_norm": clip_norm}
    plain = stepped(tmp_path, "plain", optim=optim)
    for kind, fused in (("captured", False), ("launched", True)):
        found = stepped(tmp_path, kind, optim={**optim, "fused": fused})
        assert_same_steps(found, plain, 1e-11)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_of_one_batch_is_captured_once(tmp_path, monkeypatch, accumulate):
    made = []

    class Counting(step_graphs.GraphPool):
        def capture(self, work, warm_up=None):
            replay = super().capture(work, warm_up)
            return lambda: (made.append(work.__name__), replay())

    monkeypatch.setattr(step_graphs, "GraphPool", Counting)
    run, state = prepared(tmp_path, optim={**OPTIM, "accumulate": accumulate})
    step = CapturedStep(run, state, MESH)
    for group in ([0, 1, 2], [3, 4]):
        step([tiny.batch_of(run, group)], lr=0.01).result()
    assert made == [["step"], ["gradients", "_finish"]][accumulate - 1] * 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_capture_warms_up_with_leaves_no_gradient(tmp_path, monkeypatch, accumulate):
    class Warming(step_graphs.GraphPool):
        def capture(self, work, warm_up=None):
            if warm_up is not None:
                warm_up()
            return work

    expected = stepped(tmp_path, "captured", optim={**OPTIM, "accumulate": accumulate})
    monkeypatch.setattr(step_graphs, "GraphPool", Warming)
    # Of weight one, which only batches of drawn samples are otherwise.
    monkeypatch.setattr(CapturedStep, "_smallest_batch", lambda step: tiny.batch_of(step.run, [0]))
    found = stepped(tmp_path, "captured", optim={**OPTIM, "accumulate": accumulate})
    assert_same_steps(found, expected, 0.0)


def weights_of(state):
    model = [p.detach().clone() for p in state.model.parameters()]
    moments = [v.clone() for m in state.optimizer.state.values() for v in m.values()]
    return model + moments + [a.clone() for a in state.ema.averages.values()]


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Poisoned(MaceTask):
    """A task whose loss is not a number for a certain batch."""

    poison = False

    def loss(self, model, batch, normalisers):
        found = super().loss(model, batch, normalisers)
        bad = (batch.energy == 1234.5).any()
        return type(found)(found.total * torch.where(bad, float("nan"), 1.0), found.terms)


def test_a_launched_step_of_the_fused_optimiser_that_diverges_changes_nothing(tmp_path):
    run, state = prepared(tmp_path, task=Poisoned(), optim={**OPTIM, "fused": True})
    before = weights_of(state)
    bad = tiny.batch_of(run, [3, 4])
    bad.energy[0] = 1234.5
    with pytest.raises(DivergenceError, match="molecule 3; molecule 4"):
        train_step(run, state, state.model, [bad], lr=0.01, mesh=MESH)
    assert equal(weights_of(state), before)
    train_step(run, state, state.model, [tiny.batch_of(run, [0, 1])], lr=0.01, mesh=MESH)
    assert not equal(weights_of(state), before)


def test_a_loss_that_is_no_number_stops_all_later_updates(tmp_path):
    run, state = prepared(tmp_path, task=Poisoned())
    step = CapturedStep(run, state, MESH)
    step([tiny.batch_of(run, [0, 1, 2])], lr=0.01).result()
    before = weights_of(state)
    bad = tiny.batch_of(run, [3, 4])
    bad.energy[0] = 1234.5
    launched = step([bad], lr=0.01)
    # The next step is launched before anybody has looked at this one.
    later = step([tiny.batch_of(run, [5, 6])], lr=0.01)
    assert equal(weights_of(state), before)
    with pytest.raises(DivergenceError, match=r"loss became nan .*molecule 3; molecule 4"):
        launched.result()
    with pytest.raises(DivergenceError):
        later.result()


def test_an_exploded_loss_changes_nothing(tmp_path):
    run, state = prepared(tmp_path, train={"explode_factor": 10.0})
    state.progress.loss_steps, state.progress.loss_average = 50, 1e-9
    step = CapturedStep(run, state, MESH)
    before = [p.detach().clone() for p in state.model.parameters()]
    launched = step([tiny.batch_of(run, [0, 1])], lr=0.01)
    assert equal([p.detach() for p in state.model.parameters()], before)
    with pytest.raises(DivergenceError, match="rose to"):
        launched.result()


def test_the_second_stage_has_its_own_weights(tmp_path):
    loss = LossConfig(stage_two=StageTwo(start_epoch=1, energy_weight=500.0, forces_weight=2.0))
    run, state = prepared(tmp_path, task=MaceTask(loss))
    step, batch = CapturedStep(run, state, MESH), tiny.batch_of(run, [0, 1, 2])
    run.task.begin_epoch(0)
    first = step([batch], lr=1e-9).result()
    run.task.begin_epoch(1)
    second = step([batch], lr=1e-9).result()
    ratio = 500.0 / loss.energy_weight
    assert second.terms["energy"] == pytest.approx(ratio * first.terms["energy"], rel=1e-4)


def test_shapes_are_kept_while_they_fit(tmp_path):
    run, state = prepared(tmp_path)
    step = CapturedStep(run, state, MESH)
    ones = np.ones(2)
    large = [(np.array([0, 1]), ones), (np.array([2, 3]), ones), (np.array([5, 6]), ones)]
    line = step.plan(large)
    assert "steps are captured" in line
    shapes = step.buckets.shapes
    assert step.plan(large[:1]) is None
    assert step.buckets.shapes == shapes
    assert step.plan([(np.arange(10), np.ones(10))]) is not None
    assert step.plan([]) is None
    # A batch that no plan knew of gets a shape of its own.
    step([tiny.batch_of(run, list(range(10)) * 12)], lr=0.01).result()


def test_all_shapes_are_captured_by_the_first_step_so_that_no_later_one_stalls(tmp_path):
    run, state = prepared(tmp_path)
    step = CapturedStep(run, state, MESH)
    small, large = np.array([0]), np.tile(np.arange(10), 12)
    step.plan([(small, np.ones(1)), (large, np.ones(120))])
    assert len(step.buckets.shapes) == 2
    step([tiny.batch_of(run, small)], lr=1e-9).result()
    assert {key for key, _ in step._graphs._graphs} == set(step.buckets.shapes)
    step._graphs._capture = pytest.fail
    step([tiny.batch_of(run, large)], lr=1e-9).result()


def test_the_time_of_a_capture_is_counted_apart(tmp_path, monkeypatch, on_a_cpu):
    def slowly(self, work, warm_up=None):
        time.sleep(0.05)
        return work

    monkeypatch.setattr(cuda_graphs.GraphPool, "capture", slowly)
    fit(make_run(tmp_path, optim=OPTIM, train={"epochs": 2}))
    records = list(read_journal(tmp_path / "metrics.jsonl"))
    steps = [record for record in records if record["kind"] == "step"]
    first, second = steps[0]["time"], steps[1]["time"]
    assert first["capture"] >= 0.05  # at least one shape
    assert "capture" not in second
    rate = steps[0]["sizes"]["atoms"] / (first["seconds"] - first["capture"])
    assert first["atoms_per_s"] == pytest.approx(rate)
    epochs = [record["time"] for record in records if record["kind"] == "epoch"]
    assert epochs[0]["capture"] == pytest.approx(first["capture"])
    assert "capture" not in epochs[1]


def test_why_steps_are_not_captured_is_said(tmp_path):
    run, state = prepared(tmp_path)
    assert obstacle(run, state, MESH) == "the device is cpu"


def test_the_optimiser_can_be_taken_back(tmp_path):
    run, state = prepared(tmp_path)
    step = CapturedStep(run, state, MESH)
    step([tiny.batch_of(run, [0, 1])], lr=0.01).result()
    step.release()
    result = train_step(run, state, state.model, [tiny.batch_of(run, [2])], lr=0.01, mesh=MESH)
    assert np.isfinite(result.loss)


def test_a_run_read_one_step_late_has_the_records_of_a_plain_one(tmp_path, on_a_cpu):
    optim = {**OPTIM, "accumulate": 2}
    fit(make_run(tmp_path / "plain", optim=optim, train={"cuda_graphs": False}))
    fit(make_run(tmp_path / "late", optim=optim))
    plain, late = tiny.records(tmp_path / "plain"), tiny.records(tmp_path / "late")
    assert [r["kind"] for r in late] == [r["kind"] for r in plain]
    for one, other in zip(late, plain, strict=True):
        assert one["step"] == other["step"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-11)
        assert one["lr"] == other["lr"]
        assert one["sizes"] == other["sizes"]
    assert "batches padded to" in (tmp_path / "late" / "log.txt").read_text()


def test_a_run_read_one_step_late_can_be_stopped_and_resumed(tmp_path, on_a_cpu):
    class Stopping(MaceTask):
        calls = 0

        def normalisers(self, batch):
            self.calls += 1
            if self.calls == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().normalisers(batch)

    fit(make_run(tmp_path / "whole", optim=OPTIM, checkpoint={"every_steps": 2}))
    stopped = fit(make_run(tmp_path / "cut", optim=OPTIM, task=Stopping()))
    assert stopped.stopped_by == "SIGTERM"
    again = make_run(tmp_path / "cut", optim=OPTIM)
    again.resume = True
    fit(again)
    assert tiny.losses(tmp_path / "cut") == tiny.losses(tmp_path / "whole")


def test_a_run_that_diverges_keeps_the_weights_from_before(tmp_path, on_a_cpu):
    run = make_run(tmp_path, optim=OPTIM, checkpoint={"every_steps": 1}, train={"epochs": 3})
    run.train.samples[9]["energy"] = np.array(np.inf)
    with pytest.raises(DivergenceError, match="loss became inf"):
        fit(run)
    for path in tmp_path.rglob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert not tensor.is_floating_point() or torch.isfinite(tensor).all(), name


def test_a_drawn_batch_is_padded_to_its_own_size_whatever_came_before(tmp_path):
    run, state = prepared(tmp_path, one_element=True)
    run.stages = ("a stage",)
    step = CapturedStep(run, state, MESH)
    large, small = tiny.batch_of(run, [*range(10)] * 4), tiny.batch_of(run, [0])
    shapes = [step._key_of(batch) for batch in (large, small, large)]
    assert shapes[1] < shapes[0] == shapes[2]


def test_asking_for_what_cannot_be_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"train.cuda_graphs: .* the device is cpu"):
        fit(make_run(tmp_path, train={"cuda_graphs": True}))


LENGTHS = [(length,) for length in range(20)]


class Growing(step_graphs.GraphPool):
    """A pool that grows by a gigabyte with each capture."""

    captured = 0

    def capture(self, work, warm_up=None):
        Growing.captured += 1
        self.grown += 2**30
        return super().capture(work, warm_up)


@pytest.fixture
def graphs(tmp_path, monkeypatch):
    """Graphs of drawn batches whose pool grows, and what feeds them a batch of some length."""

    def make(limit):
        monkeypatch.setattr(step_graphs, "GraphPool", Growing)
        monkeypatch.setattr(step_graphs, "memory_limit", lambda _: limit * 2**30)
        run, state = prepared(tmp_path)
        optimizer = CapturedStep(run, state, MESH)._update
        made = step_graphs.StepGraphs(run, state, MESH, optimizer, 2, patience=1)
        batch = tiny.batch_of(run, [0, 1])
        made.begin(None, batch, run.task.normalisers(batch), lines.append)
        monkeypatch.setattr(made, "_gradients", lambda *_: None)  # which graph runs is what counts

        def step(length):
            made.feed(batch, length, ())
            made.add_gradients(0, length, ())

        Growing.captured = 0
        return made, step

    lines = []
    make.lines = lines
    return make


class Two(Group):
    """A process of two that share samples, the other of which says numbers in turn."""

    def __init__(self, *others):
        super().__init__([0, 1], 0)
        self.others = iter(others)

    def all_reduce(self, values, operation="sum"):
        other = torch.tensor(next(self.others))
        return Pending(values + other if operation == "sum" else torch.maximum(values, other))


@pytest.mark.parametrize(("limit", "of_other", "grown"), [(20, 2, 0), (2, 20, 0), (3, 3, 1.5)])
def test_processes_that_share_samples_keep_the_same_graphs(
    graphs, monkeypatch, limit, of_other, grown
):
    """By the smaller of two GPUs, and by the process whose graph is larger."""
    said = -of_other * 2**30, *[int(grown * 2**30)] * 3
    group = Two(*said)
    monkeypatch.setattr(step_graphs, "sample_group", lambda: group)
    made, step = graphs(limit)
    for length in LENGTHS[:3]:
        for _ in range(3):
            step(length)
    assert (made.num_launched, made.num_replayed) == (5, 4)


def test_after_the_first_pass_over_twenty_lengths_all_steps_are_replayed(graphs):
    made, step = graphs(limit=20)
    random = np.random.default_rng(0)
    for _ in range(4):
        for place in random.permutation(20):
            step(LENGTHS[place])
    assert (made.num_launched, made.num_replayed, Growing.captured) == (20, 60, 20)
    assert graphs.lines == []


def test_a_length_that_is_seen_once_is_not_captured(graphs):
    made, step = graphs(limit=20)
    for length in (*LENGTHS, LENGTHS[3]):
        step(length)
    assert (made.num_launched, made.num_replayed, Growing.captured) == (20, 1, 1)


def test_a_graph_that_is_no_longer_used_makes_room_for_another(graphs):
    made, step = graphs(limit=2)
    a, b, c = LENGTHS[:3]
    for length in (a, a, b, b, *[a] * (2 * step_graphs.ROUNDS_UNUSED + 1)):
        step(length)
    for length in (c, c):  # b is dropped for it
        step(length)
    assert Growing.captured == 3
    step(a)
    assert Growing.captured == 3
    step(b)  # as a new one
    assert (Growing.captured, made.num_launched) == (3, 4)
    assert len(graphs.lines) == 1
    assert "hold 2.0 GiB, as much as they may" in graphs.lines[0]


def test_lengths_that_do_not_all_fit_are_not_captured_again_and_again(graphs):
    made, step = graphs(limit=5)
    random = np.random.default_rng(0)
    for _ in range(20):
        for place in random.permutation(20):
            step(LENGTHS[place])
    assert Growing.captured == 6  # the sixth finds that it is one too many
    assert made.num_replayed == 5 * 19
    assert len(graphs.lines) == 1


def test_a_pool_that_has_grown_through_graphs_since_dropped_is_given_back(graphs):
    made, step = graphs(limit=2)
    pools = set()
    for length in LENGTHS:
        for _ in range(2 * step_graphs.ROUNDS_UNUSED + 2):
            step(length)
        pools.add(made._pool)
        assert made._pool.grown <= 5 * 2**30
    assert len(pools) >= 4


def test_a_capture_that_lacks_memory_is_tried_again_without_the_activations_of_the_first(
    graphs, monkeypatch
):
    made, step = graphs(limit=100)
    step(LENGTHS[0]), step(LENGTHS[0])
    captured, kept = Growing.capture, []

    def lacking(pool, work, warm_up=None):
        if kept:
            assert kept[0]() is None
            return captured(pool, work, warm_up)
        activations = torch.zeros(3)
        kept.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Growing, "capture", lacking)
    step(LENGTHS[1]), step(LENGTHS[1])
    assert len(kept) == 1
    assert [key for key, _ in made._graphs] == [LENGTHS[1]]
    assert made._graphs[LENGTHS[1], ()].size is not None


def test_what_is_launched_beside_graphs_is_set_up_to_spare_memory(graphs, monkeypatch):
    class Warming(Growing):
        def capture(self, work, warm_up=None):
            if warm_up is not None:
                warm_up()
            return super().capture(work, warm_up)

    made, step = graphs(limit=9)
    monkeypatch.setattr(made, "_pool", Warming(MESH.device))
    policies, now = [], ["usual"]
    monkeypatch.setattr(made, "_gradients", lambda *_: policies.append(*now))

    def set_up(policy):
        return lambda model: now.__setitem__(0, policy)

    draws = Draws([Source("some", range(3))], seed=0)
    beside = BesideGraphs(set_up("spare"), graph_bytes=2**30)
    made._stages = [Stage("first", StageConfig(9, 1), draws, {}, set_up("usual"), beside)]
    a, b = LENGTHS[:2]
    for length in (a, a, a, b, b):
        step(length)
    # A launch, a warm-up and two replays; a launch, a warm-up, and no room for a second graph.
    assert policies == ["spare", "spare", "usual", "usual", "spare", "spare", "spare"]
    assert now == ["usual"]
    assert "hold 1.0 GiB" in graphs.lines[0]


def test_terms_of_the_loss_may_differ_from_choice_to_choice(tmp_path, monkeypatch):
    run, state = prepared(tmp_path)
    captured, batch = CapturedStep(run, state, MESH), tiny.batch_of(run, [0, 1])
    loss = run.task.loss

    def fewer(*given):
        found = loss(*given)
        return dataclasses.replace(found, terms={"energy": found.terms["energy"]})

    def step(choice):
        monkeypatch.setattr(run.task, "loss", loss if choice == "all" else fewer)
        return captured([batch], lr=0.0, choice=choice).result().terms

    first, few, again = step("all"), step("few"), step("all")
    assert set(first) > {"energy"} == set(few)
    assert first == again
    assert few["energy"] == first["energy"]


def test_a_loss_of_too_many_terms_is_not_captured(tmp_path, monkeypatch):
    run, state = prepared(tmp_path)
    captured, loss = CapturedStep(run, state, MESH), run.task.loss

    def more(*given):
        found = loss(*given)
        return dataclasses.replace(found, terms={f"term {n}": found.total for n in range(17)})

    monkeypatch.setattr(run.task, "loss", more)
    weights = [weight.clone() for weight in state.model.parameters()]
    with pytest.raises(
        cuda_graphs.NotCapturableError, match="17 terms, a captured step takes at most 16"
    ):
        captured([tiny.batch_of(run, [0, 1])], lr=0.1)
    assert all(map(torch.equal, weights, state.model.parameters()))


def test_a_captured_prediction_is_of_the_model_that_is_asked():
    class Sums:
        def predict(self, model, batch):
            return {"sum": model(batch).sum()}

    predict, batch = CapturedPrediction(Sums(), torch.device("cpu")), torch.ones(1, 2)
    models = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
    for model in (*models, *models[::-1]):
        for _ in range(2):
            assert predict(model, batch)["sum"] == model(batch).sum()
