"""A potential gives the same whether its evaluations are launched, padded or captured."""

import copy
import logging
import pickle

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule

from bevatron import kernels
from bevatron.ase import BevatronCalculator
from bevatron.data.neighbours import add_neighbours
from bevatron.data.samples import collate_structures, unlabelled_structure
from bevatron.errors import ConfigError, DataError, OutOfMemoryError
from bevatron.models.mace import MACE, MaceConfig
from bevatron.recipes.mace import potential as potential_module
from bevatron.recipes.mace.potential import PER_ATOM, PER_STRUCTURE, ROWS, Potential
from bevatron.recipes.mace.relax import relax
from bevatron.train.capture.inference import CapturedInference

EVERYTHING = (*PER_STRUCTURE, *PER_ATOM)
CUTOFF = 3.0


def random_model(**changes):
    torch.manual_seed(3)
    config = MaceConfig(
        num_channels=8, l_max=2, max_L=1, correlation=2, r_max=CUTOFF, num_bessel=4,
        radial_mlp=(8,), pair_repulsion=True, **changes,
    ).with_data(
        atomic_numbers=(1, 6, 8), atomic_energies=((-13.6, -1030.0, -2040.0),),
        avg_num_neighbors=8.0, scale=(3.0,),
    )  # fmt: skip
    return MACE(config, dtype=torch.float64)


@pytest.fixture(scope="module")
def model():
    return random_model()


def crystal(seed, repeat=1):
    atoms = bulk("CO", "rocksalt", a=3.4, cubic=True) * (repeat, 1, 1)
    atoms.rattle(0.05, seed=seed)
    return atoms


def structures():
    atom = molecule("O")
    layer = crystal(5)
    layer.pbc = (True, True, False)
    made = [molecule("CH3CH2OH"), crystal(1), atom, molecule("H2O"), layer, crystal(2, 3)]
    made[0].rattle(0.05, seed=1)
    return made


