"""Structures that nothing can be computed for are refused with file and frame."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.data.readers import open_reader
from bevatron.data.readers.checks import coinciding_atoms
from bevatron.errors import DataError

GOOD = "2\nProperties=species:S:1:pos:R:3 energy=-1\nC 0 0 0\nO 0 0 1.1\n"


def frame(first, second, header=""):
    return f"2\n{header} Properties=species:S:1:pos:R:3 energy=-1\n{first}\n{second}\n"


CUBE = 'Lattice="4 0 0 0 4 0 0 0 4"'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (frame("C 0 0 0", "O 0 0 nan"), "the position of atom 1 is NaN or infinite"),
        (frame("C 0 0 0", "O inf 0 1"), "the position of atom 1 is NaN or infinite"),
        (frame("C 0 0 0", "Xx 0 0 1"), "atom 1 is 'Xx', which is not an element"),
        (frame("X 0 0 0", "C 0 0 1"), "atom 0 is 'X', which is not an element"),
        (frame("D 0 0 0", "C 0 0 1"), "atom 0 is 'D', which is not an element"),
        (frame("0 0 0 0", "C 0 0 1"), "atom 0 is '0', which is not an element"),
        (frame("C 0 0 0", "O 0 0 1", 'pbc="T T T"'), "zero volume although pbc is 'T T T'"),
        (
            frame("C 0 0 0", "O 0 0 1", 'Lattice="4 0 0 0 4 0 4 4 0"'),
            "the cell has zero volume although pbc is 'T T T'",
        ),
        (
            frame("C 0 0 0", "O 0 0 1", 'Lattice="4 0 0 8 0 0 0 0 9" pbc="T T F"'),
            "the cell has zero volume although pbc is 'T T F'",
        ),
        (
            frame("C 0 0 0", "O 0 0 1", 'Lattice="4 0 0 0 nan 0 0 0 9"'),
            "the cell holds NaN or infinity",
        ),
        (frame("C 0 0 0", "O 0 0.0005 0"), "atoms 0 and 1 coincide"),
        (frame("C 0 0 0", "O 4 8 -3.9999", CUBE), "atoms 0 and 1 coincide"),
        ("0\nProperties=species:S:1:pos:R:3 energy=-1\n", "there are no atoms"),
    ],
)
def test_a_bad_frame_is_named(tmp_path, bad, message):
    path = tmp_path / "train.xyz"
    path.write_text(GOOD + bad)
    reader = open_reader(path)
    assert len(list(reader.read(0, 1))) == 1
    with pytest.raises(DataError) as caught:
        list(reader.read(1, 2))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}, frame 1: ")
    assert "\n" not in str(caught.value)


def test_a_slab_without_its_third_vector_is_fine(tmp_path):
    path = tmp_path / "slab.xyz"
    path.write_text(frame("C 0 0 0", "O 0 0 1", 'Lattice="4 0 0 0 4 0 0 0 0" pbc="T T F"'))
    assert len(list(open_reader(path).read(0, 1))) == 1


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_atoms=st.integers(2, 40),
    pbc=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    offset=st.floats(0, 3e-3),
    twin=st.booleans(),
    lattice=st.booleans(),
)
def test_coinciding_atoms_are_found_in_any_cell(seed, num_atoms, pbc, offset, twin, lattice):
    rng = np.random.default_rng(seed)
    cell = 5 * np.eye(3) + rng.uniform(-1, 1, (3, 3))
    fractions = rng.random((num_atoms, 3))
    if lattice:
        # Many atoms with equal coordinates, as in a crystal.
        grid = np.stack(np.meshgrid(*[np.arange(4) / 4] * 3), axis=-1).reshape(-1, 3)
        fractions = rng.permutation(grid)[:num_atoms]
    positions = fractions @ cell
    periodic = np.array(pbc)
    distance = np.inf
    if twin:
        direction = rng.normal(size=3)
        image = rng.integers(-3, 4, 3) * periodic
        moved = offset * direction / np.linalg.norm(direction)
        positions[-1] = positions[0] + moved + image @ cell
        distance = offset
    if abs(distance - 1e-3) < 1e-9:
        return
    found = coinciding_atoms(positions, cell, periodic)
    if distance < 1e-3:
        assert found == (0, num_atoms - 1)
    elif lattice or not twin:
        assert found is None or _distance(positions, found, cell, periodic) < 1e-3


def _distance(positions, pair, cell, periodic):
    images = np.stack(np.meshgrid(*[np.arange(-4, 5)] * 3), axis=-1).reshape(-1, 3) * periodic
    return np.linalg.norm(positions[pair[1]] - positions[pair[0]] + images @ cell, axis=1).min()
