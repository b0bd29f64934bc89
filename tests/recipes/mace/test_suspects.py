"""Structures that are warned of before they are trained on, by file, frame and number."""

import gzip
import re
from importlib.resources import files

import ase.io
import numpy as np
import pytest

from bevatron.cli import main
from bevatron.data.readers import LabelOptions
from bevatron.recipes.mace.data import DataConfig, load_structures
from bevatron.recipes.mace.stores import prepare_structures
from bevatron.recipes.mace.suspects import robust_residuals, suspects

DATA = files("bevatron.recipes") / "demo_data" / "structures.extxyz.gz"


@pytest.fixture
def frames():
    """Sixty bundled structures of methanol and other molecules."""
    with gzip.open(str(DATA), "rt") as file:
        return ase.io.read(file, index=":60", format="extxyz")


@pytest.fixture
def stored(frames, tmp_path):
    """Prepares the frames, as they are by then, into a store."""

    def prepare():
        path = tmp_path / "data.extxyz"
        ase.io.write(path, frames, format="extxyz")
        return prepare_structures([path], tmp_path / "store", 3.0, LabelOptions(), workers=1)

    return prepare


def test_sound_structures_give_no_warning(stored):
    assert suspects(stored()) == []


def test_an_energy_far_from_the_others_is_named(frames, stored):
    frames[7].info["REF_energy"] += 1e6
    frames[31].info["REF_energy"] -= 300.0
    (line,) = suspects(stored())
    assert line.startswith("warning: energies far from the others in 2 structures (")
    first, second = line.partition("(")[2].split("; ")[:2]
    size = len(frames[7])
    assert "data.extxyz, frame 7: " in first
    assert f"{1e6 / size:.3g} eV/atom off" in first
    assert "data.extxyz, frame 31: " in second
    assert re.search(r" 33\.\d eV/atom off", second)


def test_positions_in_bohr_are_suspected(frames, stored):
    for frame in frames:
        frame.positions /= 0.529177
    (line,) = suspects(stored())
    assert "data.extxyz, frame " in line
    assert re.search(r"at (1\.[89]|2)\d* times the length of a covalent bond; are positions", line)


def test_a_noble_gas_has_no_bonds_to_compare_with(frames, stored):
    x = [[0, 0, 0], [2.9, 0, 0]]
    frames[:] = [ase.Atoms("Ne2", x, info={"REF_energy": -1.0 - i / 10}) for i in range(6)]
    for frame in frames:
        frame.arrays["REF_forces"] = np.ones((2, 3))
    assert suspects(stored()) == []


def test_atoms_too_close_are_named(frames, stored):
    x = frames[4].positions
    x[3] = x[1] + np.array([0.0, 0.02, 0.0])
    (line,) = suspects(stored())
    assert "atoms closer than 0.5 Å in 1 structure (" in line
    assert "data.extxyz, frame 4: atoms 1 and 3, 0.02 Å apart)" in line


def test_few_of_many_are_named(frames, stored):
    for atoms in frames[10:20]:
        atoms.info["REF_energy"] += 5e4
    (line,) = suspects(stored())
    assert "in 10 structures (" in line
    assert line.count("frame ") == 3
    assert "; ...)" in line


def test_stores_of_earlier_versions_are_read(stored):
    store = stored()
    del store.manifest["summary"]["all"]["distances"]
    assert suspects(store) == []


def test_training_and_preparing_warn(frames, stored, tmp_path, capsys):
    frames[7].info["REF_energy"] += 1e6
    store = stored()
    data = load_structures(DataConfig(train=(store.path,)), 3.0, tmp_path / "prepared")
    assert sum("frame 7: " in line for line in data.report) == 1
    out = str(tmp_path / "again")
    given = ["prepare", str(tmp_path / "data.extxyz"), "--out", out, "--cutoff", "3.0"]
    assert main([*given, "--workers", "1"]) == 0
    assert "warning: energies far from the others" in capsys.readouterr().out


def test_outliers_do_not_move_the_fit():
    rng = np.random.default_rng(1)
    shares = rng.dirichlet([1.0, 1.0, 1.0], 200)
    energies = np.array([-13.0, -1000.0, -2000.0])
    noise = rng.normal(scale=0.01, size=200)
    off = np.zeros(200)
    off[:20] = rng.choice([-1, 1], 20) * 10.0 ** rng.uniform(1, 8, 20)
    residual, known = robust_residuals(shares, shares @ energies + noise + off)
    assert known.all()
    assert np.abs(residual[20:]).max() < 0.06
    np.testing.assert_allclose(residual[:20], off[:20], rtol=1e-2)


def test_elements_that_the_fit_has_not_seen_are_left_alone(monkeypatch):
    monkeypatch.setattr("bevatron.recipes.mace.suspects.FITTED", 10)
    shares = np.eye(2)[np.array([0] * 300 + [1])]
    residual, known = robust_residuals(shares, np.full(301, 3.0))
    assert known[:300].all()
    assert not known[300]
    assert np.abs(residual[:300]).max() < 1e-9
