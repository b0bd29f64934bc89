"""The ASE calculator gives what the model gives, with every property consistent with the energy."""

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.calculator import CalculatorSetupError, PropertyNotImplementedError
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress
from ase.md.verlet import VelocityVerlet
from ase.vibrations import VibrationsData

from bevatron.ase import BevatronCalculator
from bevatron.data.neighbours import add_neighbours
from bevatron.data.samples import collate_structures, unlabelled_structure
from bevatron.errors import BevatronError, CheckpointError, ConfigError, DataError
from bevatron.models.mace import MACE, MaceConfig, save_model
from bevatron.recipes.mace.relax import relax

CUTOFF = 3.5


def tiny_mace(seed=0, **changes):
    """A smooth random potential, about as stiff as molecules are, with repulsive nuclei."""
    torch.manual_seed(seed)
    heads = changes.get("heads", ("default",))
    config = MaceConfig(
        num_channels=8, l_max=1, max_L=1, correlation=2, r_max=changes.pop("r_max", CUTOFF),
        num_bessel=6, radial_mlp=(16,), pair_repulsion=True, heads=heads,
    ).with_data(
        atomic_numbers=(1, 6, 8), atomic_energies=((-13.6, -1030.0, -2040.0),) * len(heads),
        avg_num_neighbors=8.0, scale=(changes.get("scale", 3.0),), shift=(0.1,),
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return MACE(config)
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def model():
    return tiny_mace()


@pytest.fixture
def ethanol():
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.05, seed=1)
    return atoms


@pytest.fixture
def crystal():
    atoms = bulk("CO", "rocksalt", a=3.4)
    atoms.rattle(0.05, seed=2)
    return atoms


def direct(model, atoms, compute):
    sample = unlabelled_structure(atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc)
    batch = collate_structures([add_neighbours(sample, CUTOFF)], np.arange(1), [1.0])
    return {name: value.detach().numpy() for name, value in model(batch, compute=compute).items()}


def test_properties_are_those_of_the_model(model, crystal):
    crystal.calc = BevatronCalculator(model)
    expected = direct(model, crystal, ("energy", "forces", "stress"))
    assert crystal.get_potential_energy() == pytest.approx(expected["energy"][0], abs=1e-10)
    assert crystal.get_potential_energy(force_consistent=True) == crystal.get_potential_energy()
    np.testing.assert_allclose(crystal.get_forces(), expected["forces"], atol=1e-10)
    np.testing.assert_allclose(crystal.get_stress(voigt=False), expected["stress"][0], atol=1e-12)
    np.testing.assert_allclose(crystal.get_potential_energies(), expected["node_energy"])
    assert crystal.get_potential_energies().sum() == pytest.approx(crystal.get_potential_energy())


def test_forces_are_the_slope_of_the_energy(model, ethanol):
    ethanol.calc = BevatronCalculator(model)
    numeric = calculate_numerical_forces
    analytic = ethanol.get_forces()
    np.testing.assert_allclose(analytic, numeric(ethanol, eps=1e-4), atol=1e-6)
    assert np.abs(analytic).max() > 0.1


def test_stress_is_the_slope_of_the_energy(model, crystal):
    crystal.calc = BevatronCalculator(model)
    numeric = calculate_numerical_stress(crystal, eps=1e-5)
    np.testing.assert_allclose(crystal.get_stress(), numeric, atol=1e-7)
    assert np.abs(numeric).max() > 1e-3


def test_skin_changes_nothing_but_the_number_of_lists(model, crystal):
    rng = np.random.default_rng(0)
    with_skin, without = BevatronCalculator(model, skin=0.6), BevatronCalculator(model, skin=0)
    moving = crystal.repeat((2, 1, 1))
    for step in range(12):
        if step == 8:
            moving.set_cell(moving.cell * 1.01, scale_atoms=True)
        results = []
        for calculator in (with_skin, without):
            moving.calc = calculator
            results.append(
                [moving.get_potential_energy(), moving.get_forces(), moving.get_stress()]
            )
        for ours, fresh in zip(*results, strict=True):
            np.testing.assert_array_equal(ours, fresh)
        moving.positions += rng.normal(0, 0.02, moving.positions.shape)
    assert without.neighbours[CUTOFF].num_builds == 12
    assert 2 <= with_skin.neighbours[CUTOFF].num_builds <= 5


