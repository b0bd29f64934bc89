"""The bases of batches: copies on another device, and counts of concatenated samples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from bevatron.data.padding.shape import BatchShape
from bevatron.typing import IntArray


def mover(
    device: torch.device | str, dtype: torch.dtype | None, non_blocking: bool
) -> Callable[[Tensor], Tensor]:
    """Return a function that copies tensors to a device, floats to ``dtype`` if given."""

    def move(value: Tensor) -> Tensor:
        target = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.to(device=device, dtype=target, non_blocking=non_blocking)

    return move


@dataclass(frozen=True)
class Movable:
    """A dataclass of tensors, among others, that can be copied as a whole."""

    keeps_dtype: ClassVar[tuple[str, ...]] = ()
    """Fields that `to` leaves in the type they have."""

    def to(
        self,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Self:
        """Copy to a device; floating-point tensors to ``dtype``, but for `keeps_dtype`."""
        keep, cast = mover(device, None, non_blocking), mover(device, dtype, non_blocking)
        return self._map(lambda name, value: (keep if name in self.keeps_dtype else cast)(value))

    def pin_memory(self) -> Self:
        """Copy to page-locked memory."""
        return self._map(lambda _, value: value.pin_memory())

    def _map(self, function: Callable[[str, Tensor], Tensor]) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changes: dict[str, Any] = {
            name: function(name, value)
            for name, value in values.items()
            if isinstance(value, Tensor)
        }
        return replace(self, **changes)


@dataclass(frozen=True)
class AtomBatch(Movable):
    """Samples of atoms, concatenated; the base of batches of structures and of molecules.

    Attributes
    ----------
    edges : [2, E] int64, (senders, receivers) as atoms of the batch
    graph : [N] int64, the sample of each atom, ascending
    graph_ptr : [G + 1] int64, where the atoms of each sample begin
    indices : [G] int64 numpy, positions of the samples in their data set
    """

    edges: Tensor
    graph: Tensor
    graph_ptr: Tensor
    indices: IntArray

    @property
    def num_graphs(self) -> int:
        """Number of samples."""
        return self.graph_ptr.shape[0] - 1

    @property
    def num_atoms(self) -> int:
        """Number of atoms of all samples."""
        return self.graph.shape[0]

    @property
    def num_edges(self) -> int:
        """Number of directed edges."""
        return self.edges.shape[1]

    @property
    def sample_indices(self) -> IntArray:
        """Positions of the samples in their data set."""
        return self.indices

    @property
    def sizes(self) -> Mapping[str, int]:
        """Counts for logs."""
        return {"graphs": self.num_graphs, "atoms": self.num_atoms, "edges": self.num_edges}

    def over(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return a batch of these tensors that knows of no samples and was checked already."""
        none = np.zeros(0, dtype=np.int64)
        changes: dict[str, Any] = {**tensors, "indices": none, "checked": True}
        return replace(self, **changes)

    def _spread(self, shape: BatchShape, number: int) -> IntArray:
        """Spread a number of edges or bonds evenly over the padding atoms, ascending."""
        spare = shape.atoms - self.num_atoms
        return np.arange(number) * spare // max(number, 1)
