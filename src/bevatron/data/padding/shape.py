"""Padded shapes of a kind of batch: named axes and the rule for their lengths.

A batch is ragged along a few named axes, such as edges, atoms and graphs. A `BatchShape` gives each
of them a fixed length. A `PaddingRule` knows what a kind of batch asks of a shape: how long an axis
must be so that a batch and its padding fit. The batch itself says which of its tensors run along
which axis and what its padding rows hold, see `Paddable`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self, TypeAlias, runtime_checkable

from bevatron.task import Batch
from bevatron.typing import Array, IntArray

Rows: TypeAlias = Array | float | bool | int
"""Values that broadcast to the padding rows."""

_OLD_ORDER = ("edges", "atoms", "graphs", "pairs")
"""Default names of the lengths of a `BatchShape`."""


@dataclass(frozen=True)
class Axis:
    """A named axis along which batches are ragged.

    Attributes
    ----------
    name : as in the ``sizes`` of the batch
    multiple
        Shapes that are chosen for a data set are multiples of it, and `rounded` gives no less.
    spare : padding rows that a padded batch has at least
    headroom : how much headroom it gets, relative to other axes
    counts_work
        Whether the time of a step grows with it; shapes are chosen to waste little of these.
    fine_from : length from which on shapes are sixteen to a doubling instead of four
    """

    name: str
    multiple: int = 8
    spare: int = 0
    headroom: float = 1.0
    counts_work: bool = True
    fine_from: int = 65536

    def rounded(self, length: int) -> int:
        """Round up to one of few lengths.

        Examples
        --------
        >>> axis = Axis("atoms", 16, fine_from=128)
        >>> [axis.rounded(length) for length in (3, 33, 41, 65, 129)]
        [16, 40, 48, 80, 136]
        """
        steps = 4 if length < self.fine_from else 16
        below = 1 << max(length - 1, 1).bit_length() - 1  # the power of two below, or 1
        return max(round_up(length, max(below // steps, 1)), self.multiple)


@dataclass(frozen=True, order=True, init=False)
class BatchShape:
    """Length of every ragged axis of a padded batch, by name.

    Shapes of one kind of batch are ordered by their first axis, then by the second and so on.

    Parameters
    ----------
    **lengths : in the order of the kind's axes

    Examples
    --------
    >>> shape = BatchShape(edges=120, atoms=24, graphs=7)
    >>> shape.atoms, shape["graphs"], str(shape)
    (24, 7, '120 edges, 24 atoms, 7 graphs')
    """

    lengths: tuple[tuple[str, int], ...]
    _by_name: dict[str, int] = field(compare=False, repr=False)
    _hash: int = field(compare=False, repr=False)

    def __init__(self, *unnamed: int, **lengths: int) -> None:
        named = {**dict(zip(_OLD_ORDER, unnamed, strict=False)), **lengths}
        object.__setattr__(self, "lengths", tuple(named.items()))
        object.__setattr__(self, "_by_name", named)
        # Of numbers alone, so that it is the same in every process.
        object.__setattr__(self, "_hash", hash(tuple(named.values())))

    def __hash__(self) -> int:
        return self._hash  # a step looks up its graph by the shape many times

    def __getitem__(self, name: str) -> int:
        return self._by_name[name]

    def __getattr__(self, name: str) -> int:
        if not name.startswith("_") and name in self._by_name:
            return self._by_name[name]
        raise AttributeError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.lengths)

    def fits(self, batch: "Paddable") -> bool:
        """Whether a batch can be padded to this shape."""
        return batch.padding.holds(self, batch.padding.size_of(batch.sizes))

    def __str__(self) -> str:
        return ", ".join(f"{length} {name}" for name, length in self.lengths)


@dataclass(frozen=True)
class PaddingRule:
    """Requirements of a kind of batch on its shapes; by default each axis is independent.

    A kind of batch whose axes depend on each other, such as edges that need an atom to point to,
    has a subclass. Sizes are lengths in the order of ``axes``.

    Attributes
    ----------
    axes : the one that most of the work depends on comes first
    samples : name of the axis that counts samples

    Examples
    --------
    >>> import numpy as np
    >>> rule = PaddingRule((Axis("tokens", 128), Axis("samples", spare=1)), samples="samples")
    >>> str(rule.covering(np.array([[300, 2], [210, 5]]), headroom=0.01))
    '384 tokens, 8 samples'
    """

    axes: tuple[Axis, ...]
    samples: str

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(axis.name for axis in self.axes)

    def size_of(self, counts: Mapping[str, int]) -> tuple[int, ...]:
        """Return the lengths of the axes from named counts, such as those of a batch."""
        return tuple([counts[name] for name in self.names])

    def holds(self, shape: BatchShape, size: Sequence[int]) -> bool:
        """Whether a batch of this size can be padded to a shape."""
        for axis, length in zip(self.axes, size, strict=True):
            if length + axis.spare > shape[axis.name]:
                return False
        return True

    def crowded(self, shape: BatchShape, size: Sequence[int]) -> bool:  # noqa: ARG002
        """Whether padding to a shape it fits would slow the batch down; a last resort."""
        return False

    def covering(self, sizes: IntArray, headroom: float) -> BatchShape:
        """Return the shape that holds all batches of these sizes, [B, axes], with headroom."""
        largest = sizes.max(axis=0).tolist()
        return BatchShape(
            **{
                axis.name: round_up(
                    int(length * (1.0 + axis.headroom * headroom)) + axis.spare, axis.multiple
                )
                for axis, length in zip(self.axes, largest, strict=True)
            }
        )

    def rounded(self, size: Sequence[int]) -> BatchShape:
        """Round the size of one batch up to one of few shapes.

        Four per doubling of each axis, sixteen where it is long; axes on which the work does not
        depend grow fourfold from their multiple on, so that they hardly add to the number of
        shapes.

        Examples
        --------
        >>> axes = (Axis("atoms", 8), Axis("bonds", 16, counts_work=False))
        >>> rule = PaddingRule(axes, samples="bonds")
        >>> str(rule.rounded((41, 3))), str(rule.rounded((41, 65)))
        ('48 atoms, 16 bonds', '48 atoms, 256 bonds')
        """

        def length(axis: Axis, needed: int) -> int:
            if axis.counts_work:
                return axis.rounded(needed)
            found = axis.multiple
            while found < needed:
                found *= 4
            return found

        return BatchShape(
            **{
                axis.name: length(axis, needed + axis.spare)
                for axis, needed in zip(self.axes, size, strict=True)
            }
        )


@dataclass(frozen=True)
class Ragged:
    """Along which axis a tensor of a batch is ragged.

    Attributes
    ----------
    axis : name of the axis
    dim : dimension of the tensor
    extra : entries beyond the axis's length: 1 for offsets
    """

    axis: str
    dim: int = 0
    extra: int = 0


RaggedFields: TypeAlias = Mapping[str, Ragged | tuple[Ragged, ...]]
"""Field of a batch -> the axis or the axes along which it is ragged."""


@runtime_checkable
class Paddable(Batch, Protocol):
    """A batch that can be padded to a shape: a frozen dataclass of tensors.

    Loss, gradients and metrics of the real samples must not depend on the padding: it carries
    neither labels nor weights, and no real row refers to a padding row. Fields that `to` leaves in
    the type they have are listed in ``keeps_dtype``, if there are any.
    """

    padding: ClassVar[PaddingRule]
    ragged: ClassVar[RaggedFields]
    """Every tensor of the batch by its field's name; of one ragged along two axes (rows and columns
    of an alignment) both, of one of fixed shape none, ``()``."""

    def padding_rows(self, shape: BatchShape) -> Mapping[str, Rows]:
        """Return what follows the real rows of each field, its ragged axis first; 0 if left out.

        What surrounds the values of a field that is ragged along several axes is one number.
        """

    def over(self, tensors: Mapping[str, Any]) -> Self:
        """Return a batch of these tensors that knows of no samples and was checked already."""


def ragged_axes(ragged: Ragged | tuple[Ragged, ...]) -> tuple[Ragged, ...]:
    """Return all axes along which a tensor is ragged."""
    return ragged if isinstance(ragged, tuple) else (ragged,)


def round_up(value: float, multiple: int) -> int:
    """Round up to a multiple."""
    return int(-(-value // multiple) * multiple)
