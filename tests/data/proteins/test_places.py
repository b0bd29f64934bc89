"""Queries of searches are found in the chains that they are, hold, or are a part of."""

import numpy as np
import pytest

from bevatron.data.proteins.alignment_files import OF_NO_CHAIN, AlignmentReader
from bevatron.data.proteins.places import (
    SHORTEST_PART,
    ChainSequences,
    Place,
    _shared,
    difference,
)
from bevatron.data.readers.proteins.alphabet import CLASSES, sequence_classes

LONG = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSG"
OTHER = "GSHMRYWPCKDEFNNTVVLLKKAAEEDDGGRRHH"


def classes(text):
    return sequence_classes("protein", text).tobytes()


@pytest.fixture(scope="module")
def chains():
    return ChainSequences(map(classes, [OTHER, LONG, "TT" + LONG, LONG]))


def test_a_query_that_is_a_chain_is_no_part_of_another(chains):
    assert chains.places(classes(LONG)) == [Place(classes(LONG), 0)]


def test_unknown_residues_are_any(chains):
    text = "X" + OTHER[1:9] + "X" + OTHER[10:]
    assert chains.places(classes(text)) == [Place(classes(OTHER), 0)]
    assert ChainSequences([classes(text)]).places(classes(OTHER)) == [Place(classes(text), 0)]
    assert not chains.places(classes("A" + OTHER[1:]))
    assert not chains.places(classes("X" * len(OTHER)))


def test_parts_are_found_wherever_they_lie(chains):
    part = classes(LONG[7 : 7 + SHORTEST_PART])
    assert chains.places(part) == [Place(classes(LONG), 7), Place(classes("TT" + LONG), 9)]
    assert not chains.places(part[:-1])
    assert chains.places(classes("AAA" + OTHER + "C")) == [Place(classes(OTHER), -3)]


def test_columns_that_a_partial_alignment_lacks_are_gaps(chains, tmp_path):
    part, whole = tmp_path / "part.a3m", tmp_path / "whole.a3m"
    first = 5
    query, changed = OTHER[first:28], "A" + OTHER[first + 1 : 28]
    part.write_text(f">q\n{query}\n>a\n{changed[:3]}cc{changed[3:]}\n")
    beyond = "-" * (len(OTHER) + 2) + "C"
    whole.write_text(f">q\nAA{OTHER}C\n>b\nAA{'-' * len(OTHER)}C\n>c\nC-{OTHER}-\n>d\n{beyond}\n")
    strange = tmp_path / "strange.a3m"
    strange.write_text(">q\nACDEFGHIKLMNPQRSTVWYACDEF\n")
    reader = AlignmentReader([part, whole, strange], chains=chains)
    (found,) = reader.read(0, 1)
    letters = ["".join(CLASSES[number] for number in row) for row in found["rows"].tolist()]
    gaps = "-" * first, "-" * (len(OTHER) - 28)
    assert letters == [OTHER, gaps[0] + changed + gaps[1], OTHER, OTHER]
    assert found["file_rows"].tolist() == [2, 2]
    assert np.flatnonzero(found["deletions"].any(axis=0)).tolist() == [first + 3]
    assert (reader.num_samples, reader.partial) == (1, 2)
    assert [path for path, _ in reader.rejects] == [str(strange)]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        (LONG[:24] + LONG[25:], "has 49 residues, that of 1abc_A 50; residue 25 is the first"),
        (LONG[:3] + "W" + LONG[3:], "has 51 residues, that of 1abc_A 50; residue 4 is the first"),
        ("W" + LONG[1:], "that of 1abc_A 50; residue 1 is the first to differ (W, not M)"),
        ("X" + LONG[1:25] + "W" + LONG[26:], "residue 26 is the first to differ (W, not R)"),
        (LONG[:24] + "ACDEFGHIKLMNPQ" + LONG[25:], ""),
        (LONG[::-1], ""),
    ],
)  # fmt: skip
def test_a_query_that_is_nearly_a_chain_is_told_from_it(query, says, tmp_path):
    chains = ChainSequences(map(classes, [OTHER, LONG]), {classes(LONG): "1abc_A"})
    file = tmp_path / "query.a3m"
    file.write_text(f">q\n{query}\n>other\n{query}\n")
    ((path, reason),) = AlignmentReader([file], chains=chains).rejects
    assert path == str(file)
    assert says in reason
    assert (reason == OF_NO_CHAIN) == (not says)


def test_where_only_an_unknown_residue_differs_it_is_named():
    says = difference(classes("MKXL"), classes("MKVL"), "chain A")
    assert says.endswith("residue 3 is the first to differ (X, not V)")


def test_residues_before_the_first_that_differs_are_counted():
    random, unknown = np.random.default_rng(0), classes("X")[0]
    for _ in range(300):
        a = random.integers(0, 2, random.integers(0, 40), dtype=np.int8) * unknown
        b = a[: random.integers(0, 41)].copy()
        b[random.random(len(b)) < 0.1] += 1
        unlike = [
            place
            for place, pair in enumerate(zip(a.tolist(), b.tolist(), strict=False))
            if pair[0] != pair[1] and unknown not in pair
        ]
        assert _shared(a.tobytes(), b.tobytes()) == (unlike or [min(len(a), len(b))])[0]
