"""What is left of an epoch, also after batches overtook each other in the loader."""

from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.errors import ConfigError, DataError
from bevatron.parallel.mesh import Mesh
from bevatron.train.epochs import Drawn, Segment, plan_epoch, segments_from_json
from bevatron.train.settings import BatchConfig

SIZES = {"atoms": np.arange(1, 41, dtype=np.int64), "edges": np.arange(1, 41, dtype=np.int64) ** 2}


def plan(segments=(), world=1, rank=0, **config):
    return plan_epoch(
        SIZES,
        BatchConfig(**{"capacity": 60, **config}),
        Mesh(rank=rank, world=world),
        seed=3,
        epoch=2,
        segments=segments,
    )


def taken(epoch, places):
    """The samples of some batches that count."""
    return [int(i) for p in places for i, w in zip(*epoch.batches[p], strict=True) if w]


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_every_sample_once_over_any_history_of_stops(data):
    """Stops at random places with other ranks, batches and overtaking batches."""
    segments, seen = [], Counter()
    for _ in range(data.draw(st.integers(1, 4))):
        world = data.draw(st.integers(1, 3))
        config = data.draw(
            st.sampled_from(
                [
                    {"capacity": 60},
                    {"capacity": {"atoms": 90, "edges": 2500}},
                    {"algorithm": "fixed_count", "size": 3},
                    {"algorithm": "algorithm1"},
                ]
            )
        )
        epochs = [plan(segments, world, rank, **config) for rank in range(world)]
        count = len(epochs[0].batches)
        assert {len(epoch.batches) for epoch in epochs} == {count}
        if not count:
            break
        done = data.draw(st.integers(0, count))
        segments = segments_from_json([asdict(segment) for segment in epochs[0].segments])
        last = segments[-1]
        last.skipped, last.ahead = [], []
        for epoch in epochs:
            places = list(range(done))
            skipped, ahead = [], []
            if done and done < count and data.draw(st.booleans()):
                skipped, ahead = [done - 1], [done]
                places[-1] = done
            seen.update(taken(epoch, places))
            last.skipped.append([epoch.first + place for place in skipped])
            last.ahead.append([epoch.first + place for place in ahead])
        last.done = epochs[0].first + done
    rest = plan(segments)
    seen.update(taken(rest, range(len(rest.batches))))
    assert seen == dict.fromkeys(range(40), 1)


def test_the_same_settings_go_on_in_the_same_plan():
    begun = plan()
    begun.segments[-1].done = 2
    rest = plan(begun.segments)
    assert not rest.changed
    assert rest.first == 2
    assert rest.num_batches == begun.num_batches
    for mine, whole in zip(rest.batches, begun.batches[2:], strict=True):
        assert mine[0].tolist() == whole[0].tolist()


def test_an_epoch_in_several_segments_is_as_long_as_what_was_taken_of_each_and_the_rest():
    """The learning rate follows the fraction of the epoch that is done."""
    segments = plan().segments
    segments[-1].done = 2
    segments = plan(segments, capacity=90).segments
    segments[-1].done = 3
    rest = plan(segments, capacity=120)
    assert rest.num_batches == 2 + 3 + len(rest.batches)
    same = plan(segments, capacity=90)
    assert same.num_batches == 2 + 3 + len(same.batches)


def test_an_epoch_stopped_at_its_end_has_nothing_left_for_any_number_of_ranks():
    begun = plan()
    begun.segments[-1].done = len(begun.batches)
    assert len(plan(begun.segments).batches) == 0
    moved = plan(begun.segments, world=3, rank=2)
    assert len(moved.batches) == 0
    assert not moved.changed


def test_a_capacity_of_something_that_is_not_counted_is_refused():
    with pytest.raises(ConfigError, match=r"'bonds' is not counted here \(known: atoms, edges\)"):
        plan(capacity={"bonds": 3})


def test_a_sample_above_capacity_is_named_or_packed_alone():
    data = tiny.TinyData(5, sizes=[3, 3, 30, 3, 3])
    arguments = {"seed": 0, "epoch": 0, "describe": data.describe}
    with pytest.raises(DataError, match="cloud 2"):
        plan_epoch(data.sizes, BatchConfig(capacity=9), Mesh(), **arguments)
    epoch = plan_epoch(data.sizes, BatchConfig(capacity=9, oversized="alone"), Mesh(), **arguments)
    assert [2] in [indices.tolist() for indices, _ in epoch.batches]


def test_another_cost_model_balances_otherwise():
    by_edges = plan(world=4, cost={"edges": 1.0})
    assert by_edges.plan.costs.sum() == SIZES["edges"].sum()


def test_a_cost_of_something_that_is_not_counted_is_refused():
    with pytest.raises(ConfigError, match=r"batch.cost: 'bonds' is not counted here"):
        plan(cost={"bonds": 1.0})


