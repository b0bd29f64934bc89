"""Data sets made from others: choosing, joining and dividing."""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevatron.data.dataset import (
    Concatenated,
    InMemory,
    Subset,
    check_sizes,
    set_aside,
    split,
)
from bevatron.data.samples import Field
from bevatron.data.store.prepare import write_store
from bevatron.data.store.shards import concatenate
from bevatron.errors import ConfigError, DataError


@dataclass
class Numbers:
    """Sample i has i atoms and 2 i edges."""

    name: str
    num: int

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return {"x": np.arange(index), "head": np.array(9, dtype=np.int32)}

    def describe(self, index):
        return f"{self.name}, frame {index}"

    def lengths(self, field):
        return np.arange(self.num) * {"atomic_numbers": 1, "edges": 2}[field]


def test_subset_gives_the_chosen_samples_in_order():
    subset = Subset(Numbers("a", 5), [4, 1, 1])
    assert len(subset) == 3
    assert [len(subset[i]["x"]) for i in range(3)] == [4, 1, 1]
    assert subset.describe(0) == "a, frame 4"
    np.testing.assert_array_equal(subset.lengths("edges"), [8, 2, 2])
    nested = Subset(subset, [0])
    assert nested.describe(0) == "a, frame 4"
    with pytest.raises(IndexError):
        subset[3]
    for wrong in (5, -1):
        with pytest.raises(DataError, match=f"no sample {wrong}, the data set holds 5"):
            Subset(Numbers("a", 5), [0, wrong])
    assert len(Subset(Numbers("a", 5), [])) == 0


def test_samples_in_memory_are_a_data_set_that_pickles():
    made = InMemory([{"x": np.zeros(n)} for n in (2, 0, 3)], ["a", "b", "c"].__getitem__)
    there = pickle.loads(pickle.dumps(made))
    assert [there.describe(index) for index in range(len(there))] == ["a", "b", "c"]
    assert (there.lengths("x").tolist(), len(there[2]["x"])) == ([2, 0, 3], 3)


def test_concatenated_walks_its_parts_and_sets_their_heads():
    joined = Concatenated([Numbers("a", 2), Numbers("b", 0), Numbers("c", 3)], heads=[0, 1, 2])
    assert len(joined) == 5
    assert [joined.describe(i) for i in (1, 2, 4, -1)] == [
        "a, frame 1",
        "c, frame 0",
        "c, frame 2",
        "c, frame 2",
    ]
    assert [int(joined[i]["head"]) for i in range(5)] == [0, 0, 2, 2, 2]
    assert joined[0]["head"].dtype == np.int32
    np.testing.assert_array_equal(joined.lengths("atomic_numbers"), [0, 1, 0, 1, 2])
    for index in (5, -6):
        with pytest.raises(IndexError):
            joined[index]
    assert int(Concatenated([Numbers("a", 2)])[0]["head"]) == 9
    renumbered = Concatenated([Numbers("a", 2)], heads=[[*range(9), 4]])
    assert int(renumbered[1]["head"]) == 4
    with pytest.raises(DataError, match="1 data sets but 2 heads"):
        Concatenated([Numbers("a", 2)], heads=[0, 1])
    with pytest.raises(DataError, match="at least one part"):
        Concatenated([])


def test_a_head_does_not_change_the_part_itself():
    part = Numbers("a", 2)
    sample = part[1]
    part.__class__.__getitem__, original = lambda self, i: sample, part.__class__.__getitem__
    try:
        assert int(Concatenated([part], heads=[3])[1]["head"]) == 3
    finally:
        part.__class__.__getitem__ = original
    assert int(sample["head"]) == 9


def test_lengths_are_those_of_the_samples():
    found = Concatenated([Numbers("a", 2), Subset(Numbers("b", 4), [3])])
    np.testing.assert_array_equal(found.lengths("atomic_numbers"), [0, 1, 3])
    np.testing.assert_array_equal(found.lengths("edges"), [0, 2, 6])


