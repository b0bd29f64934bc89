"""The cost of steps is measured on real steps and fitted; batches keep to what they were asked."""

import numpy as np
import pytest
import torch

from bevatron.data.dataset import InMemory
from bevatron.data.neighbours import add_neighbours
from bevatron.data.samples import unlabelled_structure
from bevatron.errors import ConfigError, OutOfMemoryError
from bevatron.models.mace import MACE, MaceConfig, MaceTask
from bevatron.recipes import bench
from bevatron.recipes.bench import capacity_curves, cost_model
from bevatron.recipes.mace import step_cost
from bevatron.recipes.mace.capacity import planned_ceiling
from bevatron.recipes.mace.step_cost import (
    StepCost,
    StepMeter,
    fit_cost,
    saturation,
)
from bevatron.task import Loss
from bevatron.train.capture.cuda_graphs import NotCapturableError


def cubes():
    """Cubes of 1, 8, 27 hydrogen atoms; the larger ones have more neighbours per atom."""
    samples = []
    for side in (1, 2, 3):
        grid = np.stack(np.meshgrid(*[np.arange(side)] * 3), axis=-1).reshape(-1, 3)
        sample = unlabelled_structure(np.ones(len(grid), int), 0.9 * grid.astype(float))
        sample["energy"] = np.array(-1.0)
        sample["forces"] = np.zeros((len(grid), 3))
        samples.append(add_neighbours(sample, 2.0))
    return InMemory(samples, "cube {}".format)


def make_meter():
    config = MaceConfig.preset(
        "small", num_channels=2, l_max=1, max_L=0, correlation=1, radial_mlp=(4,), r_max=2.0
    ).with_data(atomic_numbers=(1,), atomic_energies=((0.0,),), avg_num_neighbors=4.0)
    return StepMeter(MACE(config), MaceTask(), cubes(), torch.device("cpu"), torch.float32)


@pytest.fixture
def meter():
    return make_meter()


@pytest.fixture
def capturing(monkeypatch):
    """A meter that captures its steps, which on a CPU are padded and launched in the same way."""
    monkeypatch.setattr(step_cost, "obstacle", lambda *_: None)
    return make_meter()


def test_known_factors_are_found_again():
    factors = {"atoms": 3e-6, "edges": 2e-8, "graphs": 1e-5, "constant": 4e-3}
    generator = np.random.default_rng(0)
    costs = []
    for _ in range(12):
        sizes = {name: int(generator.integers(1, 5000)) for name in ("atoms", "edges", "graphs")}
        seconds = factors["constant"] + sum(factors[name] * n for name, n in sizes.items())
        costs.append(StepCost(sizes, seconds, 0))
    found, error = fit_cost(costs)
    assert found == pytest.approx(factors, rel=1e-6)
    assert error < 1e-9


@pytest.mark.parametrize(
    ("noise", "last"), [(0.0, "use it: --batch.cost atoms"), (0.9, "too large")]
)
def test_a_poor_fit_is_not_recommended(meter, monkeypatch, noise, last):
    costs = [
        StepCost({"atoms": n, "edges": (7 * n) % 11, "graphs": 1}, n * (1 + noise * (-1) ** n), 0)
        for n in range(1, 13)
    ]
    monkeypatch.setattr(bench, "_measured", lambda *_, **__: costs)
    monkeypatch.setattr(meter, "measure", lambda _: costs[0])
    _, lines = cost_model(meter)
    assert lines[-1].startswith(last)


def test_no_factor_is_negative_where_sizes_say_nothing():
    costs = [StepCost({"atoms": n, "edges": 40 * n, "graphs": 1}, 1.0 / n, 0) for n in (1, 2, 4, 8)]
    found, _ = fit_cost(costs)
    assert min(found.values()) >= 0


def test_too_few_measurements_are_refused():
    with pytest.raises(ConfigError, match="needs 4 measurements, got 1"):
        fit_cost([StepCost({"atoms": 1, "edges": 1, "graphs": 1}, 1.0, 0)])


@pytest.mark.parametrize(
    ("most", "sentence"),
    [(40, "batches are measured from 64 atoms on, got 40"), (64, "gave 2 measurements")],
)
def test_a_cost_model_of_batches_too_small_names_the_option(meter, most, sentence):
    with pytest.raises(ConfigError, match=f"--most: .*{sentence}"):
        cost_model(meter, most)


def test_a_curve_of_batches_too_small_names_the_option():
    with pytest.raises(ConfigError, match="--most: batches are measured from 64 atoms on, got 9"):
        capacity_curves({"float32": make_meter}, most=9)


