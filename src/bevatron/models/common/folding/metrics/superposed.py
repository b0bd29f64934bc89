"""Measures after a superposition: RMSD and TM-score."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bevatron.maths.superposition import moved, superposed, superposition

_SEEDS_PER_LENGTH = 48
_ROUNDS = 20

_SMALLEST_DISTANCE = 0.5
"""Å; d_0 of short chains."""


def rmsd(
    predicted: Float[Tensor, "*batch n 3"],
    truth: Float[Tensor, "*batch n 3"],
    resolved: Bool[Tensor, "*batch n"],
) -> Float[Tensor, "*batch"]:
    """Compute the root mean square deviation of resolved points after superposition, Å."""
    weight = resolved.to(truth.dtype)
    squared = (superposed(predicted, truth, weight) - truth).square().sum(-1)
    return ((squared * weight).sum(-1) / weight.sum(-1).clamp(min=1)).sqrt()


def tm_score(
    predicted: Float[Tensor, "L 3"], truth: Float[Tensor, "L 3"], resolved: Bool[Tensor, "L"]
) -> Float[Tensor, ""]:
    r"""Compute the TM-score of two chains whose residues correspond, 0 to 1.

    :math:`\max_{R,t} \frac1L \sum_i (1 + (d_i / d_0)^2)^{-1}` with
    :math:`d_0 = 1.24 \sqrt[3]{L - 15} - 1.8`, at least 0.5 Å, and L resolved residues: Zhang and
    Skolnick, Proteins 57, 702 (2004). As there, the search for the maximum starts from
    superpositions of pieces of 1, 1/2, 1/4 ... of the chain, each refined with the residues that
    come close.
    """
    predicted, truth = predicted[resolved], truth[resolved]
    length = len(truth)
    if length == 0:
        return truth.new_zeros(())
    d0 = max(tm_distance(max(length, 15)), _SMALLEST_DISTANCE)
    near = min(max(d0, 4.5), 8.0)
    weight = _pieces(length).to(truth)
    best = truth.new_zeros(())
    for turn in range(_ROUNDS):
        rotation, translation = superposition(predicted[None], truth[None], weight)
        distance = (moved(predicted[None], rotation, translation) - truth).square().sum(-1).sqrt()
        best = torch.maximum(best, (1 / (1 + (distance / d0).square())).mean(-1).amax())
        # At least three points, or the next superposition is no better than any other.
        third = distance.sort(-1).values[:, min(3, length) - 1, None]
        cutoff = (third + 1e-3).clamp(min=near - 1 if turn == 0 else near + 1)
        weight = (distance < cutoff).to(truth)
    return best


def tm_distance(length: int) -> float:
    """Return the distance d_0 that TM-score calls near for a chain of 15 or more residues, Å."""
    return 1.24 * float((length - 15) ** (1 / 3)) - 1.8


def _pieces(length: int) -> Float[Tensor, "S L"]:
    """Return the residues of each initial superposition."""
    place = torch.arange(length)
    rows, size = [], length
    while True:
        last = length - size
        starts = torch.linspace(0, last, min(last + 1, _SEEDS_PER_LENGTH)).round().long()
        rows.append((place >= starts[:, None]) & (place < starts[:, None] + size))
        if size <= 4:
            return torch.cat(rows).double()
        size = max(size // 2, 4)
