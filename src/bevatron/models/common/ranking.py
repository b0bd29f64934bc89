"""How well scores put what is true before what is not: ROC curve and average precision."""

import numpy as np
import numpy.typing as npt

from bevatron.typing import FloatArray


def ranking(negatives: npt.ArrayLike, positives: npt.ArrayLike) -> tuple[float, float] | None:
    """Compute (area under the ROC curve, average precision) from counts by ascending score.

    The area is the chance that a positive scores above a negative, the precision's average is over
    the recall that is won. Equal scores count half for the area, and together for the precision, as
    in scikit-learn.

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
    """Compute the same of the scores themselves: every distinct one counts by itself.

    Parameters
    ----------
    scores
        [n], in any order.
    answers
        1 or 0, [n].
    weights
        How often each counts, [n]; once by default.

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
