"""Neighbour lists against a brute-force search, ASE's and what mace's convention says."""

import pickle
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.data.neighbours import add_neighbours, neighbour_list, span_volume
from bevatron.errors import DataError


def brute_force(positions, cell, pbc, cutoff):
    """All (receiver, sender, shift) shorter than the cutoff, by trying every image in reach."""
    cell = np.asarray(cell, dtype=float)
    reach = [0, 0, 0]
    periodic = np.asarray(pbc, bool)
    if periodic.any():
        inverse = np.linalg.pinv(cell[periodic])
        spread = np.ptp(positions, axis=0) if len(positions) else np.zeros(3)
        far = np.linalg.norm(spread) + cutoff
        for axis, column in zip(np.flatnonzero(periodic), inverse.T, strict=True):
            reach[axis] = int(np.ceil(far * np.linalg.norm(column))) + 1
    shifts = np.array(list(product(*[range(-n, n + 1) for n in reach])))
    found = []
    for i, j in product(range(len(positions)), repeat=2):
        distances = np.linalg.norm(positions[j] - positions[i] + shifts @ cell, axis=1)
        for index in np.flatnonzero(distances < cutoff):
            shift = tuple(shifts[index].tolist())
            if i != j or shift != (0, 0, 0):
                found.append((j, i, *shift))
    return sorted(found)


def rows(edges, shifts):
    return [(int(j), int(i), *map(int, s)) for (i, j), s in zip(edges, shifts, strict=True)]


