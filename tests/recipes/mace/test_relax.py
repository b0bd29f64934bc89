"""Batched relaxation takes the path that ASE's FIRE takes alone."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.constraints import FixAtoms
from ase.filters import UnitCellFilter
from ase.optimize import FIRE

from bevatron.ase import BevatronCalculator
from bevatron.errors import ConfigError, DataError
from bevatron.models.mace import MACE, MaceConfig
from bevatron.recipes.mace.potential import Potential
from bevatron.recipes.mace.relax import relax


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = MaceConfig(
        num_channels=4, l_max=1, max_L=1, correlation=2, r_max=3.0, num_bessel=4,
        radial_mlp=(8,), pair_repulsion=True,
    ).with_data(
        atomic_numbers=(1, 6, 8), atomic_energies=((-13.6, -1030.0, -2040.0),),
        avg_num_neighbors=8.0, scale=(3.0,),
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return MACE(config)
    finally:
        torch.set_default_dtype(before)


def molecules():
    made = [molecule(name) for name in ("CH3CH2OH", "H2O", "CH3OH")]
    for seed, atoms in enumerate(made):
        atoms.rattle(0.05, seed=seed)
    return made


def crystal():
    atoms = bulk("CO", "rocksalt", a=3.3, cubic=True)
    atoms.rattle(0.05, seed=2)
    strain = np.eye(3) + np.array([[0.02, 0.01, 0], [0.01, -0.02, 0], [0, 0, 0.01]])
    atoms.set_cell(atoms.cell @ strain, scale_atoms=True)
    return atoms


def alone(model, atoms, fmax, steps, cell=False):
    atoms = atoms.copy()
    atoms.calc = BevatronCalculator(model)
    optimizer = FIRE(UnitCellFilter(atoms) if cell else atoms, logfile=None)
    optimizer.run(fmax=fmax, steps=steps)
    return atoms, optimizer.nsteps


def test_each_structure_takes_the_path_that_it_takes_alone(model):
    starts = molecules()
    result = relax(model, starts, fmax=0.05, steps=40)
    assert len(set(result.steps.tolist())) > 1
    for start, end, steps in zip(starts, result.structures, result.steps, strict=True):
        expected, number = alone(model, start, 0.05, 40)
        assert steps == number
        np.testing.assert_allclose(end.positions, expected.positions, atol=1e-8)
        assert end.get_potential_energy() == pytest.approx(expected.get_potential_energy())


def test_cell_relaxes_as_with_the_unit_cell_filter(model):
    start = crystal()
    result = relax(model, [start, start.copy()], fmax=0.02, steps=25, cell=True)
    expected, number = alone(model, start, 0.02, 25, cell=True)
    assert result.steps.tolist() == [number] * 2
    for end in result.structures:
        np.testing.assert_allclose(end.cell.array, expected.cell.array, atol=1e-8)
        np.testing.assert_allclose(end.positions, expected.positions, atol=1e-8)
        np.testing.assert_allclose(end.get_stress(), expected.get_stress(), atol=1e-8)
    assert abs(result.structures[0].get_volume() - start.get_volume()) > 0.01


def test_converged_means_forces_below_fmax_and_the_result_says_so(model):
    starts = molecules()[1:]
    before = [atoms.positions.copy() for atoms in starts]
    result = relax(model, starts, fmax=0.1, steps=200)
    assert result.converged.all()
    assert (result.fmax < 0.1).all()
    for atoms, positions, end, energy in zip(
        starts, before, result.structures, result.energies, strict=True
    ):
        np.testing.assert_array_equal(atoms.positions, positions)
        assert np.linalg.norm(end.get_forces(), axis=1).max() < 0.1
        check = end.copy()
        check.calc = BevatronCalculator(model)
        assert check.get_potential_energy() == pytest.approx(energy, abs=1e-9)


def test_converged_structures_leave_the_batch(model):
    potential, sizes = Potential(model), []
    inner = potential.evaluate
    potential.evaluate = lambda samples, *rest: (sizes.append(len(samples)), inner(samples, *rest))[
        1
    ]
    done = []
    result = relax(
        potential, molecules(), fmax=0.1, steps=200, progress=lambda n, _: done.append(n)
    )
    assert sizes[0] == 3
    assert sizes[-1] < 3
    assert sorted(done) == done
    assert done[-1] == 3
    assert len(sizes) == result.steps.max() + 1


def test_too_few_steps_end_unconverged(model):
    result = relax(model, molecules(), fmax=1e-6, steps=2)
    assert not result.converged.any()
    assert result.steps.tolist() == [2, 2, 2]
    assert relax(model, molecules(), fmax=1e-6, steps=0).steps.tolist() == [0, 0, 0]


def test_small_batches_change_nothing(model):
    whole = relax(model, molecules(), steps=10)
    pieces = relax(model, molecules(), steps=10, max_atoms=9)
    for one, other in zip(whole.structures, pieces.structures, strict=True):
        np.testing.assert_allclose(one.positions, other.positions, atol=1e-10)


def test_fixed_atoms_stay(model):
    start = molecules()[0]
    start.set_constraint(FixAtoms([0, 1]))
    end = relax(model, [start], fmax=0.05, steps=30).structures[0]
    np.testing.assert_array_equal(end.positions[:2], start.positions[:2])
    expected, _ = alone(model, start, 0.05, 30)
    np.testing.assert_allclose(end.positions, expected.positions, atol=1e-8)


def test_nothing_to_relax(model):
    assert relax(model, []).structures == []


def test_one_structure_and_a_generator_are_relaxed_as_a_list_is(model):
    listed = relax(model, molecules()[:2], steps=3)
    drawn = relax(model, iter(molecules()[:2]), steps=3)
    single = relax(model, molecules()[0], steps=3)
    assert drawn.energies.tolist() == listed.energies.tolist()
    np.testing.assert_allclose(single.energies, listed.energies[:1], rtol=1e-12)


def test_wrong_input_is_named(model):
    with pytest.raises(DataError, match=r"structure 1 \(\) holds no atoms"):
        relax(model, [molecule("H2O"), Atoms()])
    with pytest.raises(DataError, match=r"structure 1 \(CH3Cl|structure 1 \(CClH3"):
        relax(model, [molecule("H2O"), molecule("CH3Cl")])
    with pytest.raises(DataError, match=r"structure 0 .*periodic"):
        relax(model, [molecule("H2O")], cell=True)
    with pytest.raises(ConfigError, match="fmax"):
        relax(model, [molecule("H2O")], fmax=0)
    with pytest.raises(ConfigError, match="steps: expected 0 or more, got -1"):
        relax(model, [molecule("H2O")], steps=-1)
