"""Neighbour lists: the directed edges of a structure within a cutoff, periodic images included.

Built by vesin and brought into one reproducible order. The convention is mace's: an edge (i, j, S)
leads from the sender i to the receiver j, and its vector is r_j - r_i + S.cell. Every pair occurs
twice, once in each direction. An atom is a neighbour of its own periodic images, never of itself.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bevatron.errors import DataError
from bevatron.typing import Array, Arrays, BoolArray, FloatArray

Int32Array: TypeAlias = npt.NDArray[np.int32]

MIN_DISTANCE = 1e-3
"""Two atoms closer than this, in Å, coincide: the energy of such a structure is meaningless."""


LARGEST_EXTENT = 1e6
"""Å; lengths above this are in another unit, or a calculation exploded."""


def neighbour_list(
    positions: npt.ArrayLike,
    cell: npt.ArrayLike,
    pbc: npt.ArrayLike | Sequence[bool],
    cutoff: float,
) -> tuple[Int32Array, Int32Array]:
    """Find all directed edges shorter than the cutoff.

    Exact for cells smaller than the cutoff (as many images as it takes), for any mixture of
    periodic and open axes, for triclinic and left-handed cells and for atoms outside the cell. The
    lattice vector of an open axis plays no part. Raises DataError if positions or cell are not
    finite or larger than `LARGEST_EXTENT`, the periodic axes span no volume, or two atoms coincide.

    Parameters
    ----------
    positions : [N, 3] Å
    cell : [3, 3] Å, rows are lattice vectors; rows of open axes may be zero
    pbc : [3], or one value for all axes
    cutoff : Å

    Returns
    -------
    edges : [E, 2] int32
        (sender, receiver), sorted by receiver, then sender, then shift.
    shifts : [E, 3] int32
        S, with vec = r[receiver] - r[sender] + S @ cell.

    Examples
    --------
    One atom in a cubic box of 2 Å has six images nearer than 2.5 Å:

    >>> import numpy as np
    >>> edges, shifts = neighbour_list(np.zeros((1, 3)), 2.0 * np.eye(3), True, 2.5)
    >>> len(edges), shifts[0].tolist()
    (6, [-1, 0, 0])
    """
    import vesin

    r = np.ascontiguousarray(positions, dtype=np.float64).reshape(-1, 3)
    box = np.ascontiguousarray(cell, dtype=np.float64).reshape(3, 3)
    periodic = np.ascontiguousarray(np.broadcast_to(np.asarray(pbc, dtype=bool), (3,)))
    if not cutoff > 0:
        raise DataError(f"the cutoff is {cutoff} Å, which must be greater than zero")
    if not (np.isfinite(r).all() and np.isfinite(box).all()):
        raise DataError("positions or cell hold NaN or infinity")
    if len(r) == 0:
        return np.zeros((0, 2), np.int32), np.zeros((0, 3), np.int32)
    refuse_large_extent(r, box, periodic)
    if periodic.any() and not span_volume(box, periodic):
        raise DataError("the cell has zero volume along its periodic axes")
    if _too_thin_for_vesin(r, box, periodic, cutoff):
        pairs, shifts, distances = _pairs_by_ase(r, box, periodic, cutoff)
    else:
        # One thread: whole structures are what is done in parallel.
        finder = vesin.NeighborList(cutoff=float(cutoff), full_list=True, n_threads=1)
        pairs, shifts, distances = finder.compute(r, box, periodic, "PSd", copy=False)
    if len(distances) and distances.min() < MIN_DISTANCE:
        i, j = (int(atom) for atom in pairs[int(distances.argmin())])
        raise DataError(
            f"atoms {min(i, j)} and {max(i, j)} coincide "
            f"({distances.min():.1e} Å apart, counting from 0)"
        )
    order = _order(pairs, shifts, len(r))
    return pairs[order].astype(np.int32), shifts[order].astype(np.int32)


def add_neighbours(sample: Arrays, cutoff: float) -> dict[str, Array]:
    """Add the fields ``edges`` and ``edge_shifts`` to a raw sample.

    With ``functools.partial(add_neighbours, cutoff=5.0)`` it is what `prepare` takes. Raises
    DataError as `neighbour_list` does.

    Parameters
    ----------
    sample : with at least ``positions``, ``cell`` and ``pbc``; left as it is
    cutoff : Å
    """
    edges, shifts = neighbour_list(sample["positions"], sample["cell"], sample["pbc"], cutoff)
    return {**sample, "edges": edges, "edge_shifts": shifts}


def span_volume(cell: FloatArray, periodic: BoolArray, thinnest: float = 0.1) -> bool:
    """Whether the periodic lattice vectors span a volume (or an area, or a length).

    Heights are compared, not the volume: every periodic vector must extend at least ``thinnest`` Å
    out of the plane of the other periodic ones, so the result does not depend on the other lengths.
    """
    a = [row for row, axis in zip(cell.tolist(), periodic.tolist(), strict=True) if axis]
    if not a or not all(math.isfinite(x) for row in a for x in row):
        return False
    # In plain numbers: a call into linear algebra takes longer than all of this.
    lengths = [math.hypot(*row) for row in a]
    if len(a) == 1:
        return lengths[0] >= thinnest
    areas = [math.hypot(*_cross(u, v)) for u, v in combinations(a, 2)]
    if len(a) == 2:
        return areas[0] > 0 and areas[0] >= thinnest * max(lengths)
    volume: float = abs(sum(x * y for x, y in zip(_cross(a[0], a[1]), a[2], strict=True)))
    return volume > 0 and volume >= thinnest * max(areas)


def refuse_large_extent(
    positions: FloatArray,
    cell: FloatArray,
    periodic: BoolArray,
) -> None:
    """Refuse a cell or distances between atoms above `LARGEST_EXTENT`.

    Raises DataError naming the lattice vector or the atom.
    """
    longest = float(np.abs(cell).max())
    if longest > LARGEST_EXTENT:
        axis = int(np.abs(cell).max(axis=1).argmax()) + 1
        raise DataError(
            f"lattice vector {axis} of the cell holds a length of {longest:.3g} Å; lengths are in "
            f"Å, at most {LARGEST_EXTENT:.0g}"
        )
    # Atoms of a trajectory that was never wrapped may be many cells away.
    most = LARGEST_EXTENT * (1e3 if periodic.all() else 1.0)
    # Halved, because a difference of two huge numbers overflows.
    away = np.abs(positions / 2 - np.median(positions / 2, axis=0)).max(axis=1)
    if 2 * away.max() > most:
        raise DataError(
            f"atom {int(away.argmax())} (counting from 0) is {2 * away.max():.3g} Å away from the "
            f"others; lengths are in Å, at most {most:.0g}"
        )


VESIN_CELLS = 1e5
"""Cells of vesin's grid; a box with more is divided more coarsely along all three axes."""


