"""The bundled structures are what their README says, and their labels belong to them."""

import gzip
import io
from collections import Counter
from importlib.resources import files

import ase.io
import numpy as np
import pytest

FOLDER = files("bevatron.recipes") / "demo_data"


@pytest.fixture(scope="module")
def frames():
    text = gzip.decompress((FOLDER / "structures.extxyz.gz").read_bytes()).decode()
    return ase.io.read(io.StringIO(text), ":", format="extxyz")


def test_file_is_small_and_states_its_level_of_theory(frames):
    assert len((FOLDER / "structures.extxyz.gz").read_bytes()) < 2e6
    assert {frame.info["level_of_theory"] for frame in frames} == {"GFN2-xTB"}
    assert "GFN2-xTB" in (FOLDER / "README.md").read_text()


def test_groups_and_sizes_are_mixed(frames):
    counts = Counter(frame.info["config_type"] for frame in frames)
    assert len(frames) == 324
    assert counts["ice"] == 40
    assert counts["water_cluster_20"] == 12
    assert {len(frame) for frame in frames} >= {3, 6, 9, 24, 60}
    assert f"{sum(map(len, frames))} atoms" in (FOLDER / "README.md").read_text()


def test_every_structure_is_labelled_and_sound(frames):
    for frame in frames:
        assert np.isfinite(frame.info["REF_energy"])
        assert np.abs(frame.arrays["REF_forces"]).max() < 10
        assert ("REF_stress" in frame.info) == (frame.info["config_type"] == "ice")
        # Forces on a free molecule add up to nothing.
        assert np.abs(frame.arrays["REF_forces"].sum(axis=0)).max() < 2e-3
        distances = frame.get_all_distances(mic=frame.pbc.any())[np.triu_indices(len(frame), 1)]
        assert distances.min(initial=1.0) > 0.7


@pytest.mark.parametrize("number", [10, 40, 100, 200])
def test_labels_are_those_of_the_method(frames, number):
    tblite = pytest.importorskip("tblite.ase")
    frame = frames[number]
    frame.calc = tblite.TBLite(method="GFN2-xTB", verbosity=0)
    assert frame.get_potential_energy() == pytest.approx(frame.info["REF_energy"], abs=1e-3)
    np.testing.assert_allclose(frame.get_forces(), frame.arrays["REF_forces"], atol=1e-3)
