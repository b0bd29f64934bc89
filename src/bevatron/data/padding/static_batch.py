"""A padded batch in one block of memory whose address never changes.

One copy moves it to a GPU, and a CUDA graph reads it there again and again.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from bevatron.data.padding.shape import BatchShape, Paddable, Ragged, ragged_axes

P = TypeVar("P", bound=Paddable)
Layout: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

ALIGNMENT = 256

SMALL_FIELD = 2**15
"""Elements up to which torch copies a tensor in the thread that asks for it."""

KEPT_PLACES = 64
"""Numbers of rows for which views are kept."""


class StaticBatch:
    """A padded batch that stays in one block of memory.

    Parameters
    ----------
    shape : length of each of its ragged axes
    dtype
        Type of floating-point tensors, but for those that the batch keeps as they are; None = each
        keeps its own.
    device : where
    pin : page-locked, for copies to a GPU that do not wait
    like : a batch of the kind that it is for

    Examples
    --------
    >>> from bevatron.data.neighbours import add_neighbours
    >>> from bevatron.data.samples import collate_structures, unlabelled_structure
    >>> hydrogen = add_neighbours(unlabelled_structure([1], [[0.0, 0.0, 0.0]]), cutoff=5.0)
    >>> like = collate_structures([hydrogen], np.array([0]), [1.0])
    >>> static = StaticBatch(BatchShape(edges=8, atoms=4, graphs=2), like=like)
    >>> static.batch.edges.shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        shape: BatchShape,
        dtype: torch.dtype | None = torch.float64,
        device: torch.device | str = "cpu",
        *,
        pin: bool = False,
        like: Paddable,
    ) -> None:
        self.shape = shape
        layout = layout_of(like, shape, dtype)
        offsets, start = {}, 0
        for name, (item, dims) in layout.items():
            offsets[name] = (start, start + prod(dims) * item.itemsize)
            start = -(-offsets[name][1] // ALIGNMENT) * ALIGNMENT
        self.block = torch.zeros(max(start, 1), dtype=torch.uint8, device=device, pin_memory=pin)
        self._types: list[torch.dtype] = []
        # What is filled in was checked on the host: a captured step cannot refuse anything.
        self.batch: Any = like.over(
            {
                name: self.block[slice(*offsets[name])].view(item).view(dims)
                for name, (item, dims) in layout.items()
            }
        )

    @cached_property
    def _axes(self) -> list["_Axis"]:
        named: dict[tuple[str, int, bool], list[tuple[str, int]]] = {}
        for name, ragged in self.batch.ragged.items():
            if isinstance(ragged, Ragged):
                large = getattr(self.batch, name).numel() >= SMALL_FIELD
                named.setdefault((ragged.axis, ragged.extra, large), []).append((name, ragged.dim))
        return [_Axis(self.batch, fields, large) for (_, _, large), fields in named.items()]

    def fill(self, batch: Paddable) -> None:
        """Write a batch and the padding rows after it.

        Raises ValueError if the batch is larger than the shape allows, or a tensor is of a type
        that would lose more than precision.
        """
        if not self.shape.fits(batch):
            raise ValueError(f"a batch of {dict(batch.sizes)} does not fit into {self.shape}")
        if (types := [getattr(batch, name).dtype for name in self.batch.ragged]) != self._types:
            self._take(types)
        padding = batch.padding_rows(self.shape)
        into, small = [], []
        for axis in self._axes:
            values = [getattr(batch, name) for name in axis.rows]
            places = axis.cut(values)
            for name in axis.rows.keys() & padding.keys():
                axis.rows[name][axis.number :] = padding[name]
            if axis.large:
                # By numpy: waking torch's threads can take longer than the copies.
                for place, value in zip(places, values, strict=True):
                    place.numpy()[...] = value.numpy()
            else:
                into += places
                small += values
        if into:
            torch._foreach_copy_(into, small)
        for name, ragged in self.batch.ragged.items():
            if isinstance(ragged, tuple):
                memory, values = getattr(self.batch, name).numpy(), getattr(batch, name).numpy()
                memory[...] = padding.get(name, 0)
                memory[(*map(slice, values.shape), ...)] = values

    def _take(self, types: list[torch.dtype]) -> None:
        """Take values of these types from now on."""
        for name, dtype in zip(self.batch.ragged, types, strict=True):
            own = getattr(self.batch, name).dtype
            if not torch.can_cast(dtype, own):
                found, held = (str(one).removeprefix("torch.") for one in (dtype, own))
                raise ValueError(f"{name}: {found} does not fit into {held}")
        self._types = types

    def copy_from(self, other: "StaticBatch") -> None:
        """Copy everything in one piece, without waiting if the other is page-locked."""
        self.block.copy_(other.block, non_blocking=True)


class _Axis:
    """Memory of the tensors of a batch that are ragged along one axis.

    Attributes
    ----------
    rows : of each tensor all rows, along this axis
    number : of these are real
    large : whether torch would copy them in several threads
    """

    def __init__(self, batch: Any, fields: Sequence[tuple[str, int]], large: bool) -> None:
        self._memory = [(getattr(batch, name), dim) for name, dim in fields]
        rows = (np.moveaxis(memory.numpy(), dim, 0) for memory, dim in self._memory)
        self.rows: dict[str, Any] = dict(zip((name for name, _ in fields), rows, strict=True))
        self.number, self.large = 0, large
        self._places: dict[int, list[Tensor]] = {}

    def cut(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return where values belong; what was real beyond them becomes zero."""
        number = values[0].shape[self._memory[0][1]]
        if number < self.number:
            for rows in self.rows.values():
                rows[number : self.number] = 0
        self.number = number
        if number not in self._places:
            if len(self._places) == KEPT_PLACES:
                self._places.clear()
            self._places[number] = [m.narrow(dim, 0, number) for m, dim in self._memory]
        return self._places[number]


def pad(batch: P, shape: BatchShape) -> P:
    """Pad a batch on the CPU to a shape.

    Raises ValueError if the batch is larger than the shape allows.

    Parameters
    ----------
    batch : on the CPU
    shape : with room for the padding that this kind of batch needs

    Returns
    -------
    Paddable
        In new memory; its samples are the real ones alone.
    """
    static = StaticBatch(shape, None, like=batch)
    static.fill(batch)
    tensors: dict[str, Any] = {name: getattr(static.batch, name) for name in batch.ragged}
    return dataclasses.replace(batch, **tensors)  # type: ignore[type-var]


def layout_of(like: Paddable, shape: BatchShape, dtype: torch.dtype | None) -> Layout:
    """Return type and shape of every tensor of a padded batch."""
    kept = getattr(like, "keeps_dtype", ())
    found = {}
    for name, ragged in like.ragged.items():
        value: Tensor = getattr(like, name)
        dims = list(value.shape)
        for axis in ragged_axes(ragged):
            dims[axis.dim] = shape[axis.axis] + axis.extra
        cast = dtype is not None and value.is_floating_point() and name not in kept
        found[name] = (dtype if cast and dtype is not None else value.dtype, tuple(dims))
    return found
