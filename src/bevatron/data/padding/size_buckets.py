"""Which few shapes the batches of an epoch are padded to, so that least is wasted.

A captured step works on one shape. With shapes s_1 .. s_k and every batch padded to the cheapest
that holds it, the work of an epoch grows from the sum of the batches' costs to the sum of their
shapes' costs. Batches are sorted by cost and cut into runs; a run's shape is the largest number of
edges, atoms and structures in it. Dynamic programming finds the best cuts.

Where nobody knows which batches will come, as in inference, `geometric_shape` rounds each up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bevatron.data.padding import BatchShape
from bevatron.data.padding.shape import squares_of_even
from bevatron.typing import FloatArray, IntArray

MAX_SHAPES = 4
MAX_NEIGHBOURS = 128
"""Padding edges per padding atom, where they can be kept so few: a kernel that walks an atom's
edges one after the other would wait for an atom with thousands."""
LARGE = {"edges": 65536, "atoms": 2048}
"""Sizes from which on inference pays for every padded edge or atom: below, launches take longer."""
MAX_PADDING_MOLECULE = 16
"""Atoms of a padding molecule: kernels are made for molecules of about this size."""
TOLERATED_WASTE = 0.01
"""Share of padding by which shapes may be worse than the best so that fewer are new."""
CANDIDATES = 256
"""Places where sorted batches may be cut; more would cost time and gain little."""


@dataclass(frozen=True)
class SizeBuckets:
    """Shapes, cheapest first, and what they waste on the batches they were chosen for.

    Attributes
    ----------
    shapes
        At most `MAX_SHAPES`.
    waste_edges, waste_atoms
        Shares of edges and atoms that are padding.
    """

    shapes: tuple[BatchShape, ...]
    waste_edges: float
    waste_atoms: float

    def __str__(self) -> str:
        listed = "; ".join(str(shape) for shape in self.shapes)
        return (
            f"padded to {listed} ({self.waste_edges:.1%} of edges and {self.waste_atoms:.1%} of "
            "atoms are padding)"
        )


def choose_shapes(
    sizes: IntArray, max_shapes: int = MAX_SHAPES, headroom: float = 0.01
) -> SizeBuckets:
    """Choose the shapes that waste least.

    Parameters
    ----------
    sizes
        [B, 3]: edges, atoms and structures of every batch; of molecules [B, 4], with their pairs.
    max_shapes
        So many at most.
    headroom
        Share by which shapes are larger than need be, so that the batches of another epoch,
        which are much alike, fit too.

    Returns
    -------
    SizeBuckets
        Every batch fits into the last shape or an earlier one.

    Raises
    ------
    ValueError
        If there are no batches.

    Examples
    --------
    >>> sizes = np.array([[100, 10, 2], [96, 9, 3], [900, 60, 2], [880, 64, 4]])
    >>> [shape.edges for shape in choose_shapes(sizes, 2, headroom=0.0).shapes]
    [128, 1024]
    """
    if not len(sizes):
        raise ValueError("there are no batches to choose shapes for")
    sizes = np.asarray(sizes, dtype=np.int64)
    scale = np.maximum(sizes[:, :2].mean(axis=0), 1.0)
    ordered = sizes[np.argsort((sizes[:, :2] / scale).sum(axis=1), kind="stable")]
    cuts = _best_cuts(ordered, scale, max_shapes)
    unique = tuple(sorted({_shape_of(ordered[start:stop], headroom) for start, stop in cuts}))
    return SizeBuckets(unique, *waste(sizes, unique))


def grow_shapes(shapes: Sequence[BatchShape], sizes: IntArray) -> SizeBuckets:
    """Change as few shapes as possible so that all batches fit: what is recorded for others stays.

    One shape becomes large enough for what fits nowhere, or takes the place of the largest if there
    are `MAX_SHAPES`. If that pads much more than the best shapes do, those are taken.

    Parameters
    ----------
    shapes
        Those in use, at least one.
    sizes
        As of `choose_shapes`.

    Examples
    --------
    >>> shapes = choose_shapes(np.array([[100, 10, 2], [900, 60, 2]]), 2, headroom=0.0).shapes
    >>> larger = np.array([[100, 10, 2], [900, 60, 2], [1100, 60, 2]])
    >>> [shape.edges for shape in grow_shapes(shapes, larger).shapes]
    [128, 1024, 1152]
    """
    best = choose_shapes(sizes)
    kept = sorted(shapes)[: MAX_SHAPES - 1]
    left = np.array([size for size in sizes.tolist() if smallest_shape(kept, size) is None])
    if not len(left):
        return SizeBuckets(tuple(kept), *waste(sizes, kept))
    grown = tuple(sorted({*kept, *choose_shapes(left, 1).shapes}))
    wasted = waste(sizes, grown)
    found = SizeBuckets(grown, *wasted)
    worse = sum(wasted) - (best.waste_edges + best.waste_atoms)
    return found if worse <= 2 * TOLERATED_WASTE else best


def geometric_shape(size: Sequence[int]) -> BatchShape:
    """Round (edges, atoms, structures) of a batch up to a shape that depends on nothing else.

    Edges and atoms are rounded to four steps per doubling, large ones (`LARGE`) to sixteen, so that
    structures whose edges come and go as they move share a shape.

    Examples
    --------
    >>> str(geometric_shape((119_372, 3072, 12)))
    '3200 atoms, 122880 edges, 16 structures'
    >>> geometric_shape((119_001, 3072, 12)) == geometric_shape((122_500, 3072, 15))
    True
    """
    edges, atoms, graphs = size
    most_edges = _geometric(edges, 128, LARGE["edges"])
    spare = 1 + -(-(most_edges - edges) // MAX_NEIGHBOURS)
    most_graphs = max(8, 1 << graphs.bit_length())
    return BatchShape(most_edges, _geometric(atoms + spare, 16, LARGE["atoms"]), most_graphs)


def smallest_shape(shapes: Sequence[BatchShape], size: Sequence[int]) -> BatchShape | None:
    """Return the cheapest shape for (edges, atoms, graphs[, pairs]), None if all are too small.

    One in which few padding atoms would carry all padding edges is a last resort.
    """
    edges, atoms = size[:2]
    crowded = None
    for shape in sorted(shapes):
        spare_edges, spare_atoms = shape.edges - edges, shape.atoms - atoms
        if not shape.holds(tuple(size)):
            continue
        if spare_edges <= MAX_NEIGHBOURS * spare_atoms:
            return shape
        crowded = crowded or shape
    return crowded


def waste(sizes: IntArray, shapes: Sequence[BatchShape]) -> tuple[float, float]:
    """Return the shares of edges and atoms that are padding; batches that fit nowhere are not."""
    real, padded = np.zeros(2), np.zeros(2)
    for size in np.asarray(sizes).tolist():
        shape = smallest_shape(shapes, size)
        real += size[:2]
        padded += size[:2] if shape is None else (shape.edges, shape.atoms)
    share = 1.0 - real / np.maximum(padded, 1.0)
    return float(share[0]), float(share[1])


def _shape_of(sizes: IntArray, headroom: float) -> BatchShape:
    """Return the shape that holds all of these batches, with headroom and in round numbers."""
    edges = _rounded(sizes[:, 0].max() * (1.0 + headroom), 128)
    spare = 1 + -(-(edges - sizes[:, 0]) // MAX_NEIGHBOURS)
    most = int(sizes[:, 1].max())
    atoms = max(int((sizes[:, 1] + spare).max()), most + 1 + int(most * headroom))
    atoms = _rounded(atoms, 16)
    graphs = int(sizes[:, 2].max() * (1.0 + 4 * headroom)) + 1
    if sizes.shape[1] < 4:
        return BatchShape(edges, atoms, _rounded(graphs, 8))
    # What a batch lacks in atoms becomes molecules of common size, which have pairs too.
    fewest = int((sizes[:, 2] + -(-(atoms - sizes[:, 1]) // MAX_PADDING_MOLECULE)).max())
    graphs = _rounded(max(graphs, fewest), 8)
    padded = [
        pairs + squares_of_even(atoms - num_atoms, graphs - num_graphs)
        for _, num_atoms, num_graphs, pairs in sizes.tolist()
    ]
    largest = max(int(sizes[:, 3].max() * (1.0 + headroom)), *padded)
    return BatchShape(edges, atoms, graphs, _rounded(largest, 128))


def _geometric(value: int, least: int, large: int) -> int:
    """Round up to four steps per doubling, from ``large`` on to sixteen."""
    steps = 4 if value < large else 16
    below = 1 << max(value - 1, 1).bit_length() - 1  # the power of two below, or 1
    return max(_rounded(value, max(below // steps, 1)), least)


def _rounded(value: float, multiple: int) -> int:
    return int(-(-value // multiple) * multiple)


def _best_cuts(ordered: IntArray, scale: FloatArray, max_shapes: int) -> list[tuple[int, int]]:
    """Cut sorted batches into at most so many runs, the sum of their shapes' costs being least."""
    num = len(ordered)
    places = np.unique(np.linspace(0, num, min(num, CANDIDATES) + 1).round().astype(np.int64))
    ends = len(places)
    largest = np.maximum.reduceat(ordered[:, :2], places[:-1])
    cost = np.full((ends, ends), np.inf)
    for last in range(1, ends):
        shapes = np.maximum.accumulate(largest[last - 1 :: -1])[::-1]
        cost[:last, last] = (places[last] - places[:last]) * (shapes / scale).sum(axis=1)
    best = np.full((max_shapes + 1, ends), np.inf)
    best[0, 0] = 0.0
    came = np.zeros((max_shapes + 1, ends), dtype=np.int64)
    for used in range(1, max_shapes + 1):
        totals = best[used - 1][:, None] + cost
        came[used], best[used] = totals.argmin(axis=0), totals.min(axis=0)
    used = int(best[:, -1].argmin())
    runs, last = [], ends - 1
    for number in range(used, 0, -1):
        first = int(came[number, last])
        runs.append((int(places[first]), int(places[last])))
        last = first
    return runs[::-1]
