"""Seeded normal numbers: a function of seed and call, and normal."""

import math

import torch

from bevatron.models.common.folding.normal import SeededNormal


def test_numbers_are_a_function_of_seed_and_call():
    one, other = (SeededNormal(torch.tensor(2**60 + 5)) for _ in range(2))
    first, second = one((4, 50)), one((4, 50))
    assert torch.equal(other((4, 50)), first)
    assert torch.equal(other((200,)).view(4, 50), second)
    assert not torch.equal(first, second)
    assert not torch.equal(SeededNormal(torch.tensor(2**60 + 6))((4, 50)), first)
    assert not torch.equal(SeededNormal(torch.tensor(5))((4, 50)), first)
    assert torch.equal(SeededNormal(torch.tensor(2**60 + 5), calls=1)((4, 50)), second)


def test_numbers_have_the_moments_and_tails_of_a_normal_distribution():
    x = SeededNormal(torch.tensor(1), torch.float64)((400_000,))
    moments = [float((x**k).mean()) for k in range(1, 7)]
    for found, expected, bound in zip(
        moments, (0, 1, 0, 3, 0, 15), (4, 6, 16, 40, 130, 400), strict=True
    ):
        assert abs(found - expected) < bound / math.sqrt(len(x)) * 1.5
    for edge in (1.0, 2.0, 3.0):
        share = math.erfc(edge / math.sqrt(2))
        assert abs(float((x.abs() > edge).double().mean()) - share) < 4 * math.sqrt(share / len(x))
    for lag in (1, 2, 3, 7, 64):
        assert abs(float((x[lag:] * x[:-lag]).mean())) < 5 / math.sqrt(len(x))


def test_streams_of_neighbouring_seeds_and_calls_are_independent():
    streams = [
        SeededNormal(torch.tensor(s), torch.float64, c)((50_000,))
        for s in range(4)
        for c in range(4)
    ]
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(16)
    assert float(correlation.abs().max()) < 5.5 / math.sqrt(50_000)