def test_calculator_can_go_from_one_structure_to_another(model, ethanol, crystal):
    shared = BevatronCalculator(model)
    for atoms in (ethanol, crystal, ethanol, molecule("H2O")):
        own = atoms.copy()
        atoms.calc, own.calc = shared, BevatronCalculator(model)
        assert atoms.get_potential_energy() == own.get_potential_energy()


def test_nothing_is_computed_twice(model, crystal):
    calculator = BevatronCalculator(model)
    crystal.calc = calculator
    calls = []
    inner = calculator.calculate
    calculator.calculate = lambda *args: (calls.append(args), inner(*args))
    crystal.get_potential_energy(), crystal.get_forces(), crystal.get_stress()
    crystal.set_initial_charges([0.1] * len(crystal))
    crystal.get_forces()
    assert len(calls) == 1


def test_committee_gives_mean_and_spread(ethanol):
    members = [tiny_mace(seed) for seed in range(3)]
    members[2] = tiny_mace(2, r_max=3.0)
    energies, forces = [], []
    for member in members:
        ethanol.calc = BevatronCalculator(member)
        energies.append(ethanol.get_potential_energy())
        forces.append(ethanol.get_forces())
    ethanol.calc = BevatronCalculator(members)
    assert ethanol.get_potential_energy() == pytest.approx(np.mean(energies), abs=1e-9)
    np.testing.assert_allclose(ethanol.get_forces(), np.mean(forces, axis=0), atol=1e-12)
    results = ethanol.calc.results
    assert results["energy_std"] == pytest.approx(np.std(energies), abs=1e-9)
    np.testing.assert_allclose(results["forces_std"], np.std(forces, axis=0), atol=1e-12)
    assert results["energies_std"].shape == (len(ethanol),)


def test_energies_of_atoms_contain_e0_and_sum_to_the_energy(model, crystal):
    crystal.calc = BevatronCalculator(model)
    energies = crystal.get_potential_energies()
    assert energies.shape == (2,)
    assert energies.sum() == pytest.approx(crystal.get_potential_energy(), abs=1e-9)
    lone = Atoms("O", calculator=BevatronCalculator(model))
    assert lone.get_potential_energies()[0] == pytest.approx(-2040.0 + 0.1, abs=20)


def test_descriptors_are_invariant_and_layer_after_layer(model, ethanol):
    calculator = BevatronCalculator(model)
    whole = calculator.get_descriptors(ethanol)
    assert whole.shape == (9, 16)
    np.testing.assert_allclose(whole, direct(model, ethanol, ["descriptors"])["descriptors"])
    first = calculator.get_descriptors(ethanol, num_layers=1)
    np.testing.assert_array_equal(first, whole[:, :8])
    turned = ethanol.copy()
    turned.rotate(40, (1, 2, 3))
    np.testing.assert_allclose(calculator.get_descriptors(turned), whole, atol=1e-12)


def test_vectors_among_the_descriptors_turn_with_the_structure(model, ethanol):
    calculator = BevatronCalculator(model)
    features = calculator.get_descriptors(ethanol, invariants_only=False)
    assert features.shape == (9, 8 * 4 + 8)  # 8x0e+8x1o, then 8x0e
    whole = calculator.get_descriptors(ethanol)
    np.testing.assert_array_equal(features[:, [*range(8), *range(32, 40)]], whole)
    first = calculator.get_descriptors(ethanol, invariants_only=False, num_layers=1)
    np.testing.assert_array_equal(first, features[:, :32])
    rotation, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))
    turned = ethanol.copy()
    turned.positions = ethanol.positions @ rotation.T
    vectors = first[:, 8:].reshape(9, 8, 3)
    found = calculator.get_descriptors(turned, invariants_only=False, num_layers=1)
    assert np.abs(vectors).max() > 1e-3
    np.testing.assert_allclose(found[:, 8:].reshape(9, 8, 3), vectors @ rotation.T, atol=1e-10)


