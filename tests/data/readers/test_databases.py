"""ASE databases of every kind hold the same samples."""

import pickle
import sys

import ase.db
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from bevatron.data.readers import databases, open_reader
from bevatron.errors import DataError, MissingPackageError


def write(path, frames, **row):
    if path.suffix == ".aselmdb":
        pytest.importorskip("ase_db_backends")
    kind = {"type": "aselmdb"} if path.suffix == ".aselmdb" else {}
    with ase.db.connect(path, use_lock_file=False, **kind) as database:
        for atoms in frames:
            database.write(atoms, **row)


def labelled(i):
    atoms = Atoms("CuZr", positions=[[0, 0, 0], [1.5, 1.5, 1.5 + 0.01 * i]], cell=[3] * 3, pbc=True)
    atoms.calc = SinglePointCalculator(
        atoms,
        energy=-8.0 - i,
        forces=np.full((2, 3), 0.1 * i),
        stress=np.arange(1.0, 7) * 1e-3,
    )
    return atoms


@pytest.mark.parametrize("suffix", [".db", ".json", ".aselmdb"])
def test_rows_become_samples_by_ranges(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    write(path, [labelled(i) for i in range(9)], key_value_pairs={"config_type": "alloy"})
    reader = pickle.loads(pickle.dumps(open_reader(path)))
    assert reader.num_samples == 9
    assert [float(s["energy"]) for s in reader.read(3, 6)] == [-11, -12, -13]
    (sample,) = reader.read(8, 9)
    np.testing.assert_allclose(sample["forces"], 0.8)
    np.testing.assert_allclose(sample["stress"][0], [1e-3, 6e-3, 5e-3])
    np.testing.assert_allclose(sample["positions"][1, 2], 1.58)
    assert bytes(sample["group"]) == b"alloy"
    assert sample["pbc"].all()
    assert sample["source"].tolist() == [0, 8]
    assert "9 frames; energy: all from energy" in reader.report()[0]


@pytest.mark.parametrize("suffix", [".db", ".aselmdb"])
def test_deleted_rows_leave_no_gap(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    write(path, [labelled(i) for i in range(6)])
    if suffix == ".aselmdb":
        pytest.importorskip("ase_db_backends")
    kind = {"type": "aselmdb"} if suffix == ".aselmdb" else {}
    ase.db.connect(path, use_lock_file=False, **kind).delete([2, 3])
    reader = open_reader(path)
    assert [float(s["energy"]) for s in reader.read(0, 4)] == [-8, -11, -12, -13]


def test_labels_in_key_value_pairs_and_data_are_found(tmp_path):
    path = tmp_path / "data.db"
    atoms = Atoms("H2", positions=[[0, 0, 0], [0, 0, 0.7]])
    write(
        path,
        [atoms],
        key_value_pairs={"REF_energy": -31.5},
        data={"REF_forces": np.arange(6.0).reshape(2, 3), "info": {"config_type": "x"}},
    )
    (sample,) = open_reader(path).read(0, 1)
    assert sample["energy"] == -31.5
    assert sample["forces"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert bytes(sample["group"]) == b"x"


def test_forces_of_another_length_are_refused(tmp_path):
    path = tmp_path / "data.db"
    atoms = Atoms("H2", positions=[[0, 0, 0], [0, 0, 0.7]])
    write(path, [atoms], data={"energy": -3.0, "forces": np.ones((5, 3))})
    message = r"data.db, frame 0: the forces 'forces' have shape \(5, 3\); expected \(2, 3\)"
    with pytest.raises(DataError, match=message):
        open_reader(path)


def test_a_large_database_is_surveyed_by_samples_and_says_so(tmp_path, monkeypatch):
    path = tmp_path / "data.db"
    write(path, [labelled(i) for i in range(12)])
    monkeypatch.setattr(databases, "SURVEYED_ROWS", 4)
    reader = open_reader(path)
    assert "12 frames (4 of them surveyed); energy: all from energy" in reader.report()[0]
    assert len(list(reader.read(0, 12))) == 12


@pytest.mark.parametrize("name", ["data.db", "data.json", "data.aselmdb"])
def test_what_is_no_database_is_refused(tmp_path, name):
    if name.endswith(".aselmdb"):
        pytest.importorskip("ase_db_backends")
    path = tmp_path / name
    path.write_bytes(b"this is no database at all\n" * 50)
    with pytest.raises(DataError, match=f"{name}: cannot be read as an ASE database"):
        open_reader(path)


def test_the_extra_is_named_if_lmdb_is_missing(tmp_path, monkeypatch):
    path = tmp_path / "data.aselmdb"
    write(path, [labelled(0)])
    monkeypatch.setitem(sys.modules, "ase_db_backends", None)
    with pytest.raises(MissingPackageError, match=r"bevatron\[aselmdb\]"):
        open_reader(path)
