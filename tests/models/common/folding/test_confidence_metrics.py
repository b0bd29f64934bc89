"""pLDDT, PAE, pTM, ipTM, clashes and the ranking: definitions in loops and closed forms."""

import math

import pytest
import torch

from bevatron.models.common.folding import metrics
from bevatron.testing import assert_close


def certain(error, bins=64):
    """Logits that are sure of the bin of an error."""
    logits = torch.full((*error.shape, bins), -1e4, dtype=torch.float64)
    return logits.scatter(-1, (error / (32 / bins)).long()[..., None], 0.0)


def test_expectations_are_centres_of_bins():
    error = torch.tensor([[0.1, 31.9], [5.0, 16.2]], dtype=torch.float64)
    expected = torch.tensor([[0.25, 31.75], [5.25, 16.25]], dtype=torch.float64)
    assert_close(metrics.expected_error(certain(error)), expected, 1e-12)
    flat = metrics.expected_lddt(torch.zeros(3, 50))
    assert_close(flat, torch.full((3,), 50.0), 1e-6)
    sure = torch.full((50,), -1e4)
    sure[-1] = 0
    assert float(metrics.expected_lddt(sure)) == pytest.approx(99)


def loop_tm(error, frames, counts, chain=None):
    number = int(counts.sum())
    d0 = 1.24 * (max(number, 19) - 15) ** (1 / 3) - 1.8
    best = 0.0
    for i in range(len(error)):
        columns = [
            j for j in range(len(error)) if counts[j] and (chain is None or chain[i] != chain[j])
        ]
        if frames[i] and counts[i] and columns:
            mean = sum(1 / (1 + (float(error[i, j]) / d0) ** 2) for j in columns) / len(columns)
            best = max(best, mean)
    return best


@pytest.mark.parametrize("number", [12, 40])
def test_ptm_and_iptm_are_their_definitions(number):
    random = torch.Generator().manual_seed(number)
    error = torch.rand(number, number, generator=random, dtype=torch.float64) * 30
    error = (error / 0.5).floor() * 0.5 + 0.25
    frames = torch.rand(number, generator=random) < 0.6
    counts = torch.rand(number, generator=random) < 0.8
    chain = torch.arange(number) // 5
    logits = certain(error)
    assert float(metrics.ptm(logits, frames, counts)) == pytest.approx(
        loop_tm(error, frames, counts)
    )
    assert float(metrics.iptm(logits, frames, counts, chain)) == pytest.approx(
        loop_tm(error, frames, counts, chain)
    )
    of_pair = counts & (chain < 2)
    assert float(metrics.iptm(logits, frames, of_pair, chain)) == pytest.approx(
        loop_tm(error, frames, of_pair, chain)
    )


def test_without_frames_or_a_second_chain_there_is_no_tm():
    logits = certain(torch.zeros(6, 6, dtype=torch.float64))
    yes, chain = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.int64)
    assert metrics.ptm(logits, ~yes, yes) == 0
    assert metrics.iptm(logits, yes, yes, chain) == 0
    assert float(metrics.ptm(logits, yes, yes)) > 0.3


def lattice(number, spacing=1.5):
    side = math.ceil(number ** (1 / 3))
    grid = torch.cartesian_prod(*[torch.arange(side, dtype=torch.float64)] * 3)
    return grid[:number] * spacing


@pytest.mark.parametrize(
    ("overlapping", "expected"), [(0, False), (5, False), (11, True), (20, True)]
)
def test_chains_clash_if_more_than_half_of_the_smaller_one_overlaps(overlapping, expected):
    first, second = lattice(400), lattice(20)
    second[overlapping:] += 500
    positions = torch.cat([first, second + 0.1])
    chain = torch.tensor([0] * 400 + [1] * 20)
    polymer = torch.ones(420, dtype=torch.bool)
    assert metrics.has_clash(positions, chain, polymer) is expected
    assert not metrics.has_clash(positions, chain, polymer & (chain == 0))


@pytest.mark.parametrize(("overlapping", "expected"), [(100, False), (101, True)])
def test_chains_clash_at_more_than_a_hundred_pairs(overlapping, expected):
    first, second = lattice(400), lattice(400)
    second[overlapping:] += 500
    positions = torch.cat([first, second + 0.1])
    chain = torch.tensor([0] * 400 + [1] * 400)
    assert metrics.has_clash(positions, chain, torch.ones(800, dtype=torch.bool)) is expected


def test_the_ranking_prefers_interfaces_and_refuses_clashes():
    assert metrics.ranking_score(0.5, 0.9) == pytest.approx(0.82)
    assert metrics.ranking_score(0.5, None) == pytest.approx(0.5)
    assert metrics.ranking_score(0.5, 0.9, disordered=0.2) == pytest.approx(0.92)
    assert metrics.ranking_score(0.9, 0.9, clash=True) < metrics.ranking_score(0.0, 0.0)
