"""E0, the energies of isolated atoms: where they come from, and how they follow new labels."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bevatron.typing import BoolArray, FloatArray

SMALLEST = 1e-8
"""Singular values below this fraction of the largest are round-off."""

SIGNIFICANCE = 5.0
"""A combination of E0 changes only if it explains this many times the remaining error."""


@dataclass(frozen=True)
class AtomicEnergies:
    """E0 of one head and where they come from.

    Attributes
    ----------
    values : atomic number -> eV
    origin : for the log: ``least squares over 900 structures``
    """

    values: Mapping[int, float]
    origin: str = "given"


@dataclass(frozen=True)
class Change:
    """Result of `least_change`.

    Attributes
    ----------
    values : [Z] eV
    rank : number of independent combinations of elements that the compositions hold
    separate : [Z]
        Whether the compositions determine an element by itself.
    """

    values: FloatArray
    rank: int
    separate: BoolArray


def least_change(counts: FloatArray, residuals: FloatArray, known: BoolArray) -> Change:
    """Return the smallest change of E0 that explains the errors of a model's energies.

    min |d| subject to d = argmin sum_s ((residual_s - counts_s . d) / atoms_s)^2

    A combination of elements whose amount does not vary, or so little that its effect disappears
    among the other errors, stays unchanged: otherwise E0 would amplify errors of the model. An
    element without an old E0 has no change to minimise, so it explains what it can and the
    others explain the rest.

    Parameters
    ----------
    counts : [S, Z]
        Atoms of each element in each structure.
    residuals : [S] eV
        Label minus the model's energy, with E0 = 0 for unknown elements.
    known : [Z]
        Whether the model has an E0 of an element.

    Examples
    --------
    Water alone shows the sum of the changes, water and hydrogen show each.

    >>> water, both = np.array([[2.0, 1.0]]), np.array([[2.0, 1.0], [2.0, 0.0]])
    >>> least_change(water, np.array([5.0]), np.ones(2, bool)).values.round(6).tolist()
    [2.0, 1.0]
    >>> (least_change(both, np.array([5.0, 0.0]), np.ones(2, bool)).values.round(6) + 0.0).tolist()
    [0.0, 5.0]
    """
    atoms = counts.sum(axis=1)
    shares, errors = counts / atoms[:, None], residuals / atoms
    left, sizes, right = np.linalg.svd(shares, full_matrices=False)
    smallest = SMALLEST * float(sizes.max(initial=0.0))
    directions = right[sizes > smallest]
    free = shares[:, ~known]
    left, sizes, _ = np.linalg.svd(free, full_matrices=False)
    explained = left[:, sizes > smallest]
    rest = shares[:, known] - explained @ (explained.T @ shares[:, known])
    unexplained = errors - explained @ (explained.T @ errors)
    values = np.zeros(len(known))
    values[known] = _significant(rest, unexplained, smallest, len(errors) - explained.shape[1])
    values[~known] = np.linalg.lstsq(free, errors - shares @ values, rcond=SMALLEST)[0]
    return Change(
        values=values,
        rank=len(directions),
        separate=np.square(directions).sum(axis=0) > 1 - SMALLEST,
    )


def _significant(
    shares: FloatArray, errors: FloatArray, smallest: float, num_errors: int
) -> FloatArray:
    """Solve for the directions that explain more than noise would."""
    left, sizes, right = np.linalg.svd(shares, full_matrices=False)
    there = sizes > smallest
    left, sizes, right = left[:, there], sizes[there], right[there]
    parts = left.T @ errors
    remaining = errors - left @ parts
    noise = np.sqrt(np.square(remaining).sum() / max(num_errors - len(sizes), 1))
    kept = np.abs(parts) > SIGNIFICANCE * noise
    change: FloatArray = right[kept].T @ (parts[kept] / sizes[kept])
    return change