def test_batches_of_as_many_atoms_are_one_point_of_the_curves():
    costs = [
        StepCost({"atoms": atoms}, time, 0) for atoms, time in ((100, 1.0), (50, 0.2), (100, 3.0))
    ]
    rates, times = (ax.lines[0] for ax in bench.capacity_picture({"float32": costs}).axes)
    assert rates.get_xydata().tolist() == [[50, 250], [100, 50]]
    assert times.get_xydata().tolist() == [[50, 200], [100, 2000]]


@pytest.mark.parametrize("capacity", [27, 30, 100])
def test_batches_keep_to_the_capacity(meter, capacity):
    for indices in (meter.densest_batch(capacity), meter.random_batch(capacity, seed=1)):
        assert 0 < meter.sizes["atoms"][indices].sum() <= capacity
    assert set(meter.densest_batch(capacity)) == {2}  # the densest cube, again and again


def test_random_batches_are_full_although_larger_samples_are_drawn_first(meter):
    for seed in range(20):
        batch = meter.random_batch(20, seed)
        assert 20 - 8 < meter.sizes["atoms"][batch].sum() <= 20


def test_curve_grows_and_measures_real_steps(meter):
    costs = list(saturation(meter, first=32, most=100))
    atoms = [cost.sizes["atoms"] for cost in costs]
    assert len(costs) >= 3
    assert all(size <= 100 for size in atoms)
    assert all(cost.seconds > 0 for cost in costs)


class Pairs(InMemory):
    """A data set, a batch and a task that know nothing of structures: 1 to 4 pairs of numbers."""

    collate = staticmethod(lambda samples, indices, weights: Pairs(samples))

    def __init__(self, samples):
        super().__init__(samples, "pairs {}".format)
        self.sizes = {
            "atoms": sum(len(sample["pairs"]) for sample in samples),
            "edges": 0,
            "graphs": len(samples),
        }

    def to(self, device, dtype, *, non_blocking=False):
        self.rows = torch.tensor(np.concatenate([sample["pairs"] for sample in self.samples])).to(
            device, dtype
        )
        return self

    def normalisers(self, batch):
        return {"rows": torch.tensor(float(batch.sizes["atoms"]))}

    def loss(self, model, batch, normalisers):
        return Loss(model(batch.rows).square().sum() / normalisers["rows"], {})


def test_steps_of_any_model_are_measured():
    lengths = np.array([1, 2, 3, 4])
    pairs = Pairs([{"pairs": np.ones((n, 2), np.float32)} for n in lengths])
    sizes = {"atoms": lengths, "edges": 0 * lengths}
    model = torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()
    meter = StepMeter(model, pairs, pairs, torch.device("cpu"), torch.float32, sizes)
    cost = meter.measure(np.array([0, 3]))
    assert cost.sizes == {"atoms": 5, "edges": 0, "graphs": 2}
    assert not torch.equal(model.weight, before)
    assert meter.random_batch(8, seed=0).max() < 4


def test_steps_are_captured_as_those_of_training_are(meter, capturing):
    assert not meter.captured
    before = [p.detach().clone() for p in capturing._run.model.parameters()]
    for indices in (np.array([0, 1, 2]), np.array([2, 2])):
        one, other = capturing.measure(indices), meter.measure(indices)
        assert capturing.captured
        assert one.sizes == other.sizes
        assert one.seconds > 0
    after = capturing._run.model.parameters()
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_steps_that_wait_are_launched(capturing, monkeypatch):
    def waits(*args, **kwargs):
        raise NotCapturableError("it waits")

    monkeypatch.setattr(step_cost.CapturedStep, "__call__", waits)
    assert capturing.measure(np.array([1])).sizes["atoms"] == 8
    assert not capturing.captured


def test_a_batch_without_room_is_one_sentence(meter, monkeypatch):
    def ends(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step_cost, "train_step", ends)
    with pytest.raises(OutOfMemoryError, match=r"^a batch of 9 atoms does not fit$"):
        meter.measure(np.array([0, 1]))


def test_a_full_batch_has_all_atoms_and_edges(meter):
    capacity = {"atoms": 200, "edges": 4000}
    batch = meter.full_batch(capacity)
    assert meter.sizes["atoms"][batch].sum() > 173
    assert meter.sizes["edges"][batch].sum() >= 4000


@pytest.mark.parametrize("captured", [False, True])
def test_what_a_batch_adds_to_the_memory_is_planned(meter, captured):
    meter.captured = captured
    stays, added = meter.planned(meter.densest_batch(270))
    again, more = meter.planned(meter.densest_batch(2700))
    assert again == pytest.approx(stays, rel=0.01)
    assert 7 * added < more < 12 * added
    ceiling = planned_ceiling(meter, stays + more)
    assert ceiling == pytest.approx(2700, rel=0.05)
