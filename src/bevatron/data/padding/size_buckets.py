"""Chooses the few padded shapes for the batches of an epoch that waste least.

A captured step works on one shape. With shapes s_1 .. s_k and every batch padded to the cheapest
that holds it, the work of an epoch grows from the sum of the batches' costs to the sum of their
shapes' costs. Batches are sorted by cost and cut into runs; a run's shape is the one that covers
it (`PaddingRule.covering`). Dynamic programming finds the best cuts. Cost is the sum of the axes
that count as work, each relative to its mean.

Sizes are lengths of a batch along the axes of its kind, in the rule's order. Where nobody knows
which batches will come, as in inference, `PaddingRule.rounded` rounds each up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bevatron.data.padding.shape import BatchShape, PaddingRule
from bevatron.typing import FloatArray, IntArray

MAX_SHAPES = 4
TOLERATED_WASTE = 0.01
"""Share of padding of each axis by which shapes may be worse than the best so that fewer are new.
"""
CANDIDATES = 256
"""Places where sorted batches may be cut; more would cost time and gain little."""


@dataclass(frozen=True)
class SizeBuckets:
    """Shapes, cheapest first, and what they waste on the batches they were chosen for.

    Attributes
    ----------
    shapes : at most `MAX_SHAPES`
    waste : by axis the share that is padding
    """

    shapes: tuple[BatchShape, ...]
    waste: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        listed = "; ".join(str(shape) for shape in self.shapes)
        wasted = " and ".join(f"{share:.1%} of {name}" for name, share in self.waste.items())
        return f"padded to {listed} ({wasted} are padding)"


def choose_shapes(
    rule: PaddingRule, sizes: IntArray, max_shapes: int = MAX_SHAPES, headroom: float = 0.01
) -> SizeBuckets:
    """Choose the shapes that waste least; ValueError if there are no batches.

    Parameters
    ----------
    rule : padding rule of the kind of batch
    sizes : sizes of every batch, [B, axes]
    max_shapes : upper bound of their number
    headroom
        Fraction by which shapes are larger than necessary, so that the batches of another epoch,
        which are much alike, fit too.

    Returns
    -------
    SizeBuckets
        Every batch fits into the last shape or an earlier one.

    Examples
    --------
    >>> from bevatron.data.padding.atoms import AtomPadding
    >>> sizes = np.array([[100, 10, 2], [96, 9, 3], [900, 60, 2], [880, 64, 4]])
    >>> [shape.edges for shape in choose_shapes(AtomPadding(), sizes, 2, headroom=0.0).shapes]
    [128, 1024]
    """
    if not len(sizes):
        raise ValueError("there are no batches to choose shapes for")
    sizes = np.asarray(sizes, dtype=np.int64)
    work = sizes[:, _work(rule)]
    scale = np.maximum(work.mean(axis=0), 1.0)
    order = np.argsort((work / scale).sum(axis=1), kind="stable")
    cuts = _best_cuts(work[order], scale, max_shapes)
    unique = {rule.covering(sizes[order][start:stop], headroom) for start, stop in cuts}
    shapes = tuple(sorted(unique))
    return SizeBuckets(shapes, waste(rule, sizes, shapes))


def grow_shapes(rule: PaddingRule, shapes: Sequence[BatchShape], sizes: IntArray) -> SizeBuckets:
    """Change as few shapes as possible so that all batches fit; graphs of the others stay.

    One shape becomes large enough for what fits nowhere, or takes the place of the largest if there
    are `MAX_SHAPES`. If that pads much more than the best shapes do, those are taken.

    Parameters
    ----------
    shapes : those in use, at least one
    rule, sizes : as in `choose_shapes`

    Examples
    --------
    >>> from bevatron.data.padding.atoms import AtomPadding
    >>> rule, sizes = AtomPadding(), np.array([[100, 10, 2], [900, 60, 2]])
    >>> shapes = choose_shapes(rule, sizes, 2, headroom=0.0).shapes
    >>> larger = np.array([[100, 10, 2], [900, 60, 2], [1100, 60, 2]])
    >>> [shape.edges for shape in grow_shapes(rule, shapes, larger).shapes]
    [128, 1024, 1152]
    """
    best = choose_shapes(rule, sizes)
    kept = sorted(shapes)[: MAX_SHAPES - 1]
    left = np.array([size for size in sizes.tolist() if smallest_shape(rule, kept, size) is None])
    if not len(left):
        return SizeBuckets(tuple(kept), waste(rule, sizes, kept))
    grown = tuple(sorted({*kept, *choose_shapes(rule, left, 1).shapes}))
    found = SizeBuckets(grown, waste(rule, sizes, grown))
    worse = sum(found.waste.values()) - sum(best.waste.values())
    return found if worse <= len(found.waste) * TOLERATED_WASTE else best


def smallest_shape(
    rule: PaddingRule, shapes: Sequence[BatchShape], size: Sequence[int]
) -> BatchShape | None:
    """Return the cheapest shape for a batch, None if all are too small.

    One in which the batch would be crowded is a last resort.
    """
    holding = [shape for shape in sorted(shapes) if rule.holds(shape, size)]
    roomy = (shape for shape in holding if not rule.crowded(shape, size))
    return next(roomy, holding[0] if holding else None)


def waste(rule: PaddingRule, sizes: IntArray, shapes: Sequence[BatchShape]) -> dict[str, float]:
    """Return by axis the share that is padding; batches that fit nowhere are not padded."""
    columns = _work(rule)
    names = [rule.names[column] for column in columns]
    real, padded = np.zeros(len(names)), np.zeros(len(names))
    for size in np.asarray(sizes).tolist():
        shape = smallest_shape(rule, shapes, size)
        own = [size[column] for column in columns]
        real += own
        padded += own if shape is None else [shape[name] for name in names]
    shares = 1.0 - real / np.maximum(padded, 1.0)
    return dict(zip(names, shares.tolist(), strict=True))


def _work(rule: PaddingRule) -> list[int]:
    """Return the columns of sizes on which the time of a step depends."""
    return [column for column, axis in enumerate(rule.axes) if axis.counts_work]


def _best_cuts(work: IntArray, scale: FloatArray, max_shapes: int) -> list[tuple[int, int]]:
    """Cut sorted batches into at most ``max_shapes`` runs whose shapes cost least."""
    num = len(work)
    places = np.unique(np.linspace(0, num, min(num, CANDIDATES) + 1).round().astype(np.int64))
    num_places = len(places)
    largest = np.maximum.reduceat(work, places[:-1])
    cost = np.full((num_places, num_places), np.inf)
    for last in range(1, num_places):
        shapes = np.maximum.accumulate(largest[last - 1 :: -1])[::-1]
        cost[:last, last] = (places[last] - places[:last]) * (shapes / scale).sum(axis=1)
    best = np.full((max_shapes + 1, num_places), np.inf)
    best[0, 0] = 0.0
    came = np.zeros((max_shapes + 1, num_places), dtype=np.int64)
    for used in range(1, max_shapes + 1):
        totals = best[used - 1][:, None] + cost
        came[used], best[used] = totals.argmin(axis=0), totals.min(axis=0)
    used = int(best[:, -1].argmin())
    runs, last = [], num_places - 1
    for number in range(used, 0, -1):
        first = int(came[number, last])
        runs.append((int(places[first]), int(places[last])))
        last = first
    return runs[::-1]
