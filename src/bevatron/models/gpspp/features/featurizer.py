"""Turns molecules into the input arrays of GPS++, many at a time, which is ten times faster.

RDKit is queried atom by atom in plain comprehensions. Everything else (vocabulary indices, shortest
paths, walks, eigenvectors) is computed for all molecules of a call, batched by size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from bevatron.data.samples import FEATURES_VERSION, FeatureSet, feature_set
from bevatron.data.samples.molecules import NUM_LAPLACIAN, NUM_WALKS
from bevatron.errors import DataError, require
from bevatron.models.gpspp.features import chemistry, topology
from bevatron.models.gpspp.features.keys import graph_keys, hashed, mixed
from bevatron.models.gpspp.features.molecules import (
    Molecule,
    atoms_of,
    bonds_of,
    from_rdkit,
    read_molecule,
)
from bevatron.models.gpspp.features.order import canonical_order, remoteness
from bevatron.typing import Array, Arrays, IntArray

_PAIRS_AT_ONCE = 1 << 18
"""Most pairs of atoms whose topology is computed together, to bound the memory."""


@dataclass(frozen=True)
class Featurizer:
    """Picklable function from raw samples to the samples of a molecule store.

    Attributes
    ----------
    name : name of the feature set
    version : see `bevatron.data.samples.FEATURES_VERSION`
    """

    name: str = "set1"
    version: int = FEATURES_VERSION

    def __call__(self, sample: Arrays) -> Arrays:
        """Featurize one raw sample."""
        return self.many([sample])[0]

    def many(self, samples: Sequence[Arrays]) -> list[Arrays]:
        """Featurize raw samples.

        A molecule that cannot be used becomes a sample without atoms whose ``reason`` says why.

        Parameters
        ----------
        samples : each with the fields of `bevatron.data.readers.molecules`

        Returns
        -------
        The fields of `bevatron.data.samples.molecule_fields`, in the same order.
        """
        with require("rdkit.rdBase", "molecules").BlockLogs():
            molecules = [read_molecule(sample) for sample in samples]
            made = compute_features(molecules, feature_set(self.name), self.version)
        kept = ("targets", "split", "source")
        return [
            {**arrays, **{name: sample[name] for name in kept if name in sample}}
            for arrays, sample in zip(made, samples, strict=True)
        ]


@overload
def featurize(
    smiles: Sequence[str], feature_set: str = ..., positions: Sequence[Any] | None = ...
) -> list[dict[str, Array]]: ...
@overload
def featurize(smiles: Any, feature_set: str = ..., positions: Any = ...) -> dict[str, Array]: ...
def featurize(
    smiles: Any, feature_set: str = "set1", positions: Any = None
) -> dict[str, Array] | list[dict[str, Array]]:
    """Turn a molecule, or several, into the input arrays of GPS++.

    Raises DataError if a molecule cannot be used, naming it; MissingPackageError if RDKit is not
    installed.

    Parameters
    ----------
    smiles
        A SMILES (a CXSMILES with 3D coordinates provides a conformer), an RDKit molecule, or a
        list of them. Explicit hydrogen is removed.
    feature_set : ``set1``, ``set2``, ``set3``, ``original``, ``ying21`` or ``ying21_periodic``
    positions : [N, 3] Å in the order of the atoms, or one such array (or None) per molecule

    Returns
    -------
    Named arrays, see `bevatron.data.samples.molecule_fields`; a list of them for a list.
    `bevatron.data.samples.collate_molecules` makes a batch of them.

    Examples
    --------
    >>> arrays = featurize("CCO")
    >>> arrays["atom_features"].shape, arrays["bonds"].tolist()
    ((3, 11), [[0, 1], [1, 0], [1, 2], [2, 1]])
    """
    single = not isinstance(smiles, list | tuple | np.ndarray)
    given = [smiles] if single else list(smiles)
    where = [positions] if single else list(positions or [None] * len(given))
    if len(where) != len(given):
        raise DataError(f"positions: expected {len(given)} arrays, got {len(where)}")
    with require("rdkit.rdBase", "molecules").BlockLogs():
        found = [_understood(one, place) for one, place in zip(given, where, strict=True)]
        for number, molecule in enumerate(found):
            left_out = where[number] is not None and not len(molecule.positions)
            if molecule.graph is None or left_out:
                name = f"'{molecule.smiles}'" + ("" if single else f" (molecule {number})")
                raise DataError(f"{name}: {molecule.reason}")
        made = compute_features(found, _set_named(feature_set))
    return made[0] if single else made


def _set_named(name: str) -> FeatureSet:
    return feature_set(name)


def _understood(given: Any, positions: Any) -> Molecule:
    if not isinstance(given, str | bytes):
        return from_rdkit(given, positions)
    data = given.encode() if isinstance(given, str) else given
    sample: dict[str, Array] = {"smiles": np.frombuffer(data, dtype=np.uint8)}
    if positions is not None:
        sample["positions"] = np.asarray(positions, dtype=np.float32).reshape(-1, 3)
    return read_molecule(sample)


def compute_features(
    molecules: Sequence[Molecule], chosen: FeatureSet, version: int = FEATURES_VERSION
) -> list[dict[str, Array]]:
    """Compute the features of many molecules; those without a graph get no atoms."""
    graphs = [molecule.graph for molecule in molecules if molecule.graph is not None]
    atoms = [atoms_of(graph) for graph in graphs]
    bonds = [bonds_of(graph) for graph in graphs]
    num_atoms = np.array([len(own) for own in atoms], dtype=np.int64)
    num_bonds = np.array([len(own) for own in bonds], dtype=np.int64)
    ends = np.array(
        [(b.GetBeginAtomIdx(), b.GetEndAtomIdx()) for own in bonds for b in own], dtype=np.int32
    ).reshape(-1, 2)
    atom_columns = chemistry.atom_columns(graphs, atoms, chosen)
    bond_columns = chemistry.bond_columns(graphs, bonds, chosen)
    bond_features = chemistry.stack(bond_columns, chosen.bond, len(ends))
    known = None if version == 1 else _Labels.of(molecules, atom_columns, bond_columns, len(ends))
    shapes = _topology(graphs, num_atoms, num_bonds, ends, chosen, known)
    total = int(num_atoms.sum())
    atom_features = chemistry.stack({**atom_columns, **shapes.environments}, chosen.atom, total)
    both_ways = np.stack([ends, ends[:, ::-1]], axis=1).reshape(-1, 2)
    atom_ptr = np.concatenate([[0], np.cumsum(num_atoms)])
    bond_ptr = 2 * np.concatenate([[0], np.cumsum(num_bonds)])
    doubled = np.repeat(bond_features, 2, axis=0)
    keys = graph_keys(atom_columns, num_atoms, ends, num_bonds)
    made, place = [], 0
    for molecule in molecules:
        if molecule.graph is None:
            made.append(_nothing(molecule, chosen))
            continue
        own = slice(atom_ptr[place], atom_ptr[place + 1])
        edges = slice(bond_ptr[place], bond_ptr[place + 1])
        made.append(
            {
                "atom_features": atom_features[own],
                "bonds": both_ways[edges],
                "bond_features": doubled[edges],
                "shortest_paths": shapes.paths[place],
                "random_walk": shapes.walks[own],
                "laplacian_vectors": shapes.vectors[own],
                "laplacian_values": shapes.values[place],
                "key": keys[place, ...],
                **_encoded(molecule),
            }
        )
        place += 1
    return made


def _encoded(molecule: Molecule) -> dict[str, Array]:
    return {
        "positions": molecule.positions,
        "smiles": np.frombuffer(molecule.smiles.encode(), dtype=np.uint8),
        "reason": np.frombuffer(molecule.reason.encode(), dtype=np.uint8),
    }


def _nothing(molecule: Molecule, chosen: FeatureSet) -> dict[str, Array]:
    return {
        "atom_features": np.zeros((0, len(chosen.atom)), dtype=np.int16),
        "bonds": np.zeros((0, 2), dtype=np.int32),
        "bond_features": np.zeros((0, len(chosen.bond)), dtype=np.int16),
        "shortest_paths": np.zeros(0, dtype=np.uint8),
        "random_walk": np.zeros((0, NUM_WALKS), dtype=np.float32),
        "laplacian_vectors": np.zeros((0, NUM_LAPLACIAN), dtype=np.float32),
        "laplacian_values": np.zeros(NUM_LAPLACIAN, dtype=np.float32),
        "key": np.array(0, dtype=np.int64),
        **_encoded(molecule),
    }


@dataclass
class _Topology:
    """Topology of all molecules: flat per atom, paths and eigenvalues per molecule."""

    paths: list[Array]
    walks: Array
    vectors: Array
    values: Array
    environments: Mapping[str, Array]


@dataclass
class _Labels:
    """Keys that order the atoms of molecules."""

    atoms: npt.NDArray[np.uint64]
    bonds: npt.NDArray[np.uint64]
    positions: Array

    @classmethod
    def of(
        cls,
        molecules: Sequence[Molecule],
        atom_columns: Mapping[str, IntArray],
        bond_columns: Mapping[str, IntArray],
        num_bonds: int,
    ) -> Self:
        """Hash the features that do not depend on how a molecule is written."""
        positions = [
            molecule.positions
            if len(molecule.positions)
            else np.zeros((molecule.graph.GetNumAtoms(), 3), dtype=np.float32)
            for molecule in molecules
            if molecule.graph is not None
        ]
        every = np.concatenate([np.zeros((0, 3), dtype=np.float32), *positions])
        atoms = [column for name, column in atom_columns.items() if name not in chemistry.WRITTEN]
        bonds = [column for name, column in bond_columns.items() if name not in chemistry.WRITTEN]
        return cls(hashed(atoms, len(every)), hashed(bonds, num_bonds), every)


def _topology(
    graphs: Sequence[Any],
    num_atoms: IntArray,
    num_bonds: IntArray,
    ends: Array,
    chosen: FeatureSet,
    labels: _Labels | None,
) -> _Topology:
    total, count = int(num_atoms.sum()), len(num_atoms)
    atom_ptr = np.concatenate([[0], np.cumsum(num_atoms)])
    radii = {n: int(n.split("_")[1]) for n in chosen.atom if n.startswith("environment_")}
    result = _Topology(
        paths=[np.zeros(0, dtype=np.uint8)] * count,
        walks=np.zeros((total, NUM_WALKS), dtype=np.float32),
        vectors=np.zeros((total, NUM_LAPLACIAN), dtype=np.float32),
        values=np.zeros((count, NUM_LAPLACIAN), dtype=np.float32),
        environments={name: np.zeros(total, dtype=np.int64) for name in radii},
    )
    # Sorted by size, so that molecules of one size form one batch.
    order = np.argsort(num_atoms, kind="stable")
    bond_graph = np.repeat(np.arange(count), num_bonds)
    for members in _of_one_size(order, num_atoms):
        size = int(num_atoms[members[0]])
        local = np.full(count, -1)
        local[members] = np.arange(len(members))
        mine = local[bond_graph] >= 0
        graph, (first, second) = local[bond_graph[mine]], ends[mine].T
        adjacency = np.zeros((len(members), size, size), dtype=bool)
        adjacency[graph, first, second] = True
        adjacency[graph, second, first] = True
        rows = (atom_ptr[members][:, None] + np.arange(size)).reshape(-1)
        distances = topology.shortest_paths(adjacency)
        for place, member in enumerate(members):
            result.paths[member] = distances[place].reshape(-1)
        result.walks[rows] = topology.random_walks(adjacency).reshape(-1, NUM_WALKS)
        own_order = None
        if labels is not None:
            pairs = mixed(distances.astype(np.uint64))
            pairs[graph, first, second] += labels.bonds[mine]
            pairs[graph, second, first] += labels.bonds[mine]
            places = labels.positions[rows].reshape(len(members), size, 3)
            atoms = labels.atoms[rows].reshape(len(members), size)
            own_order = canonical_order(atoms, pairs, remoteness(places))
        values, vectors = topology.laplacian(adjacency, own_order)
        result.values[members] = values
        result.vectors[rows] = vectors.reshape(-1, NUM_LAPLACIAN)
        largest = _largest_radii(distances, adjacency, [graphs[m] for m in members], bool(radii))
        for name, radius in radii.items():
            around = topology.environments(distances, largest, radius).reshape(-1)
            last = dict(zip(chosen.atom, chosen.atom_sizes, strict=True))[name] - 1
            result.environments[name][rows] = np.minimum(around, last)
    return result


def _largest_radii(
    distances: npt.NDArray[np.uint8], adjacency: Array, graphs: Sequence[Any], wanted: bool
) -> IntArray:
    """Largest radius of an environment of each atom, [B, n]; RDKit decides unclear cases."""
    if not wanted:
        return np.zeros(distances.shape[:2], dtype=np.int64)
    largest, unclear = topology.outermost_shells(distances, adjacency)
    chem = require("rdkit.Chem", "molecules")
    for place, atom in np.argwhere(unclear).tolist():
        radius = int(largest[place, atom]) + 1
        if len(chem.FindAtomEnvironmentOfRadiusN(graphs[place], radius, atom, useHs=True)):
            largest[place, atom] = radius
    return largest


def _of_one_size(order: IntArray, num_atoms: IntArray) -> Iterator[IntArray]:
    """Cut molecules sorted by size into runs of one size, not too many at once."""
    start = 0
    while start < len(order):
        size = num_atoms[order[start]]
        stop = int(np.searchsorted(num_atoms[order], size, side="right"))
        stop = min(stop, start + max(_PAIRS_AT_ONCE // int(size * size), 1))
        yield order[start:stop]
        start = stop
