"""Rows of a complex: paired by species, the rest block by block, drawn and read as stacked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevatron.data.proteins import rows as rows_module
from bevatron.data.proteins.alignments import merge_alignment
from bevatron.data.proteins.rows import NO_ROW, sample_rows, stack_rows
from bevatron.data.proteins.stored_alignment import StoredAlignment
from bevatron.data.readers.proteins.alphabet import GAP


def alignment(rows, species, deletions=None):
    rows = np.asarray(rows, dtype=np.int8)
    raw = {
        "rows": rows,
        "deletions": np.zeros(rows.shape, dtype=np.uint16) if deletions is None else deletions,
        "species": np.asarray(species, dtype=np.int32),
        "files": np.zeros(1, dtype=np.int32),
        "file_rows": np.full(1, len(rows), dtype=np.int32),
    }
    return StoredAlignment.of(merge_alignment(raw), "a")


def distinct(similarities, width=8):
    """Rows that agree with the query in so many columns, all different."""
    rows = [np.zeros(width)]
    for number, same in enumerate(similarities, start=1):
        rows.append(np.where(np.arange(width) < same, 0, number))
    return np.array(rows)


def random_alignment(rng, num_rows, width, num_species):
    rows = rng.integers(0, 21, (num_rows, width))
    deletions = rng.integers(0, 3, (num_rows, width)).astype(np.uint16)
    return alignment(rows, rng.integers(0, num_species, num_rows), deletions)


def test_species_of_more_chains_come_first_and_rows_pair_by_similarity():
    # Rows 1.. of each; 0 is no species.
    first = alignment(distinct([2, 5, 3, 4, 1]), [0, 30, 30, 10, 0, 40])
    second = alignment(distinct([4, 3, 2]), [0, 30, 10, 20])
    third = alignment(distinct([3, 2, 1]), [0, 20, 30, 30])
    stack = stack_rows([first, second, third]).rows
    expected = [
        [0, 0, 0],
        [2, 1, 2],  # species 30, in all three; its most similar rows
        [3, 2, NO_ROW],  # species 10
        [NO_ROW, 3, 1],  # species 20
        # In no pair:
        [1, NO_ROW, NO_ROW],
        [4, NO_ROW, NO_ROW],
        [5, NO_ROW, NO_ROW],  # species 40 is in one alone
        [NO_ROW, NO_ROW, 3],
    ]
    assert sorted(stack[2:4].tolist()) == sorted(expected[2:4])
    assert stack[:2].tolist() == expected[:2]
    assert stack[4:].tolist() == expected[4:]


def test_a_single_sequence_keeps_the_order_of_its_rows():
    stack = stack_rows([alignment(distinct([1, 2, 3]), [0, 5, 5, 6])]).rows
    assert stack.tolist() == [[0], [1], [2], [3]]


def test_no_alignment_leaves_the_query_alone():
    stack = stack_rows([])
    assert stack.rows.shape == (1, 0)
    query = np.array([3, 31], dtype=np.int8)
    found = sample_rows(
        stack, np.array([-1, -1]), np.array([0, -1]), query, 8, np.random.default_rng(0)
    )
    assert found["msa"].tolist() == [[3, 31]]
    assert found["profile"].argmax(axis=1).tolist() == [3, 31]


@given(seed=st.integers(0, 200), number=st.integers(1, 4))
def test_every_row_is_in_the_stack_once_or_in_pairs_of_one_species(seed, number):
    rng = np.random.default_rng(seed)
    alignments = [random_alignment(rng, int(rng.integers(1, 30)), 6, 5) for _ in range(number)]
    stack = stack_rows(alignments).rows
    assert (stack[0] == 0).all()
    for place, one in enumerate(alignments):
        assert set(stack[:, place].tolist()) >= set(range(one.num_rows))
    members = (stack != NO_ROW).sum(axis=1)
    paired = stack[1 : 1 + np.searchsorted(-members[1:], -1)] if number > 1 else stack[:0]
    assert (np.diff(members[1 : len(paired) + 1]) <= 0).all()
    for row in paired:
        of_row = [
            set(alignments[place].species[alignments[place].species_row == r].tolist())
            for place, r in enumerate(row)
            if r != NO_ROW
        ]
        assert set.intersection(*of_row)
    unpaired = stack[1 + len(paired) :]
    assert ((unpaired != NO_ROW).sum(axis=1) == 1).all()


def test_deep_alignments_share_what_a_complex_may_hold(monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_ROWS", 21)
    rng = np.random.default_rng(0)
    stack = stack_rows([random_alignment(rng, depth, 9, 1) for depth in (5, 100, 40)]).rows
    assert [(stack[1:, place] != NO_ROW).sum() for place in range(3)] == [4, 8, 8]


@given(seed=st.integers(0, 200), num_rows=st.integers(1, 40))
def test_a_sample_holds_the_rows_that_it_drew(seed, num_rows):
    rng = np.random.default_rng(seed)
    alignments = [random_alignment(rng, 15, 7, 3), random_alignment(rng, 9, 5, 3)]
    stack = stack_rows(alignments)
    # Two copies of the first chain, the second, a ligand, a nucleotide without an alignment.
    sequence = np.array([0] * 5 + [0] * 3 + [1] * 4 + [-1, -1])
    column = np.array([1, 2, 3, 4, 5, 1, 1, 6, 0, 1, 2, 4, -1, 3])
    query = np.full(len(column), GAP, dtype=np.int8)
    query[-1] = 27
    found = sample_rows(stack, sequence, column, query, num_rows, np.random.default_rng(seed))
    again = sample_rows(stack, sequence, column, query, num_rows, np.random.default_rng(seed))
    for name, value in found.items():
        assert value.tobytes() == again[name].tobytes()
    size = min(num_rows, len(stack.rows))
    assert found["msa"].shape == found["deletion"].shape == (size, 14)
    whole = [a.read(slice(None), np.arange(a.num_columns)) for a in alignments]
    expected = np.full((len(stack.rows), 14), GAP, dtype=np.int8)
    deletions = np.zeros((len(stack.rows), 14), dtype=np.uint8)
    expected[0] = query
    for token, (place, at) in enumerate(zip(sequence, column, strict=True)):
        if place >= 0:
            has = stack.rows[:, place] != NO_ROW
            rows = stack.rows[has, place]
            expected[has, token] = whole[place][0][rows, at]
            deletions[has, token] = whole[place][1][rows, at]
            np.testing.assert_array_equal(found["profile"][token], alignments[place].profile[at])
    table = np.concatenate([expected, deletions.view(np.int8)], axis=1).tolist()
    drawn = np.concatenate([found["msa"], found["deletion"].view(np.int8)], axis=1).tolist()
    assert drawn[0] == table[0]
    place = 0
    for row in drawn:  # in their order
        place = table.index(row, place)
    np.testing.assert_allclose(found["profile"].sum(axis=1), 1.0, rtol=1e-5)


def test_every_row_is_drawn_as_often():
    stack = stack_rows([random_alignment(np.random.default_rng(0), 21, 4, 1)])
    counts = np.zeros(len(stack.rows))
    for seed in range(2000):
        counts[rows_module._draw(len(counts), 6, np.random.default_rng(seed))] += 1
    assert counts[0] == 2000
    assert counts[1:].sum() == 2000 * 5
    assert counts[1:].min() > 400
    assert counts[1:].max() < 600


def test_no_rows_at_all_is_still_the_query():
    stack = stack_rows([alignment(distinct([]), [0])])
    found = sample_rows(
        stack,
        np.zeros(8, dtype=np.int64),
        np.arange(8),
        np.full(8, GAP, dtype=np.int8),
        1024,
        np.random.default_rng(0),
    )
    assert found["msa"].tolist() == [[0] * 8]
    with pytest.raises(IndexError):
        sample_rows(
            stack,
            np.zeros(1, dtype=np.int64),
            np.array([8]),
            np.full(1, GAP, dtype=np.int8),
            4,
            np.random.default_rng(0),
        )