@st.composite
def structures(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_atoms = draw(st.integers(1, 6))
    pbc = np.array(draw(st.tuples(st.booleans(), st.booleans(), st.booleans())))
    kind = draw(st.sampled_from(["cubic", "triclinic", "left-handed", "elongated"]))
    cell = np.eye(3) * draw(st.floats(1.5, 6.0))
    if kind == "triclinic":
        cell = cell + rng.uniform(-0.5, 0.5, (3, 3)) * cell[0, 0]
    elif kind == "left-handed":
        cell = cell[[1, 0, 2]]
    elif kind == "elongated":
        cell = np.diag([1.6, 3.0, 12.0])
    if draw(st.booleans()):
        cell[~pbc] = 0.0
    outside = draw(st.sampled_from([1.0, 1.0, 4.0]))
    positions = rng.uniform(-outside, outside, (num_atoms, 3)) * draw(st.floats(1.0, 4.0))
    return positions, cell, pbc, draw(st.floats(0.5, 4.5))


@settings(max_examples=150, deadline=None)
@given(structures())
def test_edges_are_those_of_a_brute_force_search_in_their_order(structure):
    positions, cell, pbc, cutoff = structure
    if pbc.any() and not span_volume(cell, pbc, 0.7):
        return
    expected = brute_force(positions, cell, pbc, cutoff)
    try:
        edges, shifts = neighbour_list(positions, cell, pbc, cutoff)
    except DataError:
        assert any(_length(row, positions, cell) < 1e-3 for row in expected)
        return
    assert edges.dtype == shifts.dtype == np.int32
    found = rows(edges, shifts)
    near = set(found) ^ set(expected)
    assert all(abs(_length(row, positions, cell) - cutoff) < 1e-9 for row in near)
    assert found == sorted(found)


def _length(row, positions, cell):
    j, i, *shift = row
    return float(np.linalg.norm(positions[j] - positions[i] + np.array(shift) @ cell))


def test_single_atom_in_a_small_box_sees_its_own_images():
    edges, shifts = neighbour_list(np.zeros((1, 3)), np.eye(3), True, 2.1)
    assert rows(edges, shifts) == brute_force(np.zeros((1, 3)), np.eye(3), [True] * 3, 2.1)
    assert len(edges) > 26
    assert (edges == 0).all()


def test_isolated_atom_and_empty_structure_have_no_edges():
    for positions in (np.zeros((1, 3)), np.zeros((0, 3))):
        edges, shifts = neighbour_list(positions, np.zeros((3, 3)), False, 5.0)
        assert edges.shape == (0, 2)
        assert shifts.shape == (0, 3)


@pytest.mark.parametrize("third", [[0, 0, 0], [0, 0, 20.0], [0, 0, 0.5], [1.0, 1.0, 0]])
def test_slab_does_not_depend_on_the_vector_of_its_open_axis(third):
    positions = np.random.default_rng(5).uniform(-1, 1, (30, 3)) * [4, 4, 30]
    cell = np.array([[2.5, 0, 0], [0.3, 2.5, 0], third])
    pbc = [True, True, False]
    edges, shifts = neighbour_list(positions, cell, pbc, 3.0)
    assert (shifts[:, 2] == 0).all()
    assert rows(edges, shifts) == brute_force(positions, cell * [[1], [1], [0]], pbc, 3.0)


def test_every_edge_has_its_reverse():
    rng = np.random.default_rng(3)
    edges, shifts = neighbour_list(rng.uniform(-9, 9, (30, 3)), 6 * np.eye(3), True, 4.0)
    there = set(rows(edges, shifts))
    back = {(i, j, -a, -b, -c) for j, i, a, b, c in there}
    assert there == back


def test_far_away_shifts_are_sorted_without_overflow():
    positions = np.array([[0.0, 0, 0], [1e6, 0, 0], [0, 3e6 + 1, 0], [1.0, 1.0, 1e7]])
    edges, shifts = neighbour_list(positions, 3 * np.eye(3), True, 2.9)
    assert rows(edges, shifts) == sorted(rows(edges, shifts))
    vectors = positions[edges[:, 1]] - positions[edges[:, 0]] + shifts @ (3 * np.eye(3))
    assert (np.linalg.norm(vectors, axis=1) < 2.9).all()


@pytest.mark.parametrize(
    ("positions", "cell", "pbc", "message"),
    [
        ([[0, 0, 0], [0, 0, 1e-5]], np.zeros((3, 3)), False, "atoms 0 and 1 coincide"),
        ([[0, 0, 0], [4, 4, 0]], 4 * np.eye(3), True, "atoms 0 and 1 coincide"),
        ([[0, 0, 0]], np.zeros((3, 3)), True, "zero volume"),
        ([[0, 0, 0]], np.ones((3, 3)), True, "zero volume"),
        ([[0, 0, 0]], np.diag([100, 100, 0.05]), True, "zero volume"),
        ([[0, 0, np.nan]], np.eye(3), True, "NaN"),
    ],
)
def test_nonsense_is_refused(positions, cell, pbc, message):
    with pytest.raises(DataError, match=message):
        neighbour_list(positions, cell, pbc, 3.0)


def test_a_cutoff_of_zero_is_refused():
    with pytest.raises(DataError, match="cutoff is 0"):
        neighbour_list(np.zeros((1, 3)), np.eye(3), True, 0)


@pytest.mark.parametrize("size", [1e10, 1e200, 1.7e308])
@pytest.mark.parametrize("periodic", [True, False])
def test_sizes_that_no_structure_has_are_refused(size, periodic):
    """vesin ends the process with a signal."""
    water = np.array([[0.0, 0, 0], [1.0, 0, 0], [0.0, 1.0, 0]])
    with pytest.raises(DataError, match=r"lattice vector 2 .* length of .* Å, at most 1e\+06"):
        neighbour_list(water, np.diag([9.0, size, 9.0]), periodic, 5.0)
    far = np.array([[0.0, 0, 0], [1.0, 0, 0], [-size, 1.0, 0]])
    with pytest.raises(DataError, match=r"atom 2 \(counting from 0\) is .* away from the others"):
        neighbour_list(far, 9 * np.eye(3), periodic, 5.0)


THIN = {
    "wire": ([[0, 0, 0], [1.0, 0, 0], [0, 0, 2.0]], np.diag([5.0, 5.0, 9e5]), True),
    "skewed wire": (
        [[0, 0, 0], [1.0, 0, 0], [0, 0, 2.0]],
        [[10.0, 0, 0], [3.0, 10.0, 0], [9.0, 0, 9e5]],
        True,
    ),
    "fragments in a plane": ([[0, 0, 0], [1.0, 0, 0], [5e4, 5e4, 0]], np.zeros((3, 3)), False),
    "fragments on a line": ([[0, 0, 0], [1.0, 0, 0], [0, 0, 9e5]], np.zeros((3, 3)), False),
    "fragments above a slab": ([[0, 0, 0], [1.0, 0, 0], [0, 0, 9e5]], 6 * np.eye(3), (1, 1, 0)),
}


@pytest.mark.parametrize("name", THIN)
def test_thin_boxes_at_which_vesin_aborts(name):
    positions, cell, pbc = THIN[name]
    positions = np.array(positions, dtype=float)
    periodic = np.broadcast_to(np.asarray(pbc, dtype=bool), (3,))
    found = rows(*neighbour_list(positions, cell, periodic, 5.0))
    near = np.linalg.norm(positions, axis=1) < 100
    shorter = np.array(cell, dtype=float)
    shorter[2, 2] = min(shorter[2, 2], 50.0)
    expected = brute_force(positions[near], shorter, periodic, 5.0)
    alone = brute_force(np.zeros((1, 3)), shorter, periodic, 5.0)
    expected += [(2, 2, *shift) for _, _, *shift in alone if not near.all()]
    assert sorted(found) == sorted(expected)


def test_add_neighbours_pickles_and_leaves_its_sample_alone():
    sample = {
        "positions": np.array([[0.0, 0, 0], [1.0, 0, 0]]),
        "cell": np.zeros((3, 3)),
        "pbc": np.zeros(3, bool),
    }
    featurize = pickle.loads(pickle.dumps(partial(add_neighbours, cutoff=2.0)))
    result = featurize(sample)
    assert "edges" not in sample
    assert result["edges"].tolist() == [[1, 0], [0, 1]]
    assert result["edge_shifts"].tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "name", ["mptrj_random_1k", "mlearn_Li_training", "ethanol_methanol_train", "random_TP"]
)
def test_real_structures_agree_with_ase(shared, name):
    import ase.io
    from ase.neighborlist import neighbor_list

    path = shared / "data" / "mace" / f"{name}.extxyz.gz"
    for atoms in ase.io.read(path, index="0:100:25", format="extxyz"):
        i, j, shift = neighbor_list("ijS", atoms, 4.5)
        edges, shifts = neighbour_list(atoms.positions, atoms.cell.array, atoms.pbc, 4.5)
        expected = sorted(
            (int(b), int(a), *map(int, s)) for a, b, s in zip(i, j, shift, strict=True)
        )
        assert rows(edges, shifts) == expected
