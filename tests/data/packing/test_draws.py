"""Drawn samples: a function of (seed, number), by weights and shares, dealt evenly to ranks."""

import pickle
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.data.dataset import Concatenated, Subset
from bevatron.data.packing.draws import Draws, Source, batches_per_step, deal
from bevatron.errors import DataError


class Crops:
    """Samples that are random in part: the seed is in them."""

    def __init__(self, count, name="chain"):
        self.count, self.name = count, name

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"index": np.array(index)}

    def sample(self, index, seed):
        return {"index": np.array(index), "seed": np.array(seed)}

    def describe(self, index):
        return f"{self.name} {index}"

    def lengths(self, field):
        return np.arange(self.count, dtype=np.int64)


class Plain(Crops):
    sample = None


def mixture(seed=5, shares=(3.0, 1.0)):
    weights = np.array([1.0, 0.0, 2.0, 5.0])
    return Draws(
        [
            Source("pdb", Crops(4), weights, shares[0]),
            Source("distilled", Crops(3), share=shares[1]),
        ],
        seed,
    )


def test_the_first_draws_never_change():
    """On no machine and in no version: a run must be able to resume."""
    sources, indices, seeds = mixture().take(0, 4)
    assert sources.tolist() == [0, 0, 0, 0]
    assert indices.tolist() == [3, 2, 3, 3]
    assert seeds.tolist() == [
        7026181317371732854,
        5313565534024731632,
        71880582617611159,
        2075824215265146174,
    ]


@given(st.integers(0, 2**40), st.integers(1, 50), st.integers(0, 2**63 - 1))
@settings(max_examples=30, deadline=None)
def test_a_draw_depends_on_seed_and_number_alone(first, count, seed):
    draws = mixture(seed)
    together = np.stack(draws.take(first, count))
    again = pickle.loads(pickle.dumps(draws))
    apart = np.array([astuple(again.draw(first + i)) for i in range(count)])
    assert np.array_equal(together, apart.T)
    assert (together[2] >= 0).all()


def test_seeds_and_runs_differ():
    assert len(set(mixture().take(0, 1000)[2].tolist())) == 1000
    assert not np.array_equal(mixture(1).take(0, 99)[2], mixture(2).take(0, 99)[2])


def test_weights_and_shares_are_kept():
    sources, indices, _ = mixture().take(0, 40_000)
    assert np.mean(sources == 0) == pytest.approx(0.75, abs=0.01)
    found = np.bincount(indices[sources == 0], minlength=4) / np.sum(sources == 0)
    assert found == pytest.approx([1 / 8, 0, 2 / 8, 5 / 8], abs=0.012)
    alike = np.bincount(indices[sources == 1]) / np.sum(sources == 1)
    assert alike == pytest.approx([1 / 3] * 3, abs=0.02)


def test_a_sample_of_weight_zero_is_never_drawn():
    draws = Draws(
        [Source("a", Crops(3), np.array([1.0, 1.0, 0.0])), Source("b", Crops(2), share=0)], 0
    )
    sources, indices, _ = draws.take(0, 5000)
    assert not sources.any()
    assert set(indices.tolist()) == {0, 1}


def test_a_sample_is_made_with_the_seed_of_its_draw():
    draws = mixture()
    source, index, seed = astuple(draws.draw(17))
    assert draws[17] == {"index": index, "seed": seed}
    assert draws.describe(17) == f"chain {index} (seed {seed})"
    assert draws.rows(17, 1).tolist() == [index + (4 if source else 0)]
    plain = Draws([Source("plain", Plain(4))], 0)
    assert set(plain[3]) == {"index"}


def test_selections_and_concatenations_pass_the_seed_on():
    chosen = Subset(Crops(9), [7, 8])
    assert chosen.sample(1, 99) == {"index": 8, "seed": 99}
    joined = Concatenated([Crops(2), chosen], heads=[0, 1])
    assert joined.sample(3, 99) == {"index": 8, "seed": 99, "head": 1}
    assert Subset(Plain(3), [2]).sample(0, 99) == {"index": 2}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "a mixture needs at least one data set"),
        ([Source("pdb", Crops(0))], "pdb: holds no samples to draw"),
        ([Source("pdb", Crops(2), np.ones(3))], "pdb: 3 weights for 2 samples"),
        ([Source("pdb", Crops(2), np.array([1, np.nan]))], "pdb: the weights must be numbers of"),
        ([Source("pdb", Crops(2), np.zeros(2))], "pdb: the weights must be numbers of"),
        ([Source("pdb", Crops(2), share=-1)], "the shares of pdb must be numbers of at least 0"),
    ],
)
def test_a_mixture_that_cannot_be_drawn_from_is_refused(source, message):
    with pytest.raises(DataError, match=message):
        Draws(source, 0)


def test_the_summary_notices_other_weights_and_shares():
    assert mixture().summary() == mixture(seed=6).summary()
    assert mixture().summary() != mixture(shares=(2.0, 1.0)).summary()
    other = Draws([Source("pdb", Crops(4), np.ones(4), 3.0), *mixture().sources[1:]], 5)
    assert mixture().summary()["pdb"] != other.summary()["pdb"]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_step_holds_exactly_its_draws_and_all_batches_are_full(data):
    ranks, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    per_step, steps = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 3))
    costs = np.array(
        data.draw(st.lists(st.floats(0, 9), min_size=per_step * steps, max_size=per_step * steps))
    )
    plan = deal(costs, per_step, ranks, size)
    each = batches_per_step(per_step, ranks, size)
    assert plan.num_steps == steps * each
    assert set(plan.batch_sizes.ravel().tolist()) == {size}
    for step in range(steps):
        counted = []
        for rank in range(ranks):
            for place in range(step * each, (step + 1) * each):
                batch, weights = plan.batch(rank, place), plan.weights(rank, place)
                counted += batch[weights != 0].tolist()
                assert set(batch // per_step) == {step}
        assert sorted(counted) == list(range(step * per_step, (step + 1) * per_step))


def test_ranks_have_about_as_much_to_do():
    costs = np.random.default_rng(0).exponential(size=256 * 10)
    each = deal(costs, 256, 8, 1).costs.reshape(10, -1, 8).sum(axis=1)
    dealt_in_turn = costs.reshape(10, -1, 8).sum(axis=1)
    assert np.mean(each.max(1) / each.mean(1)) < 1.06
    assert np.mean(dealt_in_turn.max(1) / dealt_in_turn.mean(1)) > 1.2


def test_equal_costs_keep_the_order_of_the_draws():
    plan = deal(np.ones(8), 4, 1, 1)
    assert [batch.tolist() for batch in plan[0]] == [[i] for i in range(8)]


def test_the_cheapest_of_a_step_are_repeated():
    plan = deal(np.array([1.0, 5, 2, 4, 3]), 5, 4, 2)
    assert sorted(plan.indices[plan.repeated]) == [0, 2, 4]