def test_descriptors_of_a_committee_are_kept_apart(ethanol):
    models = [tiny_mace(seed) for seed in range(2)]
    found = BevatronCalculator(models).get_descriptors(ethanol)
    assert [each.shape for each in found] == [(9, 16)] * 2
    np.testing.assert_array_equal(found[1], BevatronCalculator(models[1]).get_descriptors(ethanol))


@pytest.mark.parametrize("kind", ["molecule", "crystal"])
def test_the_hessian_is_the_slope_of_the_forces(model, ethanol, crystal, kind):
    atoms = ethanol if kind == "molecule" else crystal
    calculator = BevatronCalculator(model)
    second = calculator.get_hessian(atoms)
    size = 3 * len(atoms)
    assert second.shape == (size, size)
    np.testing.assert_allclose(second, second.T, atol=1e-9)
    atoms.calc = calculator
    step, numerical = 1e-4, np.zeros((size, size))
    for row in range(size):
        slopes = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.calc = calculator
            moved.positions[row // 3, row % 3] += sign * step
            slopes.append(moved.get_forces().ravel())
        numerical[row] = (slopes[1] - slopes[0]) / (2 * step)
    np.testing.assert_allclose(second, numerical, atol=2e-5 * np.abs(second).max())
    atoms.get_potential_energy()
    np.testing.assert_array_equal(calculator.get_hessian(), second)


def test_ase_makes_frequencies_of_the_hessian(model, ethanol):
    second = BevatronCalculator(model).get_hessian(ethanol)
    assert len(VibrationsData.from_2d(ethanol, second).get_energies()) == 27


def test_what_has_no_descriptors_is_refused(model, ethanol):
    calculator = BevatronCalculator(model)
    with pytest.raises(ConfigError, match="num_layers: the model has 2 layers, got 3"):
        calculator.get_descriptors(ethanol, num_layers=3)
    for method in (calculator.get_descriptors, calculator.get_hessian):
        with pytest.raises(CalculatorSetupError, match="no atoms"):
            method()
        with pytest.raises(DataError, match="Fe"):
            method(Atoms("Fe"))


def test_model_folders_are_accepted_and_committees_of_them(model, ethanol, tmp_path):
    ethanol.calc = BevatronCalculator(model)
    expected = ethanol.get_potential_energy()
    one, two = tmp_path / "run", tmp_path / "again"
    save_model(model, one)
    save_model(model, two)
    for source in (one, str(one), [one, two]):
        ethanol.calc = BevatronCalculator(source)
        assert ethanol.get_potential_energy() == pytest.approx(expected, abs=1e-10)
    assert ethanol.calc.results["energy_std"] == pytest.approx(0, abs=1e-10)


def test_of_an_unfinished_run_the_best_model_so_far_is_taken(model, ethanol, tmp_path):
    save_model(model, tmp_path / "run" / "best")
    ethanol.calc = BevatronCalculator(tmp_path / "run")
    ours = ethanol.get_potential_energy()
    ethanol.calc = BevatronCalculator(model)
    assert ours == pytest.approx(ethanol.get_potential_energy(), abs=1e-10)


def test_single_precision_is_close_and_leaves_the_model_alone(model, ethanol):
    ethanol.calc = BevatronCalculator(model)
    exact = ethanol.get_forces()
    ethanol.calc = BevatronCalculator(model, dtype="float32")
    rough = ethanol.get_forces()
    np.testing.assert_allclose(rough, exact, atol=2e-4)
    assert np.abs(rough - exact).max() > 0
    assert rough.dtype == np.float64
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert all(p.requires_grad for p in model.parameters())


def test_head_is_chosen_by_name(ethanol):
    two = tiny_mace(heads=("dft", "xtb"))
    energies = []
    for head in ("dft", "xtb"):
        ethanol.calc = BevatronCalculator(two, head=head)
        energies.append(ethanol.get_potential_energy())
    assert energies[0] != energies[1]
    with pytest.raises(ConfigError, match="dft, xtb"):
        BevatronCalculator(two)
    with pytest.raises(ConfigError, match="no 'ccsd'"):
        BevatronCalculator(two, head="ccsd")


def test_isolated_atom_and_slab(model):
    atom = molecule("O")
    atom.calc = BevatronCalculator(model)
    np.testing.assert_array_equal(atom.get_forces(), 0)
    slab = bulk("CO", "rocksalt", a=3.4).repeat((2, 2, 1))
    slab.pbc = (True, True, False)
    slab.calc = BevatronCalculator(model)
    numeric = calculate_numerical_forces(slab, eps=1e-4)
    np.testing.assert_allclose(slab.get_forces(), numeric, atol=1e-6)
    slab.cell[2] = 0  # an open axis needs no vector, unless the stress is asked for
    np.testing.assert_allclose(slab.get_forces(), numeric, atol=1e-6)
    with pytest.raises(PropertyNotImplementedError):
        slab.get_stress()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda m: BevatronCalculator(m, dtype="half"), ConfigError, "float32"),
        (lambda m: BevatronCalculator(m, device="cuda:77"), ConfigError, "cuda:77"),
        (lambda m: BevatronCalculator(m, skin=-1), ConfigError, "skin"),
        (lambda m: BevatronCalculator([]), ConfigError, "at least one"),
        (lambda m: BevatronCalculator(m, default_dtype="float32"), TypeError, "'default_dtype'"),
        (lambda _: BevatronCalculator("/nowhere/at/all"), CheckpointError, "/nowhere/at/all"),
    ],
)
def test_wrong_arguments_are_one_sentence(model, make, error, words):
    with pytest.raises(error, match=words) as caught:
        make(model)
    assert "\n" not in str(caught.value)


