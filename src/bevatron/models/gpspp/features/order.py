r"""A canonical order of a molecule's atoms, independent of how the molecule is written.

Weisfeiler-Lehman refinement over all pairs: an atom's colour is hashed together with the colours of
all others and the hashes of the pairs, until no more colours appear. While atoms share a colour,
the last atom of the lowest such colour gets its own and the refinement continues (McKay and
Piperno, "Practical graph isomorphism, II", 2014). Sums of 64-bit integers wrap around, so they are
exact in any order.

Atoms that still look alike are images of each other under a symmetry of the molecule, so any choice
among them gives the same numbered graph. In 3D they may differ: the one with the larger sum of
distances to all others comes later.
"""

import numpy as np
import numpy.typing as npt

from bevatron.models.gpspp.features.keys import mixed
from bevatron.typing import Array, BoolArray, FloatArray, IntArray

Colours = npt.NDArray[np.uint64]

_RESOLUTION = 1e6
"""Integer units per Å in which distances are summed."""


def canonical_order(colours: Colours, pairs: Colours, remote: IntArray) -> IntArray:
    """Order the atoms of molecules of one size.

    Parameters
    ----------
    colours : [B, n]
        Hash of an atom's own properties.
    pairs : [B, n, n]
        Hash of what lies between two atoms, symmetric.
    remote : [B, n]
        See `remoteness`; decides between atoms that are otherwise alike.

    Returns
    -------
    int64 [B, n], the atoms in their order.

    Examples
    --------
    Ethanol, written from either end:

    >>> paths = np.abs(np.subtract.outer(np.arange(3), np.arange(3))).astype(np.uint64)
    >>> flat = np.zeros((1, 3), np.int64)
    >>> forth = canonical_order(np.array([[6, 6, 8]], np.uint64), paths[None], flat)
    >>> back = canonical_order(np.array([[8, 6, 6]], np.uint64), paths[None], flat)
    >>> bool((2 - back == forth).all())
    True
    """
    result = np.array(colours)
    open_ = np.arange(len(colours))
    current, between = colours, pairs
    while len(open_):
        current = _refined(current, between)
        result[open_] = current
        same: IntArray = (current[:, :, None] == current[:, None, :]).sum(axis=2)
        tied: BoolArray = same > 1
        left = tied.any(axis=1)
        open_, between, tied = open_[left], between[left], tied[left]
        current = _singled_out(current[left], tied, remote[open_])
    return np.argsort(result, axis=1)


def remoteness(positions: Array) -> IntArray:
    """Sum an atom's distances to all others, [B, n, 3] Å to int64 [B, n] in 1e-6 Å."""
    places: FloatArray = positions.astype(np.float64)
    offsets = places[:, :, None] - places[:, None]
    distances = np.sqrt(np.square(offsets).sum(axis=3))
    total: IntArray = np.rint(distances * _RESOLUTION).astype(np.int64).sum(axis=2)
    return total


def _refined(colours: Colours, pairs: Colours) -> Colours:
    """Hash each molecule until no more colours appear."""
    result, open_ = np.array(colours), np.arange(len(colours))
    number = _distinct(colours)
    while len(open_):
        seen: Colours = mixed(colours[:, None, :] + pairs).sum(axis=2, dtype=np.uint64)
        colours = mixed(colours * np.uint64(3) + seen)
        result[open_] = colours
        now = _distinct(colours)
        more = now > number
        open_, colours, pairs, number = open_[more], colours[more], pairs[more], now[more]
    return result


def _distinct(colours: Colours) -> IntArray:
    found: IntArray = np.count_nonzero(np.diff(np.sort(colours, axis=1), axis=1), axis=1)
    return found


def _singled_out(colours: Colours, tied: BoolArray, remote: IntArray) -> Colours:
    """Give the last atom of each molecule's lowest shared colour its own colour."""
    if not len(colours):
        return colours
    top = np.iinfo(np.uint64).max
    lowest = np.where(tied, colours, top).min(axis=1, keepdims=True)
    among = np.where(tied & (colours == lowest), remote, np.iinfo(np.int64).min)
    chosen = among.argmax(axis=1)
    rows = np.arange(len(colours))
    colours = colours.copy()
    colours[rows, chosen] = mixed(colours[rows, chosen] + np.uint64(1))
    return colours
