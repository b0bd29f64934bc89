"""Molecules: the fields of a prepared sample and the batch that a graph model is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevatron.data.padding.atoms import MoleculePadding
from bevatron.data.padding.shape import BatchShape, PaddingRule, Ragged, RaggedFields, Rows
from bevatron.data.ragged import pointer
from bevatron.data.samples.feature_sets import feature_set
from bevatron.data.samples.fields import Field
from bevatron.data.samples.flat import AtomBatch
from bevatron.typing import Array, Arrays, FloatArray, IntArray

NUM_WALKS = 16
"""Lengths of random walks: 1 to this."""

NUM_LAPLACIAN = 7
"""Lowest eigenpairs of the Laplacian that are kept, the constant one left out."""

UNREACHABLE = 255
"""Marks the distance of two atoms that no path joins."""

MAX_DISTANCE = 254
"""Maximum stored length of shortest paths."""


def molecule_fields(feature_set_name: str, num_targets: int) -> tuple[Field, ...]:
    """List what a store of molecules holds per sample.

    Raises ConfigError if there is no such feature set.

    Parameters
    ----------
    feature_set_name : one of `bevatron.data.samples.FEATURE_SETS`
    num_targets : T, number of targets; molecules to predict have 0 and no field for them

    Examples
    --------
    >>> [field.shape for field in molecule_fields("set1", 1) if "features" in field.name]
    [(11,), (3,)]
    """
    chosen = feature_set(feature_set_name)
    targets = Field("targets", "float32", (num_targets,), False, "[T]; NaN = no label")
    return (
        Field("atom_features", "int16", (len(chosen.atom),), True, "[N, F] index in vocabulary"),
        Field("bonds", "int32", (2,), True, "[M, 2] (sender, receiver); 2k, 2k+1 are one bond"),
        Field("bond_features", "int16", (len(chosen.bond),), True, "[M, Fe] index in vocabulary"),
        Field("shortest_paths", "uint8", (), True, "[N*N] bonds between two atoms; 255 = no path"),
        Field(
            "random_walk", "float32", (NUM_WALKS,), True, "[N, 16] chance to be back, 1-16 steps"
        ),
        Field("laplacian_vectors", "float32", (NUM_LAPLACIAN,), True, "[N, 7] of D - A, 0 padded"),
        Field("laplacian_values", "float32", (NUM_LAPLACIAN,), False, "[7] of D - A, 0 padded"),
        Field("positions", "float32", (3,), True, "[N, 3] Å; no rows = no conformer"),
        *((targets,) if num_targets else ()),
        Field("smiles", "uint8", (), True, "UTF-8 bytes of the molecule as given"),
        Field("reason", "uint8", (), True, "UTF-8: why there are no atoms, or what was left out"),
        Field("key", "int64", (), False, "hash; the same for the same molecule, 0 = none"),
        Field("split", "int8", (), False, "as the file says: 0 train, 1 valid, 2 test, -1 nothing"),
        Field("source", "int64", (2,), False, "(file, row): index into the manifest, from 0"),
    )


@dataclass(frozen=True)
class MoleculeBatch(AtomBatch):
    """Molecules, concatenated; no padding unless `bevatron.data.padding` added some.

    Attributes
    ----------
    atom_features : [N, F] int64, index in each feature's vocabulary
    edges : [2, M] int64, (senders, receivers) as atoms of the batch; 2k and 2k + 1 are the two
        directions of one bond
    bond_features : [M, Fe] int64, the same for both directions
    graph : [N] int64, the molecule of each atom, ascending
    graph_ptr : [G + 1] int64, where the atoms of each molecule begin
    edge_graph : [M] int64, the molecule of each edge, ascending
    degree : [N] int64, number of bonded atoms
    incoming : [M] int64, edges sorted by receiver; incoming_ptr : [N + 1] int64, where those of
        each atom begin. Edges out of an atom are the other directions of those into it.
    shortest_paths : [P] uint8, row-major n_g x n_g per molecule, P = sum n_g^2; bonds between two
        atoms, `UNREACHABLE` without a path
    pair_ptr : [G + 1] int64, where the pairs of each molecule begin
    random_walk : [N, 16]; laplacian_vectors : [N, 7]; laplacian_values : [G, 7]
    positions : [N, 3] Å, zero where absent; has_positions : [G] bool
    targets : [G, T], zero where absent
    target_weight : [G, T], the weight of the molecule; zero where the label is absent
    graph_weight : [G], 1; zero for a molecule that only fills up a rank and for padding
    indices : [G] int64 numpy, positions of the samples in their data set
    checked : whether the batch was checked for the model that receives it
    """

    atom_features: Tensor
    bond_features: Tensor
    edge_graph: Tensor
    degree: Tensor
    incoming: Tensor
    incoming_ptr: Tensor
    shortest_paths: Tensor
    pair_ptr: Tensor
    random_walk: Tensor
    laplacian_vectors: Tensor
    laplacian_values: Tensor
    positions: Tensor
    has_positions: Tensor
    targets: Tensor
    target_weight: Tensor
    graph_weight: Tensor
    checked: bool = False

    padding: ClassVar[PaddingRule] = MoleculePadding()
    ragged: ClassVar[RaggedFields] = {
        "edges": Ragged("edges", dim=1),
        **{n: Ragged("atoms") for n in ("atom_features", "graph", "degree", "random_walk")},
        **{n: Ragged("atoms") for n in ("laplacian_vectors", "positions")},
        **{n: Ragged("edges") for n in ("bond_features", "edge_graph", "incoming")},
        "incoming_ptr": Ragged("atoms", extra=1),
        "shortest_paths": Ragged("pairs"),
        **{n: Ragged("graphs", extra=1) for n in ("graph_ptr", "pair_ptr")},
        **{n: Ragged("graphs") for n in ("laplacian_values", "has_positions", "targets")},
        **{n: Ragged("graphs") for n in ("target_weight", "graph_weight")},
    }

    @property
    def num_pairs(self) -> int:
        """Number of pairs of atoms of the same molecule."""
        return self.shortest_paths.shape[0]

    @property
    def sizes(self) -> Mapping[str, int]:
        """Counts for logs."""
        return {**super().sizes, "pairs": self.num_pairs}

    def padding_rows(self, shape: BatchShape) -> Mapping[str, Rows]:
        """Return what follows the real rows of each field; 0 if left out.

        Padding atoms form molecules of their own, spread evenly over all of them, so that none is
        larger than a molecule may be, and attend to nobody else. Padding bonds join a padding atom
        with itself, evenly spread too. Pairs that are left over belong to no molecule: ``pair_ptr``
        ends before them.
        """
        atoms, edges, graphs = self.num_atoms, self.num_edges, self.num_graphs
        spare, missing = shape.atoms - atoms, shape.edges - edges
        if shape.edges % 2:
            raise ValueError(f"edges of molecules come in pairs, {shape.edges} is odd")
        sizes = _even(spare, shape.graphs - graphs)
        owner = np.repeat(np.arange(graphs, shape.graphs), sizes)
        # Both directions of a padding bond leave and reach one atom.
        place = np.repeat(self._spread(shape, missing // 2), 2)
        return {
            "edges": (atoms + place)[:, None],
            "graph": owner,
            "graph_ptr": atoms + sizes.cumsum(),
            "edge_graph": owner[place],
            "incoming": np.arange(edges, shape.edges),
            "incoming_ptr": edges + np.bincount(place, minlength=spare).cumsum(),
            "pair_ptr": self.num_pairs + (sizes**2).cumsum(),
        }

    def pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Index the atoms of every pair, on the batch's device and of static shape.

        Returns
        -------
        first, second, graph : [P] int64
            Atoms of the batch (row and column of the molecule's matrix) and their molecule. Pairs
            beyond the last molecule's, which only padding has, are those of the last atom.
        """
        place = torch.arange(self.num_pairs, device=self.pair_ptr.device)
        graph = torch.searchsorted(self.pair_ptr, place, right=True) - 1
        graph = graph.clamp_(max=self.num_graphs - 1)
        begin, size = self.graph_ptr[:-1], self.graph_ptr.diff()
        local = place - self.pair_ptr[graph]
        columns = size[graph].clamp(min=1)
        last = max(self.num_atoms - 1, 0)
        first = begin[graph] + torch.div(local, columns, rounding_mode="floor")
        second = begin[graph] + local % columns
        beyond = place >= self.pair_ptr[-1]
        return first.masked_fill(beyond, last), second.masked_fill(beyond, last), graph


