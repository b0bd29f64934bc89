"""A reused neighbour list is the one that would be built anew, whatever the atoms do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.data.neighbours import neighbour_list
from bevatron.data.verlet import VerletList
from bevatron.errors import ConfigError, DataError

CELL = np.array([[6.0, 0.0, 0.0], [1.0, 5.0, 0.0], [0.5, -0.7, 4.0]])


def assert_fresh(verlet, r, cell, pbc):
    for ours, fresh in zip(
        verlet.edges(r, cell, pbc), neighbour_list(r, cell, pbc, verlet.cutoff), strict=True
    ):
        np.testing.assert_array_equal(ours, fresh)
        assert ours.dtype == np.int32


@given(
    seed=st.integers(0, 2**32 - 1),
    skin=st.sampled_from([0.0, 0.3, 1.0]),
    pbc=st.sampled_from([(False,) * 3, (True,) * 3, (True, True, False)]),
    step=st.sampled_from([0.01, 0.1, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_edges_are_those_of_a_new_list(seed, skin, pbc, step):
    rng = np.random.default_rng(seed)
    verlet = VerletList(3.0, skin)
    r = rng.uniform(0, 6, size=(12, 3))
    for _ in range(8):
        assert_fresh(verlet, r, CELL, pbc)
        r = r + rng.normal(size=r.shape) * step


def test_list_is_kept_while_no_atom_moved_by_half_the_skin():
    rng = np.random.default_rng(0)
    verlet, r = VerletList(3.0, 0.5), rng.uniform(0, 6, size=(12, 3))
    verlet.edges(r)
    for _ in range(5):
        r[3, 0] += 0.049
        verlet.edges(r)
    assert verlet.num_builds == 1
    r[3, 0] += 0.01
    verlet.edges(r)
    assert verlet.num_builds == 2


def test_another_cell_other_axes_or_another_number_of_atoms_build_anew():
    rng = np.random.default_rng(0)
    verlet, r = VerletList(3.0, 0.5), rng.uniform(0, 6, size=(12, 3))
    for expected, (positions, cell, pbc) in enumerate(
        [
            (r, CELL, True),
            (r, CELL * 1.001, True),
            (r, CELL * 1.001, (True, True, False)),
            (r[:-1], CELL * 1.001, (True, True, False)),
            (r[:0], CELL, False),
        ],
        start=1,
    ):
        assert_fresh(verlet, positions, cell, pbc)
        assert verlet.num_builds == expected


def test_wrapping_an_atom_into_the_cell_is_noticed():
    verlet, r = VerletList(3.0, 0.5), np.array([[0.01, 0.0, 0.0], [2.0, 0.0, 0.0]])
    assert_fresh(verlet, r, CELL, True)
    assert_fresh(verlet, r + np.array([[6.0, 0, 0], [0, 0, 0]]), CELL, True)
    assert verlet.num_builds == 2


def test_nan_is_refused_and_the_list_recovers():
    verlet, r = VerletList(3.0, 0.5), np.eye(3)[:2]
    verlet.edges(r)
    with pytest.raises(DataError, match="NaN"):
        verlet.edges(r * np.nan)
    assert_fresh(verlet, r, CELL, True)


def test_negative_skin_is_refused():
    with pytest.raises(ConfigError, match="skin"):
        VerletList(3.0, -0.1)