def test_data_sets_of_stores_pickle(tmp_path):
    fields = (Field("x", "float64", (), True), Field("head", "int32"))
    samples = [{"x": np.arange(float(i)), "head": np.array(0, dtype=np.int32)} for i in range(4)]
    store = write_store(tmp_path / "s", fields, [concatenate(samples, fields)])
    joined = Concatenated([Subset(store, [3, 1]), store], heads=[1, 0])
    again = pickle.loads(pickle.dumps(joined))
    assert len(again) == 6
    np.testing.assert_array_equal(again[0]["x"], [0.0, 1.0, 2.0])
    assert int(again[0]["head"]) == 1
    assert again.describe(2).startswith("sample 0 of")


@given(
    num=st.integers(0, 300),
    weights=st.lists(st.integers(0, 10), min_size=1, max_size=4),
    rest=st.integers(0, 5),
    seed=st.integers(-(2**70), 2**70),
)
def test_split_is_disjoint_repeatable_and_of_the_right_sizes(num, weights, rest, seed):
    total = max(sum(weights) + rest, 1)
    fractions = [weight / total for weight in weights]
    if num < sum(fraction > 0 for fraction in fractions):
        with pytest.raises(ConfigError, match="too few"):
            split(num, fractions, seed)
        return
    parts = split(num, fractions, seed)
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert len(everything) == 0 or (everything.min() >= 0 and everything.max() < num)
    for part, fraction in zip(parts, fractions, strict=True):
        assert (len(part) > 0) == (fraction > 0)
        assert abs(len(part) - fraction * num) <= len(parts)
    if rest == 0 and sum(weights):
        assert len(everything) == num
    for part, again in zip(parts, split(num, fractions, seed), strict=True):
        np.testing.assert_array_equal(part, again)


def test_split_stays_what_it_was():
    """Runs that were split years ago must find the same validation set."""
    assert split(12, (0.5, 0.25), seed=3)[1].tolist() == FROZEN
    assert split(12, (0.5, 0.25), seed=4)[1].tolist() != FROZEN


FROZEN = [0, 4, 6]


def test_split_is_even_over_the_samples_and_independent_of_neighbours():
    hits = np.zeros(200)
    pairs = 0
    for seed in range(300):
        chosen = split(200, (0.25,), seed)[0]
        hits[chosen] += 1
        pairs += (np.diff(chosen) == 1).sum()
    assert abs(hits.mean() - 75) < 1e-9
    assert np.abs(hits - 75).max() < 5 * np.sqrt(300 * 0.25 * 0.75)
    assert abs(pairs / 300 - 199 * 0.25 * 49 / 199) < 0.6


@pytest.mark.parametrize("wrong", [(), (-0.1,), (0.9, 0.2), (float("nan"),)])
def test_senseless_fractions_are_refused(wrong):
    with pytest.raises(ConfigError, match="fractions"):
        split(10, wrong, 0)


def test_parts_are_fractions_or_numbers_of_samples():
    for fraction in (0.1, 0.25):
        parts = set_aside(12, 3, valid_size=fraction)
        expected = split(12, (1 - fraction, fraction), seed=3)
        assert [part.tolist() for part in parts] == [part.tolist() for part in expected]
    for number in (1, 7, 49, 333):
        rest, half, part = set_aside(1000, 0, valid_size=0.5, test_size=number)
        assert (len(rest), len(half), len(part)) == (500 - number, 500, number)
    with pytest.raises(ConfigError, match=r"data\.valid_size: 500 of 500 would leave nothing"):
        set_aside(500, 0, valid_size=500)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"valid_size": -0.1}, "data.valid_size: expected fractions below 1 or whole numbers"),
        ({"valid_size": 2.5}, "got 2.5"),
        ({"valid_size": float("nan")}, "got nan"),
        ({"valid_size": float("inf")}, "got inf"),
        ({"valid_size": 0.5, "test_size": 0.5}, "valid_size and data.test_size: leave nothing"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_sizes(**wrong)
    check_sizes(valid_size=0.0, test_size=300)