def _too_thin_for_vesin(
    positions: FloatArray,
    cell: FloatArray,
    periodic: BoolArray,
    cutoff: float,
) -> bool:
    """Whether vesin's coarser grid may leave no cell along a thin axis, at which it aborts."""
    spans = np.ptp(positions, axis=0)
    lengths = np.linalg.norm(cell, axis=1)
    widest = np.where(periodic, np.maximum(lengths, spans.max()), spans.max())
    total = float(np.prod(np.maximum(widest / cutoff, 1.0)))
    if total <= VESIN_CELLS:
        return False
    thinnest = float(spans.min())
    if periodic.all():
        thinnest = float(1.0 / np.linalg.norm(np.linalg.inv(cell), axis=0).max())
    elif periodic.any():
        thinnest = min(thinnest, float(lengths[periodic].min()))
    return bool(max(thinnest / cutoff, 1.0) * (VESIN_CELLS / total) ** (1 / 3) < 2.0)


def _pairs_by_ase(
    positions: FloatArray,
    cell: FloatArray,
    periodic: BoolArray,
    cutoff: float,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], FloatArray]:
    """Find pairs, shifts and distances as vesin does, slower, in a box of any shape."""
    from ase.neighborlist import primitive_neighbor_list

    first, second, distances, shifts = primitive_neighbor_list(
        "ijdS", periodic, cell, positions, float(cutoff)
    )
    return np.stack([first, second], axis=1), shifts, distances


def _cross(a: list[float], b: list[float]) -> tuple[float, float, float]:
    return (a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0])


def _order(
    pairs: npt.NDArray[Any], shifts: npt.NDArray[Any], num_atoms: int
) -> npt.NDArray[np.intp]:
    """Sort by receiver, sender and shift; one whole-number key is several times faster."""
    if len(pairs) == 0:
        return np.zeros(0, dtype=np.intp)
    farthest = int(np.abs(shifts).max())
    width = 2 * farthest + 1
    s = shifts.astype(np.int64) + farthest
    if num_atoms**2 * width**3 >= 2**62:
        return np.lexsort((s[:, 2], s[:, 1], s[:, 0], pairs[:, 0], pairs[:, 1]))
    ij = pairs.astype(np.int64)
    key = ij[:, 1] * num_atoms + ij[:, 0]
    key = ((key * width + s[:, 0]) * width + s[:, 1]) * width + s[:, 2]
    return np.argsort(key, kind="stable")