def test_a_constant_cost_counts_samples():
    assert plan(cost={"constant": 2.0}).plan.costs.sum() == 2 * len(SIZES["edges"])


def test_costs_under_old_keys_go_on_with_the_plan_of_an_old_checkpoint():
    old = {"cost_nodes": 0.5, "cost_edges": 0.25, "cost_constant": 0.0}
    new = {"cost": {"atoms": 0.5, "edges": 0.25}}
    begun = plan(**new)
    begun.segments[0].done = 2
    stored = [asdict(segment) for segment in begun.segments]
    del stored[0]["batch"]["cost"]
    stored[0]["batch"].update(old)
    for keys in (old, new):
        resumed = plan(segments_from_json(stored), **keys)
        assert not resumed.changed
        for one, other in zip(resumed.batches, begun.batches[2:], strict=True):
            assert np.array_equal(one[0], other[0])


def test_segments_are_plain_numbers():
    segments = [Segment({"capacity": 3, "cost": None}, 2, 5, [[1], []], [[5], []])]
    assert segments_from_json([asdict(segment) for segment in segments]) == segments


def test_the_batches_of_all_ranks_are_the_same_on_every_rank():
    found = [plan(world=3, rank=rank).of_all_ranks() for rank in range(3)]
    for batches in found:
        assert sorted(i for indices, _ in batches for i in indices) == sorted(
            i
            for rank in range(3)
            for indices, _ in plan(world=3, rank=rank).batches
            for i in indices
        )
    for one, other in zip(found[0], found[2], strict=True):
        assert np.array_equal(one[0], other[0])


# ---- drawn samples ----


def drawn(segments=(), world=1, rank=0, size=1, per_step=6):
    """24 draws from number 100 on."""
    return plan_epoch(
        {"atoms": np.resize(SIZES["atoms"], 24)},
        BatchConfig(algorithm="fixed_count", size=size),
        Mesh(rank=rank, world=world),
        seed=3,
        epoch=2,
        segments=segments,
        drawn=Drawn(first=100, count=24, per_step=per_step),
    )


def test_a_step_of_drawn_samples_is_the_same_draws_on_any_number_of_ranks():
    def steps(world, size):
        epochs = [drawn(world=world, rank=rank, size=size) for rank in range(world)]
        each = epochs[0].accumulate
        assert each == -(-6 // (world * size))
        return [
            sorted(i for e in epochs for i in taken(e, range(step * each, (step + 1) * each)))
            for step in range(4)
        ]

    expected = [list(range(first, first + 6)) for first in (100, 106, 112, 118)]
    for world, size in [(1, 1), (2, 1), (1, 4), (3, 2), (4, 1)]:
        assert steps(world, size) == expected


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_every_draw_once_over_any_history_of_stops(data):
    """Stops after any step, each time with other ranks, batches or samples of a step."""
    segments, seen = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        world, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
        per_step = data.draw(st.sampled_from([6, 6, 12]))
        epochs = [drawn(segments, world, rank, size, per_step) for rank in range(world)]
        steps = data.draw(st.integers(0, len(epochs[0].batches) // epochs[0].accumulate))
        segments = segments_from_json([asdict(segment) for segment in epochs[0].segments])
        for epoch in epochs:
            seen += taken(epoch, range(steps * epoch.accumulate))
        segments[-1].done += steps * epochs[0].accumulate
    assert sorted(seen) == list(range(100, 100 + len(seen)))
    seen += taken(drawn(segments), range(len(drawn(segments).batches)))
    assert sorted(seen) == list(range(100, 124))


def test_repeats_in_batches_that_overtook_others_are_neither_lost_nor_left():
    """Six places for four draws: the second batch of rank 0 repeats a draw of rank 2."""
    places = [[0, 3], [0, 1], [0, 1]]
    epochs = [drawn(world=3, rank=rank, per_step=4) for rank in range(3)]
    assert [len(taken(epochs[0], [place])) for place in (1, 3)] == [0, 0]
    segments = epochs[0].segments
    last = segments[-1]
    last.done, last.skipped, last.ahead = 2, [[1], [], []], [[3], [], []]
    seen = [i for epoch, mine in zip(epochs, places, strict=True) for i in taken(epoch, mine)]
    rest = drawn(segments, per_step=4)
    seen += taken(rest, range(len(rest.batches)))
    assert sorted(seen) == list(range(100, 124))


def test_only_batches_of_a_fixed_count_can_be_drawn():
    with pytest.raises(ConfigError, match=r"batch.algorithm: samples are drawn here, which needs"):
        plan_epoch(SIZES, BatchConfig(), Mesh(), seed=0, epoch=0, drawn=Drawn(0, 40, 4))
