"""Batches of structures padded to a fixed shape, so that a captured step can be replayed on them.

A padded batch ends with structures that count nowhere: the first of them holds all padding atoms,
the others are empty. Padding edges join padding atoms with their own periodic images, so the forces
on these cancel, and no real atom has a padding neighbour. All their labels are absent and of weight
zero: loss, gradients and metrics of the real structures keep every digit that the order of
summation leaves them.

`StaticBatch` keeps a padded batch in one block of memory whose address never changes: one copy
moves it to a GPU, and a CUDA graph reads it there again and again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevatron.data.samples import StructureBatch

PADDING_LENGTH = 100.0
"""Length of padding edges in Å. Any length above zero would do; beyond every model's cutoff their
messages are zero, so nothing can overflow."""

ALIGNMENT = 256


@dataclass(frozen=True, order=True)
class BatchShape:
    """How many edges, atoms and structures a padded batch has."""

    edges: int
    atoms: int
    graphs: int

    def fits(self, batch: StructureBatch) -> bool:
        """Whether a batch can be padded to this shape.

        One structure and one atom are always padding.
        """
        return (
            batch.num_edges <= self.edges
            and batch.num_atoms < self.atoms
            and batch.num_graphs < self.graphs
        )

    def __str__(self) -> str:
        return f"{self.atoms} atoms, {self.edges} edges, {self.graphs} structures"


class StaticBatch:
    """A padded batch that lies in one block of memory and never moves.

    Parameters
    ----------
    shape
        Its numbers of atoms, edges and structures.
    dtype
        Floating-point type of everything but the energies, as `StructureBatch.to` has it.
    device
        Where.
    pin
        Page-locked, for copies to a GPU that do not wait.

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
    ) -> None:
        self.shape = shape
        layout = _layout(shape, dtype)
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
        self.batch = StructureBatch(**tensors, indices=np.zeros(0, dtype=np.int64), checked=True)

    def fill(self, batch: StructureBatch) -> None:
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
            # Edges lie as [2, E]; everything else has its ragged axis first.
            if name == "edges":
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
    return replace(static.batch, indices=batch.indices, checked=batch.checked)


def _layout(
    shape: BatchShape, dtype: torch.dtype
) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of every tensor of a padded batch."""
    n, e, g = shape.atoms, shape.edges, shape.graphs
    integer, flag = torch.int64, torch.bool
    return {
        "positions": (dtype, (n, 3)),
        "atomic_numbers": (integer, (n,)),
        "cell": (dtype, (g, 3, 3)),
        "pbc": (flag, (g, 3)),
        "edges": (integer, (2, e)),
        "edge_shifts": (dtype, (e, 3)),
        "graph": (integer, (n,)),
        "graph_ptr": (integer, (g + 1,)),
        "head": (integer, (g,)),
        "energy": (torch.float64, (g,)),
        "forces": (dtype, (n, 3)),
        "stress": (dtype, (g, 3, 3)),
        "energy_weight": (dtype, (g,)),
        "forces_weight": (dtype, (g,)),
        "stress_weight": (dtype, (g,)),
        "has_energy": (flag, (g,)),
        "has_forces": (flag, (g,)),
        "has_stress": (flag, (g,)),
    }


def _padded_fields(
    batch: StructureBatch, shape: BatchShape
) -> dict[str, tuple[Tensor, Tensor | float | bool | int]]:
    """Give every field's values and what follows them, its ragged axis first."""
    zeros = ("positions", "head", "energy", "forces", "stress")
    weights = ("energy_weight", "forces_weight", "stress_weight")
    flags = ("pbc", "has_energy", "has_forces", "has_stress")
    found: dict[str, tuple[Tensor, Tensor | float | bool | int]] = {
        name: (getattr(batch, name), 0) for name in (*zeros, *weights, *flags)
    }
    found["edges"] = (batch.edges.T, _padding_edges(batch, shape)[:, None])
    found["edge_shifts"] = (
        batch.edge_shifts,
        torch.tensor([1.0, 0.0, 0.0], dtype=batch.edge_shifts.dtype),
    )
    found["cell"] = (batch.cell, PADDING_LENGTH * torch.eye(3, dtype=batch.cell.dtype))
    # An element of the batch is one that the model knows.
    found["atomic_numbers"] = (batch.atomic_numbers, batch.atomic_numbers[:1])
    found["graph"] = (batch.graph, batch.num_graphs)
    found["graph_ptr"] = (batch.graph_ptr, shape.atoms)
    return found


def _padding_edges(batch: StructureBatch, shape: BatchShape) -> Tensor:
    """Spread the padding edges evenly over the padding atoms, sorted: the receiver of each."""
    missing, spare = shape.edges - batch.num_edges, shape.atoms - batch.num_atoms
    return batch.num_atoms + torch.arange(missing) * spare // max(missing, 1)
