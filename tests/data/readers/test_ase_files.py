"""Formats that ASE reads, and pickles that nobody reads by accident."""

import pickle

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms

from bevatron.data.readers import LabelOptions, open_reader
from bevatron.errors import DataError, TrustError


def labelled(i, **more):
    atoms = Atoms(
        "MgO", positions=[[0, 0, 0], [0, 0, 2 + 0.01 * i]], cell=[4, 4, 5], pbc=[True, True, False]
    )
    results = {"energy": -5.0 - i, "forces": np.array([[0, 0, 1.0], [0, 0, -1.0]])}
    atoms.calc = SinglePointCalculator(atoms, **(results | more))
    return atoms


def test_trajectories_are_read_by_ranges_with_the_raw_forces(tmp_path):
    frames = [labelled(i, stress=np.arange(1.0, 7)) for i in range(7)]
    frames[2].set_constraint(FixAtoms([0]))
    path = tmp_path / "run.traj"
    ase.io.write(path, frames)
    reader = pickle.loads(pickle.dumps(open_reader(path)))
    assert reader.num_samples == 7
    assert [float(s["energy"]) for s in reader.read(2, 4)] == [-7, -8]
    assert [float(s["energy"]) for s in reader.read(4, 7)] == [-9, -10, -11]
    (sample,) = reader.read(2, 3)
    assert sample["forces"].tolist() == [[0, 0, 1], [0, 0, -1]]
    assert sample["stress"][1].tolist() == [6, 2, 4]
    assert sample["pbc"].tolist() == [True, True, False]
    assert reader.describe(2) == f"{path}, frame 2"
    assert "elements: O Mg" in reader.report()[0]


def test_a_trajectory_of_another_names_labels_in_info_and_arrays(tmp_path):
    atoms = Atoms("H2", positions=[[0, 0, 0], [0, 0, 0.7]])
    atoms.info |= {"REF_energy": -31.0, "config_type": "dimer"}
    atoms.arrays["REF_forces"] = np.ones((2, 3))
    ase.io.write(tmp_path / "a.traj", atoms)
    (sample,) = open_reader(tmp_path / "a.traj").read(0, 1)
    assert sample["energy"] == -31
    assert (sample["forces"] == 1).all()
    assert bytes(sample["group"]) == b"dimer"


def test_structures_without_labels_are_read_for_prediction_only(tmp_path):
    path = tmp_path / "MgO.cif"
    atoms = Atoms("MgO", scaled_positions=[[0, 0, 0], [0.5, 0.5, 0.5]], cell=[3, 3, 3], pbc=True)
    ase.io.write(path, atoms)
    with pytest.raises(DataError, match=r"MgO.cif: no frame has an energy"):
        open_reader(path)
    (sample,) = open_reader(path, LabelOptions(allow_unlabelled=True)).read(0, 1)
    assert sorted(sample["atomic_numbers"].tolist()) == [8, 12]


def test_a_format_without_random_access_is_read_onwards_and_again(tmp_path):
    path = tmp_path / "XDATCAR"
    ase.io.write(path, [labelled(i) for i in range(6)], format="vasp-xdatcar")
    reader = open_reader(path, LabelOptions(allow_unlabelled=True))
    heights = [float(s["positions"][1, 2]) for s in reader.read(0, 6)]
    for start, stop in [(1, 3), (4, 6), (0, 2)]:
        assert [float(s["positions"][1, 2]) for s in reader.read(start, stop)] == heights[
            start:stop
        ]
    np.testing.assert_allclose(heights, 2 + 0.01 * np.arange(6), atol=1e-6)


def test_a_truncated_trajectory_is_refused(tmp_path):
    path = tmp_path / "run.traj"
    ase.io.write(path, [labelled(i) for i in range(5)])
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(DataError, match=r"run.traj, frame 4: ASE cannot read it as 'traj'"):
        open_reader(path)


@pytest.mark.parametrize("content", [b"\x00\x01\x02" * 50, b"nothing of use\n"])
def test_an_unknown_format_is_named(tmp_path, content):
    path = tmp_path / "data.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"data.bin: is in no format that ASE re"):
        open_reader(path)


class _Bomb:
    def __reduce__(self):
        return (pytest.fail, ("the pickle was loaded",))


@pytest.mark.parametrize("name", ["data.pckl", "data.xyz", "data.traj", "data.db"])
def test_a_pickle_is_not_loaded_whatever_its_name(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(TrustError, match=r"is a pickle, which can run .* pass `trust=True`"):
        open_reader(path)


def test_a_trusted_pickle_of_atoms_is_read(tmp_path):
    path = tmp_path / "data.pckl"
    path.write_bytes(pickle.dumps([labelled(i) for i in range(3)]))
    reader = open_reader(path, LabelOptions(trust=True))
    assert [float(s["energy"]) for s in reader.read(1, 3)] == [-6, -7]
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(DataError, match="holds dict, not ASE Atoms"):
        open_reader(path, LabelOptions(trust=True))
