"""Crops: whole tokens, within both limits, shaped as their kind says, the same for a seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevatron.data.proteins import crop as crops
from bevatron.data.proteins.crop import (
    CropSizes,
    contiguous_order,
    crop_chain,
    crop_entry,
    interface_tokens,
    spatial_order,
)

KINDS = {"contiguous": (1, 0, 0), "spatial": (0, 1, 0), "interface": (0, 0, 1)}


def entry_of(lengths, seed=0, spread=30.0, resolved=0.9):
    """Chains as balls of tokens side by side, tokens of 1 to 9 atoms."""
    rng = np.random.default_rng(seed)
    asym_id = np.repeat(np.arange(1, len(lengths) + 1), lengths).astype(np.int32)
    num_atoms = rng.integers(1, 10, len(asym_id)).astype(np.int32)
    first = np.cumsum(num_atoms) - num_atoms
    chain = np.repeat(asym_id, num_atoms)
    position = rng.normal(size=(len(chain), 3)) * spread / 3
    position[:, 0] += spread * chain
    return {
        "asym_id": asym_id,
        "num_atoms": num_atoms,
        "centre_atom": (first + rng.integers(0, num_atoms)).astype(np.int32),
        "position": position.astype(np.float32),
        "resolved": rng.random(len(chain)) < resolved,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_crops_of_large_assemblies_are_of_the_twenty_chains_around_a_place(kind):
    entry = entry_of([7] * 60, spread=12.0)
    sizes = CropSizes(300, 10_000, KINDS[kind])
    for seed in range(20):
        crop = crop_entry(entry, sizes, np.random.default_rng(seed), [30])
        chains = np.unique(entry["asym_id"][crop])
        # The chains lie in a row.
        assert 15 <= chains.min() <= 30 <= chains.max() <= 45
        assert len(chains) == 20
        assert len(crop) == 140
    unseen = entry | {"resolved": np.zeros_like(entry["resolved"])}
    assert len(crop_entry(unseen, sizes, np.random.default_rng(0), [30])) == 300


def test_kinds_of_crops_are_drawn_with_the_published_shares(monkeypatch):
    found = []

    def contiguous(asym_id, *_):
        found.append("contiguous")
        return np.arange(len(asym_id))

    def spatial(asym_id, centres, resolved, rng, chains, at_interface):
        found.append("interface" if at_interface else "spatial")
        return np.arange(len(asym_id))

    monkeypatch.setattr(crops, "contiguous_order", contiguous)
    monkeypatch.setattr(crops, "spatial_order", spatial)
    entry, rng = entry_of([20, 20]), np.random.default_rng(0)
    for _ in range(4000):
        crop_entry(entry, CropSizes(tokens=8), rng)
    for kind, share in (("contiguous", 0.2), ("spatial", 0.4), ("interface", 0.4)):
        assert found.count(kind) / len(found) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("kind", KINDS)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    tokens=st.integers(1, 60),
    atoms=st.integers(9, 200),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_crop_holds_as_many_whole_tokens_as_fit(kind, lengths, tokens, atoms, seed):
    entry = entry_of(lengths, seed % 5)
    sizes = CropSizes(tokens, atoms, KINDS[kind])
    crop = crop_entry(entry, sizes, np.random.default_rng(seed))
    assert (np.diff(crop) > 0).all()
    assert 0 <= crop[0] <= crop[-1] < sum(lengths)
    assert 1 <= len(crop) <= tokens
    assert entry["num_atoms"][crop].sum() <= atoms
    total = entry["num_atoms"].sum()
    if sum(lengths) <= tokens and total <= atoms:
        assert len(crop) == sum(lengths)
    elif total <= atoms or len(crop) < min(tokens, sum(lengths)) - 1:
        full = len(crop) == tokens or entry["num_atoms"][crop].sum() > atoms - 9
        assert full
    again = crop_entry(entry, sizes, np.random.default_rng(seed))
    np.testing.assert_array_equal(crop, again)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    tokens=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_a_contiguous_crop_has_one_piece_of_each_chain(lengths, tokens, seed):
    asym_id = np.repeat(np.arange(len(lengths)), lengths)
    order = contiguous_order(asym_id, tokens, np.random.default_rng(seed))
    assert len(order) == min(tokens, sum(lengths))
    for chain in range(len(lengths)):
        piece = order[asym_id[order] == chain]
        assert (np.diff(piece) == 1).all()


def test_contiguous_pieces_reach_both_ends_of_a_chain():
    asym_id = np.zeros(12, dtype=np.int32)
    starts = {
        int(contiguous_order(asym_id, 10, np.random.default_rng(seed))[0]) for seed in range(60)
    }
    assert starts == {0, 1, 2}


def test_a_spatial_crop_is_the_nearest_tokens_of_an_observed_one():
    entry = entry_of([40, 40])
    centres = entry["position"][entry["centre_atom"]]
    resolved = entry["resolved"][entry["centre_atom"]]
    order = spatial_order(entry["asym_id"], centres, resolved, np.random.default_rng(1), (2,))
    distance = np.linalg.norm(centres - centres[order[0]], axis=1)
    assert entry["asym_id"][order[0]] == 2
    assert resolved[order[: resolved.sum()]].all()
    assert (np.diff(distance[order[: resolved.sum()]]) >= 0).all()


@given(seed=st.integers(0, 50))
def test_an_interface_crop_is_centred_where_another_chain_is_near(seed):
    entry = entry_of([30, 30, 30], seed, resolved=1.0)
    asym_id, centres = entry["asym_id"], entry["position"][entry["centre_atom"]]
    everything = np.ones(90, dtype=bool)
    order = spatial_order(asym_id, centres, everything, np.random.default_rng(seed), (1, 2), True)
    middle = order[0]
    assert asym_id[middle] in (1, 2)
    other = centres[asym_id == 3 - asym_id[middle]]
    near = np.linalg.norm(other - centres[middle], axis=1).min()
    distances = np.linalg.norm(centres[asym_id == 1][:, None] - centres[asym_id == 2], axis=-1)
    assert near < 15.0 or distances.min() >= 15.0


@given(seed=st.integers(0, 50))
def test_interface_tokens_are_those_of_all_distances(seed):
    entry = entry_of([30, 20, 300], seed)
    asym_id, centres = entry["asym_id"], entry["position"][entry["centre_atom"]]
    rng = np.random.default_rng(seed)
    candidates, others = rng.random(350) < 0.5, rng.random(350) < 0.5
    found = interface_tokens(asym_id, centres, candidates, others)
    distance = np.linalg.norm(centres[:, None].astype(float) - centres, axis=-1)
    allowed = (asym_id[:, None] != asym_id) & candidates[:, None] & others
    np.testing.assert_array_equal(found, ((distance < 15.0) & allowed).any(axis=1))


def test_one_chain_and_nothing_observed_fall_back():
    one = entry_of([50])
    sizes = CropSizes(10, 1000, KINDS["interface"])
    assert len(crop_entry(one, sizes, np.random.default_rng(0))) == 10
    unseen = entry_of([50, 9], resolved=0.0)
    crop = crop_entry(unseen, sizes, np.random.default_rng(0))
    assert len(crop) == 10


def test_interface_crops_are_around_a_token_near_another_chain():
    entry = entry_of([60, 60], spread=60.0, resolved=1.0)

    def ends(shares):
        """How far the first token of a crop of one is from the other chain, at most."""
        drawn = [
            crop_entry(entry, CropSizes(1, 100, shares), np.random.default_rng(seed))
            for seed in range(100)
        ]
        place = entry["position"][entry["centre_atom"]]
        apart = np.linalg.norm(place[:, None] - place, axis=2)
        apart[entry["asym_id"][:, None] == entry["asym_id"]] = np.inf
        return max(float(apart[crop].min()) for crop in drawn)

    assert ends((0, 0, 1)) < 15 < ends((0, 1, 0))


@given(length=st.integers(1, 400), size=st.integers(1, 300), seed=st.integers(0, 99))
@pytest.mark.parametrize("clamped", [True, False])
def test_a_crop_of_a_chain_lies_in_it(clamped, length, size, seed):
    start, stop = crop_chain(length, size, np.random.default_rng(seed), clamped=clamped)
    assert 0 <= start <= stop <= length
    assert stop - start == min(length, size)


def test_unclamped_crops_of_a_chain_lean_towards_its_start():
    def mean(clamped):
        starts = [
            crop_chain(356, 256, np.random.default_rng(seed), clamped=clamped)[0]
            for seed in range(500)
        ]
        return np.mean(starts)

    assert 44 < mean(True) < 56
    assert 20 < mean(False) < 30
