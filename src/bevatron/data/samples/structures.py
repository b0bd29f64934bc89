"""Structures of atoms: the fields of a sample and the batch that a potential is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevatron.data.padding.atoms import AtomPadding
from bevatron.data.padding.shape import BatchShape, PaddingRule, Ragged, RaggedFields, Rows
from bevatron.data.ragged import pointer
from bevatron.data.samples.fields import Field
from bevatron.data.samples.flat import AtomBatch
from bevatron.typing import Array, Arrays, IntArray

RAW_STRUCTURE_FIELDS: tuple[Field, ...] = (
    Field("atomic_numbers", "int32", (), True, "[N]"),
    Field("positions", "float64", (3,), True, "[N, 3] Å"),
    Field("cell", "float64", (3, 3), False, "rows are lattice vectors, Å; zeros if there is none"),
    Field("pbc", "bool", (3,), False, "which axes are periodic"),
    Field("energy", "float64", (), False, "eV; NaN = no label"),
    Field("forces", "float64", (3,), True, "[N, 3] eV/Å; no rows = no label"),
    Field("stress", "float64", (3, 3), False, "eV/Å^3, ASE sign; NaN = no label"),
    Field("weights", "float64", (4,), False, "of the structure, its energy, forces, stress"),
    Field("head", "int32", (), False, "which head of a multi-head model"),
    Field("source", "int64", (2,), False, "(file, frame): index into the manifest, from 0"),
    Field(
        "group", "uint8", (), True, "UTF-8 bytes of the group's name (config_type); may be empty"
    ),
)
"""Fields that a reader of structures yields."""

EDGE_FIELDS: tuple[Field, ...] = (
    Field("edges", "int32", (2,), True, "[E, 2] (sender, receiver), sorted by receiver"),
    Field("edge_shifts", "int32", (3,), True, "[E, 3] S: vec = r[receiver] - r[sender] + S.cell"),
)
"""Fields that the neighbour list adds."""

STRUCTURE_FIELDS: tuple[Field, ...] = RAW_STRUCTURE_FIELDS + EDGE_FIELDS

PADDING_LENGTH = 100.0
"""Length of padding edges in Å. Any length above zero would do; beyond every model's cutoff their
messages are zero, so nothing can overflow."""
_PADDING_SHIFT, _PADDING_CELL = np.array([1.0, 0.0, 0.0]), PADDING_LENGTH * np.eye(3)


def unlabelled_structure(
    atomic_numbers: npt.ArrayLike,
    positions: npt.ArrayLike,
    cell: npt.ArrayLike | None = None,
    pbc: npt.ArrayLike = False,
    head: int = 0,
) -> dict[str, Array]:
    """Build a raw sample of a structure whose energy is to be predicted.

    Parameters
    ----------
    atomic_numbers : [N]
    positions : [N, 3] Å
    cell : [3, 3] Å, rows are lattice vectors
    pbc : [3], or one value for all axes
    head : which read-out of a multi-head model

    Returns
    -------
    `RAW_STRUCTURE_FIELDS`, all labels absent.
    """
    return {
        "atomic_numbers": np.array(atomic_numbers, dtype=np.int32).reshape(-1),
        "positions": np.array(positions, dtype=np.float64).reshape(-1, 3),
        "cell": np.zeros((3, 3)) if cell is None else np.array(cell, dtype=np.float64),
        "pbc": np.array(np.broadcast_to(np.asarray(pbc, dtype=bool), (3,))),
        "energy": np.array(np.nan),
        "forces": np.zeros((0, 3)),
        "stress": np.full((3, 3), np.nan),
        "weights": np.ones(4),
        "head": np.array(head, dtype=np.int32),
        "source": np.zeros(2, dtype=np.int64),
        "group": np.zeros(0, dtype=np.uint8),
    }


@dataclass(frozen=True)
class StructureBatch(AtomBatch):
    """Structures of atoms, concatenated; no padding.

    Attributes
    ----------
    positions : [N, 3] Å
    atomic_numbers : [N] int64
    cell : [G, 3, 3] Å, zeros without a cell
    pbc : [G, 3] bool
    edges : [2, E] int64, (senders, receivers) as atoms of the batch, sorted by receiver
    edge_shifts : [E, 3] periodic images as floating-point numbers; vec = r[receiver] - r[sender] +
        edge_shifts @ cell
    graph : [N] int64, the structure of each atom, ascending
    graph_ptr : [G + 1] int64, where the atoms of each structure begin
    head : [G] int64
    energy : [G] eV; forces : [N, 3] eV/Å; stress : [G, 3, 3] eV/Å^3: labels, zero where absent
    energy_weight, forces_weight, stress_weight : [G], weight of the structure times that of the
        label; zero where the label is absent or the sample only fills up a rank
    has_energy, has_forces, has_stress : [G] bool, whether there is a label that counts
    indices : [G] int64 numpy, positions of the samples in their data set
    checked : whether the batch was checked for the model that receives it
    """

    positions: Tensor
    atomic_numbers: Tensor
    cell: Tensor
    pbc: Tensor
    edge_shifts: Tensor
    head: Tensor
    energy: Tensor
    forces: Tensor
    stress: Tensor
    energy_weight: Tensor
    forces_weight: Tensor
    stress_weight: Tensor
    has_energy: Tensor
    has_forces: Tensor
    has_stress: Tensor
    checked: bool = False

    keeps_dtype: ClassVar[tuple[str, ...]] = ("energy",)
    """Energies stay in float64: float32 resolves 10 keV to 1 meV only."""
    padding: ClassVar[PaddingRule] = AtomPadding()
    ragged: ClassVar[RaggedFields] = {
        **{n: Ragged("atoms") for n in ("positions", "atomic_numbers", "graph", "forces")},
        "edges": Ragged("edges", dim=1),
        "edge_shifts": Ragged("edges"),
        "graph_ptr": Ragged("graphs", extra=1),
        **{n: Ragged("graphs") for n in ("cell", "pbc", "head", "energy", "stress")},
        **{n: Ragged("graphs") for n in ("energy_weight", "forces_weight", "stress_weight")},
        **{n: Ragged("graphs") for n in ("has_energy", "has_forces", "has_stress")},
    }

    def padding_rows(self, shape: BatchShape) -> Mapping[str, Rows]:
        """Return what follows the real rows of each field; 0 if left out.

        The first padding structure holds all padding atoms, the others are empty. Padding edges
        join padding atoms with their own periodic images, so the forces on these cancel, and no
        real atom has a padding neighbour.
        """
        receiver = self.num_atoms + self._spread(shape, shape.edges - self.num_edges)
        return {
            "edges": receiver[:, None],
            "edge_shifts": _PADDING_SHIFT,
            "cell": _PADDING_CELL,
            # An element of the batch is one that the model knows.
            "atomic_numbers": self.atomic_numbers.numpy()[:1],
            "graph": self.num_graphs,
            "graph_ptr": shape.atoms,
        }


def collate_structures(
    samples: Sequence[Arrays], indices: IntArray, weights: Sequence[float]
) -> StructureBatch:
    """Concatenate structures into one batch, in float64.

    Parameters
    ----------
    samples : each with `STRUCTURE_FIELDS`
    indices : positions of the samples in their data set, [G]
    weights : 1, or 0 for a sample that must not count, [G]
    """
    num_atoms = np.array([len(s["atomic_numbers"]) for s in samples], dtype=np.int64)
    graph_ptr = pointer(num_atoms)
    edge_ptr = np.cumsum([0, *(len(s["edges"]) for s in samples)])
    edges = np.empty((2, int(edge_ptr[-1])), dtype=np.int64)
    for g, sample in enumerate(samples):
        own = edges[:, edge_ptr[g] : edge_ptr[g + 1]]
        np.add(sample["edges"].T, graph_ptr[g], out=own)
    counts = np.asarray(weights, dtype=np.float64) != 0
    energy = np.array([float(s["energy"]) for s in samples])
    stress = np.stack([np.asarray(s["stress"], dtype=np.float64) for s in samples])
    forces_present = np.array([len(s["forces"]) == len(s["atomic_numbers"]) for s in samples])
    forces = np.concatenate(
        [
            np.asarray(s["forces"], dtype=np.float64) if present else np.zeros((n, 3))
            for s, present, n in zip(samples, forces_present, num_atoms, strict=True)
        ]
    )
    has_energy = ~np.isnan(energy) & counts
    has_forces = forces_present & counts
    has_stress = ~np.isnan(stress).any(axis=(1, 2)) & counts
    label_weights = np.stack([np.asarray(s["weights"], dtype=np.float64) for s in samples])
    structure_weight = label_weights[:, 0]

    def tensor(values: np.ndarray, dtype: npt.DTypeLike | None = None) -> Tensor:
        # Converted by numpy: waking torch's threads can take longer.
        return torch.as_tensor(np.ascontiguousarray(values, dtype=dtype))

    return StructureBatch(
        positions=tensor(np.concatenate([s["positions"] for s in samples])),
        atomic_numbers=tensor(np.concatenate([s["atomic_numbers"] for s in samples]), np.int64),
        cell=tensor(np.stack([s["cell"] for s in samples])),
        pbc=tensor(np.stack([s["pbc"] for s in samples])),
        edges=tensor(edges),
        edge_shifts=tensor(np.concatenate([s["edge_shifts"] for s in samples]), np.float64),
        graph=tensor(np.repeat(np.arange(len(samples)), num_atoms)),
        graph_ptr=tensor(graph_ptr),
        head=tensor(np.array([int(s["head"]) for s in samples]), np.int64),
        energy=tensor(np.where(np.isnan(energy), 0.0, energy)),
        forces=tensor(forces),
        stress=tensor(np.where(np.isnan(stress), 0.0, stress)),
        energy_weight=tensor(structure_weight * label_weights[:, 1] * has_energy),
        forces_weight=tensor(structure_weight * label_weights[:, 2] * has_forces),
        stress_weight=tensor(structure_weight * label_weights[:, 3] * has_stress),
        has_energy=tensor(has_energy),
        has_forces=tensor(has_forces),
        has_stress=tensor(has_stress),
        indices=np.asarray(indices, dtype=np.int64),
    )
