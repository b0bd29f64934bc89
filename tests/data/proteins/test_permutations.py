"""Permutations of atoms are the symmetries of a bond graph, all of them and nothing else."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bevatron.data.proteins.permutations import automorphisms


@st.composite
def graphs(draw, most=6):
    number = draw(st.integers(1, most))
    colours = draw(st.lists(st.integers(0, 1), min_size=number, max_size=number))
    possible = list(itertools.combinations(range(number), 2))
    bonds = draw(st.lists(st.sampled_from(possible), unique=True)) if possible else []
    return colours, np.array(bonds, dtype=np.int64).reshape(-1, 2)


def matrix(number, bonds):
    joined = np.zeros((number, number), dtype=bool)
    joined[bonds[:, 0], bonds[:, 1]] = joined[bonds[:, 1], bonds[:, 0]] = True
    return joined


@given(graphs())
def test_all_symmetries_of_a_small_graph_are_found(graph):
    colours, bonds = graph
    joined = matrix(len(colours), bonds)
    expected = {
        p
        for p in itertools.permutations(range(len(colours)))
        if all(colours[i] == colours[j] for i, j in enumerate(p))
        and (joined[np.ix_(p, p)] == joined).all()
    }
    found = automorphisms(colours, bonds)
    assert found[0].tolist() == list(range(len(colours)))
    assert len(found) == len(expected)
    assert {tuple(p) for p in found.tolist()} == expected


def test_of_many_symmetries_as_many_as_asked_for_are_found():
    # Six phosphates with three free oxygens each: 6^6 orders of the oxygens alone.
    bonds = np.array([(p, 6 + 3 * p + o) for p in range(6) for o in range(3)])
    colours = [15] * 6 + [8] * 18
    found = automorphisms(colours, bonds, most=100)
    joined = matrix(24, bonds)
    assert len(np.unique(found, axis=0)) == len(found) == 100
    assert all((joined[np.ix_(p, p)] == joined).all() for p in found)


def test_a_long_chain_needs_no_deep_recursion():
    number = 1200  # Python allows 1,000 calls inside each other
    bonds = np.stack([np.arange(number - 1), np.arange(1, number)], axis=1)
    found = automorphisms([6] * number, bonds)
    assert found.tolist() == [list(range(number)), list(range(number))[::-1]]


def test_a_bonded_atom_of_a_residue_stays(dictionary):
    from bevatron.data.proteins.variants import Variants

    names = ["N", "CA", "C", "O", "CB", "CG", "CD1", "CD2", "CE1", "CE2", "CZ"]
    ring = Variants(dictionary).get("PHE", True, names)
    assert len(ring.permutations(frozenset())) == 2
    assert len(ring.permutations(frozenset({6}))) == 1
    assert len(ring.permutations(frozenset({6, 7}))) == 1  # two that are alike do not change places


def test_a_residue_without_an_atom_of_its_frame_has_none(dictionary):
    from bevatron.data.proteins.variants import Variants

    variants = Variants(dictionary)
    assert variants.get("GLY", True, ["N", "CA", "C", "O"]).frame.tolist() == [[0, 1, 2]]
    assert variants.get("GLY", True, ["N", "CA", "O"]).frame.tolist() == [[-1] * 3]