def collate_molecules(
    samples: Sequence[Arrays], indices: IntArray, weights: Sequence[float] | FloatArray
) -> MoleculeBatch:
    """Concatenate molecules into one batch, in float32.

    Raises ValueError if there is no sample.

    Parameters
    ----------
    samples : each with the fields of `molecule_fields`
    indices : positions of the samples in their data set, [G]
    weights : 1, or 0 for a sample that must not count, [G]
    """
    num_atoms = _lengths(samples, "atom_features")
    num_edges = _lengths(samples, "bonds")
    graph_ptr, pair_ptr = pointer(num_atoms), pointer(num_atoms**2)
    edges = np.concatenate([s["bonds"] for s in samples]).astype(np.int64)
    edges += np.repeat(graph_ptr[:-1], num_edges)[:, None]
    receivers = edges[:, 1]
    degree = np.bincount(receivers, minlength=int(graph_ptr[-1]))
    incoming = np.argsort(receivers, kind="stable")
    has_positions = (_lengths(samples, "positions") == num_atoms) & (num_atoms > 0)
    none = np.zeros(0, dtype=np.float32)
    targets = np.stack([s.get("targets", none) for s in samples]).astype(np.float32)
    known = ~np.isnan(targets)
    graph_weight = np.asarray(weights, dtype=np.float32)
    graphs = np.arange(len(samples))

    def joined(name: str, dtype: npt.DTypeLike) -> Tensor:
        return _tensor(np.concatenate([s[name] for s in samples]), dtype)

    return MoleculeBatch(
        atom_features=joined("atom_features", np.int64),
        edges=_tensor(edges.T),
        bond_features=joined("bond_features", np.int64),
        graph=_tensor(np.repeat(graphs, num_atoms)),
        graph_ptr=_tensor(graph_ptr),
        edge_graph=_tensor(np.repeat(graphs, num_edges)),
        degree=_tensor(degree, np.int64),
        incoming=_tensor(incoming, np.int64),
        incoming_ptr=_tensor(pointer(degree)),
        shortest_paths=joined("shortest_paths", np.uint8),
        pair_ptr=_tensor(pair_ptr),
        random_walk=joined("random_walk", np.float32),
        laplacian_vectors=joined("laplacian_vectors", np.float32),
        laplacian_values=_tensor(np.stack([s["laplacian_values"] for s in samples]), np.float32),
        positions=_tensor(_positions(samples, has_positions, num_atoms)),
        has_positions=_tensor(has_positions),
        targets=_tensor(np.where(known, targets, 0.0), np.float32),
        target_weight=_tensor(known * graph_weight[:, None], np.float32),
        graph_weight=_tensor(graph_weight),
        indices=np.asarray(indices, dtype=np.int64),
    )


def _even(total: int, parts: int) -> IntArray:
    """Return whole numbers that add up to ``total`` and differ by one at most."""
    sizes = np.full(parts, total // parts)
    sizes[: total % parts] += 1
    return sizes


def _positions(samples: Sequence[Arrays], present: Array, num_atoms: IntArray) -> Array:
    if present.all():
        return np.concatenate([s["positions"] for s in samples]).astype(np.float32)
    parts = [
        s["positions"] if here else np.zeros((n, 3), dtype=np.float32)
        for s, here, n in zip(samples, present, num_atoms, strict=True)
    ]
    return np.concatenate(parts).astype(np.float32)


def _lengths(samples: Sequence[Arrays], name: str) -> IntArray:
    return np.array([len(s[name]) for s in samples], dtype=np.int64)


def _tensor(values: Array, dtype: npt.DTypeLike | None = None) -> Tensor:
    # Converted by numpy: waking torch's threads can take longer.
    return torch.from_numpy(np.array(values, dtype=dtype, order="C"))
