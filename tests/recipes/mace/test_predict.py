"""Prediction and relaxation of files: what the input holds is kept, as far as it is still true."""

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from bevatron.errors import DataError
from bevatron.models.mace import MACE, MaceConfig
from bevatron.recipes.mace import predict as prediction
from bevatron.recipes.mace.predict import predict_file, predict_structures, relax_file


@pytest.fixture(scope="module")
def model():
    import torch

    torch.manual_seed(0)
    config = MaceConfig.preset(
        "small", num_channels=4, l_max=1, max_L=0, r_max=3.0, correlation=1
    ).with_data(atomic_numbers=(1, 8), atomic_energies=((-13.0, -430.0),), avg_num_neighbors=2.0)
    return MACE(config, torch.float64)


@pytest.fixture
def mixed(tmp_path):
    """A molecule with a dipole, six atoms in a cell with stress, an atom: results and columns."""
    water = Atoms("H2O", [[0, 0, 0], [0, 1.5, 0], [0, 0.7, 0.6]])
    water.calc = SinglePointCalculator(
        water, energy=-1.5, forces=np.ones((3, 3)), dipole=np.array([1.0, 2.0, 3.0])
    )
    water.info["name"] = "water"
    cell = Atoms("H6", np.arange(18).reshape(6, 3) * 0.7, cell=[5, 5, 5], pbc=True)
    stress = np.arange(1.0, 7.0)
    cell.calc = SinglePointCalculator(cell, energy=-2.5, forces=np.ones((6, 3)), stress=stress)
    cell.info["REF_stress"] = np.arange(9.0).reshape(3, 3) + np.arange(9.0).reshape(3, 3).T
    cell.arrays["tag"] = np.arange(6)
    path = tmp_path / "mixed.xyz"
    ase.io.write(path, [water, cell, Atoms("O")])
    return path


def test_labels_and_columns_of_the_input_stay_what_they_were(model, mixed, tmp_path):
    out = tmp_path / "out.xyz"
    assert predict_file([model], mixed, out, capacity=4) == 3
    before, after = ase.io.read(mixed, ":"), ase.io.read(out, ":")
    assert [str(atoms.symbols) for atoms in after] == [str(atoms.symbols) for atoms in before]
    for old, new in zip(before[:2], after[:2], strict=True):
        assert new.get_potential_energy() == old.get_potential_energy()
        np.testing.assert_allclose(new.get_forces(), old.get_forces())
    np.testing.assert_allclose(after[0].get_dipole_moment(), [1, 2, 3])
    np.testing.assert_allclose(after[1].get_stress(), before[1].get_stress())
    np.testing.assert_allclose(after[1].info["REF_stress"], before[1].info["REF_stress"])
    assert after[0].info["name"] == "water"
    assert after[1].arrays["tag"].tolist() == list(range(6))
    assert "predicted_stress" not in after[0].info
    assert after[1].info["predicted_stress"].shape == (9,)


def test_of_structures_in_one_batch_those_with_three_vectors_have_a_stress(model, mixed):
    structures = ase.io.read(mixed, ":")
    structures[0].cell = [9.0, 0, 0]  # of a wire
    found = predict_structures([model], structures)
    assert ["stress" in atoms.calc.results for atoms in found] == [False, True, False]


TEXTS = ["C:\\data\\x", "two\nlines", "", "ends\n", 'a "b" c', "it's", "plain", 'a\\"b']


def test_texts_of_structures_stay_what_they_were(model, tmp_path):
    structures = [Atoms("O", info={"note": text, "last": "kept"}) for text in TEXTS]
    ase.io.write(tmp_path / "notes.traj", structures)
    for name in ("notes.traj", "out.xyz"):  # the second is what the first pass wrote
        predict_file([model], tmp_path / name, tmp_path / "out.xyz")
        after = ase.io.read(tmp_path / "out.xyz", ":")
        assert [each.info["note"] for each in after] == TEXTS
        assert {each.info["last"] for each in after} == {"kept"}
    relaxed = relax_file(model, tmp_path / "notes.traj", tmp_path / "relaxed.xyz", steps=1)
    assert [each.info["note"] for each in relaxed.structures] == TEXTS
    assert [each.info["note"] for each in ase.io.read(tmp_path / "relaxed.xyz", ":")] == TEXTS


def test_predictions_are_those_of_the_calculator(model, mixed, tmp_path):
    from bevatron.ase import BevatronCalculator

    out = tmp_path / "out.xyz"
    predict_file([model], mixed, out)
    for atoms in ase.io.read(out, ":"):
        again = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
        again.calc = BevatronCalculator(model)
        assert atoms.info["predicted_energy"] == pytest.approx(again.get_potential_energy())
        np.testing.assert_allclose(
            atoms.arrays["predicted_forces"].reshape(-1, 3), again.get_forces(), atol=1e-7
        )
        if atoms.cell.rank == 3:
            np.testing.assert_allclose(
                atoms.info["predicted_stress"].reshape(3, 3),
                again.get_stress(voigt=False),
                atol=1e-10,
            )


def test_chunks_and_batches_do_not_show(model, mixed, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole.xyz", tmp_path / "parts.xyz"
    predict_file([model], mixed, whole)
    monkeypatch.setattr(prediction, "CHUNK", 1)
    done = []
    predict_file([model], mixed, parts, progress=done.append)
    assert done == [1, 2, 3]
    for one, other in zip(ase.io.read(whole, ":"), ase.io.read(parts, ":"), strict=True):
        assert one.info.keys() == other.info.keys()
        assert one.info["predicted_energy"] == pytest.approx(other.info["predicted_energy"])


def test_a_failure_in_the_middle_leaves_the_old_file(model, mixed, tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "CHUNK", 1)
    out = tmp_path / "out.xyz"
    predict_file([model], mixed, out)
    before = out.read_text()
    with mixed.open("a") as file:
        file.write("1\nProperties=species:S:1:pos:R:3\nNa 0 0 0\n")
    with pytest.raises(DataError, match="frame 3 holds Na"):
        predict_file([model], mixed, out)
    assert out.read_text() == before
    assert {path.name for path in tmp_path.iterdir()} == {"mixed.xyz", "out.xyz"}


def test_a_file_can_be_predicted_into_itself(model, mixed):
    assert predict_file([model], mixed, mixed) == 3
    assert all("predicted_energy" in atoms.info for atoms in ase.io.read(mixed, ":"))


def test_relaxed_structures_carry_their_own_results_and_no_others(model, mixed, tmp_path):
    out = tmp_path / "relaxed.xyz"
    relax_file(model, mixed, out, fmax=1e-3, steps=2)
    relaxed = ase.io.read(out, ":")
    assert relaxed[0].info["name"] == "water"
    assert "REF_stress" not in relaxed[1].info
    again = tmp_path / "again.xyz"
    predict_file([model], out, again)
    for atoms in ase.io.read(again, ":"):
        assert atoms.info["predicted_energy"] == pytest.approx(atoms.get_potential_energy())


def test_only_cells_can_relax_as_cells(model, mixed, tmp_path):
    with pytest.raises(DataError, match="frame 0: is not periodic in three directions"):
        relax_file(model, mixed, tmp_path / "out.xyz", cell=True)
