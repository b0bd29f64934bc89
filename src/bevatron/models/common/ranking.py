"""Ranking quality of scores: ROC curve and average precision.

Ranking measures need all scores. A single process keeps them and computes exact values; several
processes add up counts in fine bins of the score.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevatron.models.common.metrics import RunningSums
from bevatron.typing import FloatArray


def ranking(negatives: npt.ArrayLike, positives: npt.ArrayLike) -> tuple[float, float] | None:
    """Compute (area under the ROC curve, average precision) from counts by ascending score.

    The area is the probability that a positive scores above a negative; the precision is averaged
    over the gain in recall. Equal scores count half for the area, and together for the precision,
    as in scikit-learn.

    Returns
    -------
    tuple or None
        None without a positive or without a negative.

    Examples
    --------
    >>> ranking([1.0, 1.0, 0.0], [0.0, 1.0, 1.0])[0]
    0.875
    """
    below, above = np.asarray(negatives, dtype=float), np.asarray(positives, dtype=float)
    num_negatives, num_positives = below.sum(), above.sum()
    if num_negatives == 0 or num_positives == 0:
        return None
    area = (above * (np.cumsum(below) - 0.5 * below)).sum() / (num_negatives * num_positives)
    true = np.cumsum(above[::-1])
    taken = true + np.cumsum(below[::-1])
    precision = np.divide(true, taken, out=np.ones_like(true), where=taken > 0)
    return float(area), float((above[::-1] * precision).sum() / num_positives)


def ranking_of_scores(
    scores: FloatArray, answers: FloatArray, weights: FloatArray | None = None
) -> tuple[float, float] | None:
    """Compute the same from the scores themselves, each distinct one by itself.

    Parameters
    ----------
    scores : [n], in any order
    answers : 1 or 0, [n]
    weights : how often each counts, [n]; once by default

    Examples
    --------
    >>> ranking_of_scores(np.array([0.3, 0.1, 0.9]), np.array([0.0, 0.0, 1.0]))
    (1.0, 1.0)
    """
    weights = np.ones_like(scores) if weights is None else weights
    distinct, place = np.unique(scores, return_inverse=True)
    positives = np.bincount(place, weights=answers * weights, minlength=len(distinct))
    negatives = np.bincount(place, weights=(1.0 - answers) * weights, minlength=len(distinct))
    return ranking(negatives, positives)


class RankingSums:
    """Ranking measures of several binary labels that add up over batches and ranks.

    Parameters
    ----------
    num_bins : bins of a label's logits; scores in one bin count as equal

    Examples
    --------
    >>> sums = RankingSums(1, 64)
    >>> sums.add(0, torch.tensor([-1.0, 2.0]), torch.tensor([False, True]), torch.ones(2))
    >>> sums.compute(0)
    (1.0, 1.0)
    """

    def __init__(self, num_labels: int, num_bins: int) -> None:
        self._bins = torch.zeros(num_labels, 2, num_bins, dtype=torch.float64)
        # Logits, answers and weights of every batch, on the device they were computed on.
        self._scores: list[list[Tensor]] | None = [[] for _ in range(num_labels)]

    def add(self, label: int, logits: Tensor, positive: Tensor, weight: Tensor) -> None:
        """Add [n] logits of a label, whether each answer is positive, and how often it counts."""
        logits, weight = logits.detach().double(), weight.double()
        self._bins = self._bins.to(logits.device)
        num_bins = self._bins.shape[2]
        # A monotone map into (0, 1) that separates logits of 1 and 2 as well as of 10 and 20.
        score = 0.5 + torch.atan(logits) / torch.pi
        place = (score * num_bins).long().clamp(0, num_bins - 1)
        for side, members in enumerate((~positive, positive)):
            self._bins[label, side].index_add_(0, place, weight * members)
        if self._scores is not None:
            self._scores[label].append(torch.stack([logits, positive.double(), weight]))

    @property
    def size(self) -> int:
        """Number of sums."""
        return self._bins.numel()

    def sums(self) -> Tensor:
        """Return all running sums as one float64 vector."""
        return self._bins.flatten()

    def load_sums(self, sums: Tensor, num_processes: int) -> None:
        """Replace the running sums by those of several processes.

        All ranks must decide alike, even one that happens to have all labels.
        """
        if num_processes != 1:
            self._scores = None
        self._bins = sums.detach().double().reshape(self._bins.shape).clone()

    def compute(self, label: int) -> tuple[float, float] | None:
        """Compute (area under the ROC curve, average precision) of a label, see `ranking`."""
        if not self._scores or not self._scores[label]:
            return ranking(*self._bins[label].cpu().numpy())
        scores, positive, weight = torch.cat(self._scores[label], 1).cpu().numpy()
        known = weight > 0
        return ranking_of_scores(scores[known], positive[known], weight[known])


class RankedSums(RunningSums):
    """Running sums with a ranking; their vector begins with the number of processes."""

    _ranking: RankingSums

    def sums(self) -> Tensor:
        """Return all running sums as one float64 vector; the first counts the processes."""
        ranked = self._ranking.sums().to(self._sums.device)
        return torch.cat([self._sums.new_ones(1), super().sums(), ranked])

    def load_sums(self, sums: Tensor) -> None:
        """Replace the running sums; exact scores are available on one process only."""
        sizes = [1, self._sums.numel(), self._ranking.size]
        count, own, ranked = sums.detach().double().to(self._sums.device).split(sizes)
        super().load_sums(own)
        self._ranking.load_sums(ranked, int(count))