def test_unknown_element_is_named(model):
    atoms = molecule("CH3Cl")
    atoms.calc = BevatronCalculator(model)
    with pytest.raises(DataError, match=r"CClH3.*Cl.*knows H, C, O"):
        atoms.get_potential_energy()


def test_broken_geometry_is_refused(model, ethanol):
    ethanol.calc = BevatronCalculator(model)
    ethanol.positions[0] = np.nan
    with pytest.raises(BevatronError, match="NaN"):
        ethanol.get_forces()


def test_stress_of_a_molecule_is_not_there(model, ethanol):
    ethanol.calc = BevatronCalculator(model)
    with pytest.raises(NotImplementedError, match="lattice"):
        ethanol.get_stress()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dynamics_at_constant_energy_does_not_drift(model):
    """1 ps at 1 fs and about 300 K: the total energy drifts by less than 1e-5 eV/atom/ps."""
    start = Atoms()
    for number, place in enumerate(np.ndindex(2, 2, 1)):
        water = molecule("H2O")
        water.rotate(77 * number, (1, 0.3 * number, 1))
        water.translate(3.0 * np.array(place))
        start += water
    atoms = relax(model, [start], fmax=0.02, steps=300).structures[0]
    atoms.calc = BevatronCalculator(model)
    # Twice 300 K at a minimum, where half of it becomes potential energy.
    speeds = np.sqrt(2 * 300 * units.kB / atoms.get_masses())
    atoms.set_velocities(np.random.default_rng(0).normal(size=(len(atoms), 3)) * speeds[:, None])
    dynamics, energies = VelocityVerlet(atoms, 1.0 * units.fs), []
    dynamics.attach(lambda: energies.append(atoms.get_total_energy() / len(atoms)))
    dynamics.run(1000)
    picoseconds = 1e-3 * np.arange(len(energies))
    assert abs(np.polyfit(picoseconds, energies, 1)[0]) < 1e-5
    assert np.std(energies) < 1e-4
    assert 150 < atoms.get_temperature() < 800
    assert 10 < atoms.calc.neighbours[CUTOFF].num_builds < 1000


def test_a_structure_without_atoms_is_refused(model):
    atoms = Atoms(calculator=BevatronCalculator(model))
    with pytest.raises(CalculatorSetupError, match="no atoms"):
        atoms.get_potential_energy()


def test_it_is_said_once_that_first_evaluations_are_recorded(model, monkeypatch, capsys):
    from bevatron.recipes.mace import calculator, potential

    for why, count in (("graphs need a GPU", 0), (None, 1)):
        calculator.tell_of_recording.cache_clear()
        monkeypatch.setattr(potential, "obstacle", lambda _, why=why: why)
        BevatronCalculator(model)
        BevatronCalculator(model)
        assert capsys.readouterr().err.count("capture CUDA graphs") == count
    calculator.tell_of_recording.cache_clear()
