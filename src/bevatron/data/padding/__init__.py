"""Batches padded to a fixed shape, so that a captured step can be replayed on them.

A padded batch ends with graphs that count nowhere. All their labels are absent and of weight zero:
loss, gradients and metrics of the real graphs keep every digit that the order of summation leaves
them. How structures and molecules are padded stands in `structures` and `molecules`.

`StaticBatch` keeps a padded batch in one block of memory whose address never changes: one copy
moves it to a GPU, and a CUDA graph reads it there again and again.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bevatron.data.padding import molecules, structures
from bevatron.data.padding.shape import BatchShape
from bevatron.data.samples import MoleculeBatch, StructureBatch

__all__ = ["Batch", "BatchShape", "StaticBatch", "fill_of", "pad_molecules", "pad_structures"]

Batch: TypeAlias = StructureBatch | MoleculeBatch
Layout: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

ALIGNMENT = 256

_COLUMNS = ("edges",)
"""Fields whose ragged axis is the second; that of all others is the first."""


class StaticBatch:
    """A padded batch that lies in one block of memory and never moves.

    Parameters
    ----------
    shape
        Its numbers of atoms, edges and graphs.
    dtype
        Floating-point type of everything but the energies, as `StructureBatch.to` has it.
    device
        Where.
    pin
        Page-locked, for copies to a GPU that do not wait.
    like
        A batch of the kind that it is for; structures by default.

    Examples
    --------
    >>> static = StaticBatch(BatchShape(edges=8, atoms=4, graphs=2))
    >>> static.batch.edges.shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        shape: BatchShape,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        *,
        pin: bool = False,
        like: Batch | None = None,
    ) -> None:
        self.shape = shape
        layout = _layout(like, shape, dtype)
        ends, start = {}, 0
        for name, (item, dims) in layout.items():
            ends[name] = (start, start + prod(dims) * item.itemsize)
            start = -(-ends[name][1] // ALIGNMENT) * ALIGNMENT
        self.block = torch.zeros(max(start, 1), dtype=torch.uint8, device=device, pin_memory=pin)
        tensors: dict[str, Any] = {
            name: self.block[slice(*ends[name])].view(item).view(dims)
            for name, (item, dims) in layout.items()
        }
        # What is filled in was checked on the host: a recording cannot refuse anything.
        kind = StructureBatch if like is None else type(like)
        nothing = np.zeros(0, dtype=np.int64)
        self.batch: Any = kind(**tensors, indices=nothing, checked=True)

    def fill(self, batch: Batch) -> None:
        """Write a batch and the padding behind it.

        Raises
        ------
        ValueError
            If the batch is larger than the shape allows.
        """
        if not self.shape.fits(batch):
            raise ValueError(f"a batch of {dict(batch.sizes)} does not fit into {self.shape}")
        for name, (values, padding) in _padded_fields(batch, self.shape).items():
            target: Tensor = getattr(self.batch, name)
            if name in _COLUMNS:
                target = target.T
            # By numpy: waking torch's threads can take longer than the copies.
            rows = target.numpy()
            np.copyto(rows[: len(values)], values.numpy(), casting="same_kind")
            rows[len(values) :] = padding.numpy() if isinstance(padding, Tensor) else padding

    def copy_from(self, other: "StaticBatch") -> None:
        """Copy everything in one piece, without waiting if the other is page-locked."""
        self.block.copy_(other.block, non_blocking=True)


def pad_structures(batch: StructureBatch, shape: BatchShape) -> StructureBatch:
    """Pad a batch on the CPU to a shape.

    Parameters
    ----------
    batch
        On the CPU.
    shape
        With room for at least one more atom and one more structure.

    Returns
    -------
    StructureBatch
        In new memory; ``indices`` are those of the real structures alone.

    Raises
    ------
    ValueError
        If the batch is larger than the shape allows.
    """
    static = StaticBatch(shape, batch.positions.dtype)
    static.fill(batch)
    padded: StructureBatch = static.batch
    return replace(padded, indices=batch.indices, checked=batch.checked)


def pad_molecules(batch: MoleculeBatch, shape: BatchShape) -> MoleculeBatch:
    """Pad a batch of molecules on the CPU to a shape; see `pad_structures`.

    Padding atoms form molecules of their own, of even size, so they attend to nobody else. Pairs
    that are left over belong to no molecule: ``pair_ptr`` ends before them.

    Raises
    ------
    ValueError
        If the batch is larger than the shape allows.
    """
    static = StaticBatch(shape, batch.positions.dtype, like=batch)
    static.fill(batch)
    padded: MoleculeBatch = static.batch
    return replace(padded, indices=batch.indices, checked=batch.checked)


def fill_of(batch: Batch, shape: BatchShape) -> dict[str, float]:
    """Share of each count of a shape that a batch uses.

    Returns
    -------
    By ``edges``, ``atoms``, ``graphs`` and, of molecules, ``pairs``.
    """
    counts = {name: getattr(shape, name) for name in (field.name for field in fields(shape))}
    return {name: getattr(batch, f"num_{name}") / count for name, count in counts.items() if count}


def _layout(like: Batch | None, shape: BatchShape, dtype: torch.dtype) -> Layout:
    """Type and shape of every tensor of a padded batch."""
    if isinstance(like, MoleculeBatch):
        return molecules.layout(like, shape, dtype)
    return structures.layout(like, shape, dtype)


def _padded_fields(
    batch: Batch, shape: BatchShape
) -> dict[str, tuple[Tensor, Tensor | float | bool | int]]:
    """Give every field's values and what follows them, its ragged axis first."""
    if isinstance(batch, MoleculeBatch):
        return molecules.padded_fields(batch, shape)
    return structures.padded_fields(batch, shape)