def samples(atoms):
    made = []
    for each in atoms:
        raw = unlabelled_structure(each.numbers, each.positions, each.cell.array, each.pbc)
        made.append(add_neighbours(raw, CUTOFF))
    return made


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Let potentials on a CPU pad their batches as those on a GPU do."""
    monkeypatch.setattr(potential_module, "obstacle", lambda _: None)


def assert_same(found, expected, rel):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, values in other.items():
            assert one[name].shape == values.shape, name
            assert one[name].dtype == np.float64
            scale = max(np.abs(values).max(initial=0.0), 1.0)
            np.testing.assert_allclose(one[name], values, rtol=0, atol=rel * scale, err_msg=name)


@pytest.mark.parametrize("max_atoms", [2048, 12, 1], ids=["one batch", "some", "one each"])
def test_padding_is_gone_from_all_results(model, on_a_cpu, max_atoms):
    given = samples(structures())
    expected = list(Potential(model, "cpu", capture=False).evaluate(given, EVERYTHING, max_atoms))
    padded = Potential(model, "cpu")
    assert padded.captured
    assert set(expected[0]) == set(EVERYTHING)
    assert np.abs(expected[1]["stress"]).max() > 1e-3
    for _ in range(2):
        assert_same(padded.evaluate(given, EVERYTHING, max_atoms), expected, 1e-12)


def test_evaluations_may_be_under_way_at_the_same_time(model, on_a_cpu):
    potential, given = Potential(model, "cpu"), samples([crystal(seed) for seed in range(6)])
    expected = [float(r["energy"]) for r in Potential(model, "cpu", capture=False).evaluate(given)]
    forth = potential.evaluate(given, max_atoms=1)
    back = potential.evaluate(given[::-1], max_atoms=1)
    found = [(float(a["energy"]), float(b["energy"])) for a, b in zip(forth, back, strict=True)]
    assert [a for a, _ in found] == pytest.approx(expected, rel=1e-12)
    assert [b for _, b in found] == pytest.approx(expected[::-1], rel=1e-12)


def test_nothing_at_all_can_be_evaluated(model, on_a_cpu):
    potential = Potential(model, "cpu")
    assert list(potential.evaluate([])) == []
    nothing = unlabelled_structure(np.zeros(0), np.zeros((0, 3)))
    nothing |= {"edges": np.zeros((0, 2), np.int32), "edge_shifts": np.zeros((0, 3), np.int32)}
    (found,) = potential.evaluate([nothing])
    assert found["forces"].shape == (0, 3)
    assert float(found["energy"]) == 0.0


def test_an_unknown_element_is_named_before_it_is_padded(model, on_a_cpu):
    with pytest.raises(DataError, match="Au"):
        list(Potential(model, "cpu").evaluate(samples([bulk("Au")])))


def test_an_unknown_result_is_refused(model, on_a_cpu):
    potential, given = Potential(model, "cpu"), samples([molecule("H2O")])
    with pytest.raises(ConfigError, match="there is no"):
        list(potential.evaluate(given, ("charges",)))
    assert len(list(potential.evaluate(given))) == 1


def test_too_little_memory_is_one_sentence_with_the_size_of_the_batch(model, monkeypatch):
    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    potential, given = Potential(model, "cpu"), samples([molecule("H2O"), molecule("CH4")])
    monkeypatch.setattr(potential.model, "forward", fails)
    with pytest.raises(OutOfMemoryError, match=r"batch of 8 atoms .* in 2 structures; allow"):
        list(potential.evaluate(given))


def test_copies_and_pickles_of_a_potential_are_potentials(model, on_a_cpu):
    potential, given = Potential(model, "cpu"), samples(structures())
    expected = list(potential.evaluate(given))
    for other in (copy.deepcopy(potential), pickle.loads(pickle.dumps(potential))):
        assert_same(other.evaluate(given), expected, 1e-12)


def test_capturing_on_a_cpu_can_only_be_left_out(model):
    assert not Potential(model, "cpu").captured
    for make in (Potential, BevatronCalculator):
        with pytest.raises(ConfigError, match=r"capture: .* the device is cpu; leave it out"):
            make(model, "cpu", capture=True)


def capturing(model, **settings):
    return CapturedInference(model, torch.device("cpu"), torch.float64, ROWS, **settings)


def batch_of(*atoms):
    return collate_structures(samples(atoms), np.arange(len(atoms)), [1.0] * len(atoms))


def test_outputs_have_the_rows_of_the_batch(model):
    batch = batch_of(*structures())
    expected = model(batch, compute=EVERYTHING)
    found = capturing(model).launch(batch, compute=EVERYTHING)()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].shape == values.shape
        assert torch.allclose(found[name], values, rtol=1e-10, atol=1e-11), name


def test_a_shape_is_captured_once_it_has_come_again(model):
    inference, batch = capturing(model, patience=2), batch_of(crystal(0))
    for captured in (0, 0, 1, 1):
        inference.launch(batch)()
        assert inference.num_captured == captured
    inference.launch(batch, compute=("energy", "stress"))()
    assert inference.num_captured == 1
    other = capturing(model, patience=0)
    other.launch(batch)()
    assert other.num_captured == 1


def test_what_was_not_used_for_longest_is_dropped(model):
    inference = capturing(model, max_graphs=2)
    small, medium, large = batch_of(molecule("O")), batch_of(crystal(0, 3)), batch_of(crystal(0, 9))
    for batch in (small, medium, small, large):
        inference.launch(batch)()
    kept = inference.shapes
    assert len(kept) == 2
    assert all(shape.fits(one) for shape, one in zip(kept, (small, large), strict=True))
    assert not kept[0].fits(medium)


def test_a_change_of_kernels_is_captured_anew(model):
    inference, batch = capturing(model, patience=0), batch_of(crystal(0))
    inference.launch(batch)()
    with kernels.use("reference"):
        inference.launch(batch)()
    assert inference.num_captured == 2


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(function):
    for mark in GPU:
        function = mark(function)
    return function


@on_gpu
@pytest.mark.parametrize(("dtype", "rel"), [("float64", 1e-11), ("float32", 1e-5)])
def test_captured_evaluations_equal_launched_ones(model, dtype, rel):
    eager = Potential(model, "cuda", dtype, capture=False)
    captured = Potential(model, "cuda", dtype, capture=True)
    for seed in range(3):
        atoms = structures()
        for each in atoms:
            each.rattle(0.02, seed=seed)
        given = samples(atoms)
        for max_atoms in (2048, 12):
            expected = list(eager.evaluate(given, EVERYTHING, max_atoms))
            assert_same(captured.evaluate(given, EVERYTHING, max_atoms), expected, rel)
    assert captured.captured


@on_gpu
def test_many_shapes_pass_through_one_pool(model):
    eager = Potential(model, "cuda", capture=False)
    captured = Potential(model, "cuda", capture=True)
    atoms = [crystal(seed, repeat) for repeat in range(1, 40, 3) for seed in range(2)]
    for given in (samples(atoms), samples(atoms[::-1])):
        expected = list(eager.evaluate(given, max_atoms=1))
        assert_same(captured.evaluate(given, max_atoms=1), expected, 1e-11)


@on_gpu
def test_evaluations_on_several_streams_come_one_after_the_other(model):
    moved = copy.deepcopy(model).to("cuda")

    def slowly(batch, **options):
        torch.cuda._sleep(100_000_000)
        return moved(batch, **options)

    batches = [batch_of(crystal(seed, 4)) for seed in range(2)]
    inference = CapturedInference(slowly, torch.device("cuda"), torch.float64, ROWS, patience=0)
    expected = [float(inference.launch(batch)()["energy"]) for batch in batches]
    assert inference.num_captured == 1
    assert abs(expected[0] - expected[1]) > 1e-6
    first = inference.launch(batches[0])
    with torch.cuda.stream(torch.cuda.Stream()):
        second = inference.launch(batches[1])
    found = [float(read()["energy"]) for read in (first, second)]
    assert found == pytest.approx(expected, rel=1e-12)


@on_gpu
def test_dynamics_and_relaxation_are_those_of_launched_evaluations(model):
    moving, steady = crystal(3, 2), crystal(3, 2)
    moving.calc = BevatronCalculator(model, "cuda", capture=True)
    steady.calc = BevatronCalculator(model, "cuda", capture=False)
    for _ in range(5):
        for atoms in (moving, steady):
            atoms.positions += 0.01 * np.clip(atoms.get_forces(), -1, 1)
        np.testing.assert_allclose(moving.get_stress(), steady.get_stress(), atol=1e-11)
    np.testing.assert_allclose(moving.positions, steady.positions, atol=1e-11)
    starts = [crystal(1), crystal(2, 2)]
    ends = [
        relax(Potential(model, "cuda", capture=capture), starts, fmax=0.05, steps=30)
        for capture in (None, False)
    ]
    np.testing.assert_allclose(ends[0].energies, ends[1].energies, rtol=1e-10)
    assert ends[0].steps.tolist() == ends[1].steps.tolist()


@on_gpu
def test_a_model_that_waits_is_evaluated_without_capturing(model, caplog, monkeypatch):
    monkeypatch.setattr(potential_module, "_said", set())
    given = samples(structures())
    with kernels.use("reference"), caplog.at_level(logging.WARNING, "bevatron.inference"):
        expected = list(Potential(model, "cuda", capture=False).evaluate(given))
        for _ in range(2):
            potential = Potential(model, "cuda")
            for _ in range(4):
                assert_same(potential.evaluate(given), expected, 1e-11)
            assert not potential.captured
        with pytest.raises(ConfigError, match=r"capture: .* it waits for the GPU in"):
            list(Potential(model, "cuda", capture=True).evaluate(given))
    assert sum("it waits for the GPU in" in record.message for record in caplog.records) == 1
