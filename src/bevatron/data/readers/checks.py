"""Checks of every structure: atoms, finite numbers, elements, volume, coinciding atoms."""

import numpy as np

from bevatron.data.neighbours import MIN_DISTANCE, refuse_large_extent, span_volume
from bevatron.data.readers.base import RawFrame
from bevatron.errors import DataError
from bevatron.typing import BoolArray, FloatArray

NUM_ELEMENTS = 118


def check_structure(frame: RawFrame) -> None:
    """Refuse a frame for which nothing can be computed.

    Raises DataError, to which the caller adds file and frame.
    """
    if len(frame.numbers) == 0:
        raise DataError("there are no atoms")
    if frame.positions.shape != (len(frame.numbers), 3):
        raise DataError(
            f"positions have shape {frame.positions.shape}; expected ({len(frame.numbers)}, 3)"
        )
    if not np.isfinite(frame.positions).all():
        atom = int(np.flatnonzero(~np.isfinite(frame.positions).all(axis=1))[0])
        raise DataError(f"the position of atom {atom} is NaN or infinite")
    if frame.numbers.min() < 1 or frame.numbers.max() > NUM_ELEMENTS:
        atom = int(np.flatnonzero((frame.numbers < 1) | (frame.numbers > NUM_ELEMENTS))[0])
        raise DataError(
            f"atom {atom} has the atomic number {frame.numbers[atom]}, which is not an element"
        )
    if not np.isfinite(frame.cell).all():
        raise DataError("the cell holds NaN or infinity")
    refuse_large_extent(frame.positions, frame.cell, frame.pbc)
    if frame.pbc.any() and not span_volume(frame.cell, frame.pbc):
        axes = " ".join("T" if axis else "F" for axis in frame.pbc)
        raise DataError(f"the cell has zero volume although pbc is '{axes}'")
    pair = coinciding_atoms(frame.positions, frame.cell, frame.pbc)
    if pair is not None:
        raise DataError(f"atoms {pair[0]} and {pair[1]} coincide (counting from 0)")


# Arbitrary irrational-looking numbers: a generic direction separates symmetric atoms.
_COSINE = np.array([0.8171, 1.2937, 1.0313])
_SINE = np.array([1.1459, 0.7283, 0.9417])
_OPEN = np.array([0.6143, 0.5381, 0.5771])


def coinciding_atoms(
    positions: FloatArray, cell: FloatArray, pbc: BoolArray
) -> tuple[int, int] | None:
    """Find two atoms closer than `MIN_DISTANCE`, periodic images included, in O(N log N).

    Every atom gets one number that changes smoothly with its position and not at all with a lattice
    translation; only atoms with nearly the same number are compared.

    Parameters
    ----------
    positions : [N, 3] Å
    cell : [3, 3] Å
    pbc : [3]

    Returns
    -------
    Two atoms, or None.

    Examples
    --------
    >>> import numpy as np
    >>> r = np.array([[0.0, 0, 0], [1.0, 0, 0], [4.0, 8.0, 0]])
    >>> coinciding_atoms(r, 4 * np.eye(3), np.array([True, True, True]))
    (0, 2)
    """
    if len(positions) < 2:
        return None
    rows = cell[pbc]
    inverse = np.linalg.inv(rows) if len(rows) == 3 else np.linalg.pinv(rows)
    fractions = positions @ inverse
    angles = 2 * np.pi * fractions
    open_part = positions - fractions @ rows
    k = len(rows)
    number = np.cos(angles) @ _COSINE[:k] + np.sin(angles) @ _SINE[:k] + open_part @ _OPEN
    steepness = 2 * np.pi * np.linalg.norm(inverse, axis=0) @ np.hypot(_COSINE[:k], _SINE[:k])
    # Sine and cosine of large angles are a little less than exact.
    tolerance = 1.01 * MIN_DISTANCE * (steepness + np.linalg.norm(_OPEN)) + 1e-9
    order = np.argsort(number)
    ascending = number[order]
    for apart in range(1, len(order)):
        close = np.flatnonzero(ascending[apart:] - ascending[:-apart] <= tolerance)
        if len(close) == 0:
            return None
        first, second = order[close], order[close + apart]
        difference = fractions[second] - fractions[first]
        vector = (difference - np.round(difference)) @ rows + open_part[second] - open_part[first]
        hits = np.flatnonzero((vector * vector).sum(axis=1) < MIN_DISTANCE**2)
        if len(hits):
            i, j = int(first[hits[0]]), int(second[hits[0]])
            return (i, j) if i < j else (j, i)
    return None
