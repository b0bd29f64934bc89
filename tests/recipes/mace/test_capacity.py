"""A run that chooses its batches: nearly the highest rate, many steps an epoch, never too large."""

import contextlib
import itertools
import json

import numpy as np
import pytest
import torch

from bevatron.errors import ConfigError, OutOfMemoryError
from bevatron.parallel.mesh import Mesh
from bevatron.recipes.mace import capacity as module
from bevatron.recipes.mace.capacity import (
    capacity_of_run,
    choose_capacity,
    find_capacity,
    largest_capacity,
    measured_rates,
    rate_share,
    smallest_near_highest,
    unmeasured_capacity,
)
from bevatron.recipes.mace.step_cost import StepCost, StepMeter
from bevatron.train.memory_plan import NotPlannableError
from bevatron.train.settings import TrainConfig


class Sizes:
    """The sizes of many structures: a few of 1 and 8 atoms, most of 27, with denser larger ones."""

    def __init__(self, number):
        atoms = np.resize([27, 27, 8, 27, 1], number).astype(np.int64)
        self.sizes = {"atoms": atoms, "edges": atoms * (atoms // 2)}


class Memory(StepMeter):
    """A meter of a GPU whose steps take a known time and memory."""

    of_atom, of_edge, constant = 100.0, 3.0, 5000.0
    seconds, seconds_per_atom = 1e-3, 1e-6
    plannable, why_not = True, NotPlannableError("values")

    def __init__(self, number, limit, surprise=1.0):
        self.limit, self.surprise, self.tried = limit, surprise, []
        self.sizes, self.device = Sizes(number).sizes, torch.device("cuda")

    def planned(self, indices):
        if not self.plannable:
            raise self.why_not
        atoms, edges = (int(self.sizes[name][indices].sum()) for name in ("atoms", "edges"))
        return int(self.constant), int(self.of_atom * atoms + self.of_edge * edges)

    def measure(self, indices, repeats=3):
        atoms, edges = (int(self.sizes[name][indices].sum()) for name in ("atoms", "edges"))
        needed = self.constant + self.of_atom * atoms + self.of_edge * edges
        if atoms > 4000:
            needed *= self.surprise
        self.tried.append((atoms, edges, needed))
        if needed > 1.2 * self.limit:
            raise OutOfMemoryError("full")
        return StepCost(
            {"atoms": atoms, "edges": edges, "graphs": 1},
            self.seconds + self.seconds_per_atom * atoms,
            int(needed),
        )


@pytest.mark.parametrize("surprise", [1.0, 1.5])
def test_capacity_is_full_of_atoms_and_of_edges(surprise):
    memory = Memory(100, 2e6, surprise)
    found = largest_capacity(memory, memory.limit, 1 << 20)
    per_atom = memory.sizes["edges"].sum() / memory.sizes["atoms"].sum()
    assert found["edges"] / found["atoms"] == pytest.approx(per_atom, rel=1e-3)
    needed = memory.constant + memory.of_atom * found["atoms"] + memory.of_edge * found["edges"]
    assert 0.75 * memory.limit < surprise * needed <= memory.limit
    assert max(atoms for atoms, _, _ in memory.tried) >= found["atoms"] - 27


def test_capacity_holds_the_largest_structure_or_is_refused():
    largest = {"atoms": 27, "edges": 27 * 13}
    assert largest_capacity(Memory(100, 1e9), 1e9, 1) == largest
    little = Memory(100, 1e9)
    with pytest.raises(OutOfMemoryError):
        largest_capacity(little, 10.0, 1 << 20)


@pytest.mark.parametrize("atoms", [300, 40])
def test_capacity_is_found_where_the_first_trials_do_not_fit(atoms):
    largest = {"atoms": 27, "edges": 27 * 13}
    memory = Memory(100, 1e9)
    densest = largest["edges"] / largest["atoms"]
    memory.limit = memory.constant + atoms * (memory.of_atom + memory.of_edge * densest)
    found = largest_capacity(memory, memory.limit, 1 << 20)
    assert largest["atoms"] <= found["atoms"] < 512
    needed = memory.constant + memory.of_atom * found["atoms"] + memory.of_edge * found["edges"]
    assert needed <= memory.limit


def test_the_largest_batch_is_not_looked_for_on_a_cpu():
    memory = Memory(100, 1e9)
    memory.device = torch.device("cpu")
    with pytest.raises(ConfigError, match="on a GPU only"):
        find_capacity(memory)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with plenty of memory and many small structures: 36,000 atoms in 2,000."""

    def make(number=2000, limit=1e12, **times):
        memory = Memory(number, limit)
        vars(memory).update(times)
        monkeypatch.setattr(module, "available_bytes", lambda _: memory.limit)
        return memory

    return make


def test_the_smallest_batch_near_the_highest_rate_is_chosen(gpu):
    memory = gpu(number=2_000_000)
    capacity, why = choose_capacity(memory, batches_per_step=1)
    # The rate n / (1 ms + n * 1 us) is 95 % of its limit at 19,000 atoms.
    assert capacity.keys() == {"atoms"}
    assert 12_000 < capacity["atoms"] < 22_000
    assert "steps an epoch" in why
    rate = capacity["atoms"] / (1e-3 + 1e-6 * capacity["atoms"])
    measured = [cost.sizes["atoms"] / cost.seconds for cost in measured_rates(memory)]
    assert rate >= 0.949 * max(measured)
    smaller = 0.9 * capacity["atoms"]
    assert smaller / (1e-3 + 1e-6 * smaller) < 0.95 * max(measured)


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (4, 1), (2, 3)])
def test_an_epoch_keeps_a_hundred_steps(gpu, ranks, accumulate):
    memory = gpu()
    total = int(memory.sizes["atoms"].sum())
    capacity, why = choose_capacity(memory, ranks * accumulate)
    wanted = max(total // (100 * ranks * accumulate), 27)
    assert capacity == {"atoms": wanted}
    steps = total // (wanted * ranks * accumulate)
    assert f"{steps} steps an epoch" in why
    assert f"{total:,} would fit" in why
    share = wanted / (1e-3 + 1e-6 * wanted) / 1e6
    assert float(why.split("%")[0].strip(": ")) / 100 == pytest.approx(share, rel=0.1, abs=0.02)


@pytest.mark.parametrize(
    "given", [{}, {"plannable": False}, {"plannable": False, "why_not": RuntimeError("odd")}]
)
def test_what_does_not_fit_is_never_chosen(gpu, given):
    memory = gpu(number=2_000_000, limit=5000.0 + 3000 * (100 + 3 * 13), **given)
    capacity, why = choose_capacity(memory, 1)
    needed = 5000.0 + 100 * capacity["atoms"] + 3 * capacity.get("edges", 13 * capacity["atoms"])
    assert needed <= memory.limit
    assert capacity["atoms"] > 1500
    assert "would fit" not in why or int(why.split("; ")[1].split()[0].replace(",", "")) < 4000


def test_what_the_plan_says_does_not_fit_is_not_even_tried(gpu):
    memory = gpu(limit=5000.0 + 3000 * (100 + 3 * 13))
    capacity, why = choose_capacity(memory, 1)
    assert capacity["atoms"] == 360
    assert max(atoms for atoms, _, _ in memory.tried) <= 3000
    assert "3,000 would fit" in why


def test_a_structure_larger_than_a_hundredth_of_the_data_has_a_batch(gpu):
    memory = gpu(number=3)
    assert choose_capacity(memory, 1)[0] == {"atoms": 27}


def test_a_gpu_with_room_for_one_structure_alone_is_told_of_no_rate(gpu):
    memory = gpu(limit=(5000.0 + 27 * 100 + 3 * 27 * 13) / 1.19)
    with pytest.raises(OutOfMemoryError, match="as large as the largest structures"):
        choose_capacity(memory, 1)


def test_a_cpu_takes_256_atoms_or_the_largest_structure():
    sizes = Sizes(2000).sizes
    assert unmeasured_capacity(sizes, torch.device("cpu"), 1)[0] == {"atoms": 256}
    sizes["atoms"][0] = 400
    assert unmeasured_capacity(sizes, torch.device("cpu"), 1)[0] == {"atoms": 400}


@pytest.mark.parametrize(("number", "per_step"), [(1000, 1), (5000, 4), (3, 1)])
def test_few_atoms_are_trained_on_without_measuring(gpu, monkeypatch, number, per_step):
    """The steps of an epoch decide, as they would after measuring."""
    memory = gpu(number, limit=1e15)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1e15, 1e15))
    found = unmeasured_capacity(memory.sizes, memory.device, per_step)
    capacity, why = choose_capacity(memory, per_step)
    assert found is not None
    assert found[0] == capacity
    assert found[1].removeprefix(": ") in why
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1e8, 1e15))
    assert unmeasured_capacity(memory.sizes, memory.device, per_step) is None


def test_the_rate_is_measured_where_it_could_decide(gpu, monkeypatch):
    memory = gpu(number=10_000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1e15, 1e15))
    assert unmeasured_capacity(memory.sizes, memory.device, 1) is None


def test_measuring_ends_when_time_is_up(gpu, monkeypatch):
    clock = itertools.count(step=4.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    assert len(measured_rates(gpu(number=2_000_000))) == 2


def test_shares_of_the_rate_between_and_below_measured_batches():
    costs = [
        StepCost({"atoms": atoms}, 1e-3 + 1e-6 * atoms, 0) for atoms in (250, 1000, 4000, 16000)
    ]
    highest = 16000 / 17e-3
    for atoms in (500, 2000, 10_000):
        assert rate_share(costs, atoms) == pytest.approx(atoms / (1e-3 + 1e-6 * atoms) / highest)
    assert 0 < rate_share(costs, 100) < rate_share(costs, 250)
    assert rate_share(costs, 32_000) == 1.0
    assert smallest_near_highest(costs[:1]) == 256


def test_the_choice_is_kept_before_the_run_has_a_folder(tmp_path, monkeypatch):
    found = {"atoms": 7, "edges": 90}
    monkeypatch.setattr(module, "unmeasured_capacity", lambda *_: (found, ": why"))
    path, config = tmp_path / "runs" / "new" / "capacity.json", TrainConfig(device="cpu")
    assert capacity_of_run(path, config, {}, lambda _: None) == (
        found,
        "batches of 7 atoms and 90 edges: why",
    )
    assert json.loads(path.read_text()) == found
    monkeypatch.setattr(module, "unmeasured_capacity", lambda *_: ({"atoms": 1}, ""))
    again, note = capacity_of_run(path, config, {}, lambda _: None)
    assert again == found
    assert "as chosen when the run began" in note


@pytest.fixture
def a_gpu(monkeypatch, tmp_path):
    """A run on a GPU that has to measure, with a cache of its own."""
    mesh = Mesh(device=torch.device("cuda"))
    monkeypatch.setattr(module, "open_mesh", lambda *_: contextlib.nullcontext(mesh))
    monkeypatch.setattr(module, "unmeasured_capacity", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (90, 100))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.usefixtures("a_gpu")
def test_it_says_that_it_is_busy_before_a_gpu_measures(monkeypatch, tmp_path, capsys):
    def choose(*_):
        assert "compiling kernels" in capsys.readouterr().err
        return {"atoms": 1}, ""

    monkeypatch.setattr(module, "choose_capacity", choose)
    sizes = Sizes(10).sizes
    capacity_of_run(tmp_path / "capacity.json", TrainConfig(), sizes, lambda _: None)
    capacity_of_run(tmp_path / "capacity.json", TrainConfig(), sizes, lambda _: None)
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("a_gpu")
def test_an_equal_run_on_the_same_gpu_measures_nothing(monkeypatch, tmp_path):
    measured = []

    def choose(*_):
        measured.append(len(measured))
        return {"atoms": 1000 + len(measured)}, ": 99% of the highest rate"

    def found(name, number=10, **described):
        path, sizes = tmp_path / name / "capacity.json", Sizes(number).sizes
        return capacity_of_run(path, TrainConfig(), sizes, lambda _: None, 1, described)

    monkeypatch.setattr(module, "choose_capacity", choose)
    first, why = found("one", channels=4)
    again, why_again = found("two", channels=4)
    assert first == again == {"atoms": 1001}
    assert why_again == f"{why} (measured before)"
    # Another model, other data or another process on the GPU: it is measured anew.
    assert found("three", channels=8)[0] == {"atoms": 1002}
    assert found("four", number=11, channels=4)[0] == {"atoms": 1003}
    for name, free, expected in (("54", 54, 1004), ("46", 46, 1005), ("45.5", 45.5, 1005)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 100))
        assert found(name, channels=4)[0] == {"atoms": expected}
    for path in (tmp_path / "cache").iterdir():
        path.write_text("[1")
    assert found("damaged", channels=4)[0] == {"atoms": 1006}


@pytest.mark.parametrize("order", [1, -1])
def test_ranks_take_the_least_of_what_each_has_chosen(monkeypatch, tmp_path, order):
    """One with little memory limits edges, too."""
    found = [({"atoms": 9}, ": a"), ({"atoms": 7, "edges": 90}, ": b")][::order]
    monkeypatch.setattr(module, "unmeasured_capacity", lambda *_: found[0])
    monkeypatch.setattr(module, "gather_json", lambda *_: found)
    config = TrainConfig(device="cpu")
    capacity, _ = capacity_of_run(tmp_path / "capacity.json", config, {}, lambda _: None)
    assert capacity == {"atoms": 7, "edges": 90}
