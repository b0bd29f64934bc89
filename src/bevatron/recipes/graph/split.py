"""The split that a model was trained with: kept next to its weights, so that no test uses it again.

A graph is recognised by its vertices (their number and features). Labels only tell graphs with
equal features apart, so a file to which labels were added later is still recognised.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import xxhash

from bevatron.data.dataset import ROLES
from bevatron.data.graphs import GraphArrays, SparseFeatures
from bevatron.errors import CheckpointError, DataError
from bevatron.files import atomic_write

SPLIT_FILE = "split.npz"
"""Next to a model's weights: the roles of the vertices that it was trained with."""

Roles = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class KnownGraph:
    """A graph of the training data: hashes of its vertices and labels, and [N] roles."""

    vertices: str
    labels: str
    roles: Roles


@dataclass(frozen=True, eq=False)
class TrainedSplit:
    """The vertices that a model was trained, validated and tested on.

    Attributes
    ----------
    origin : where the split comes from
    graphs : all graphs of the run
    """

    origin: str
    graphs: Sequence[KnownGraph] = field(default_factory=tuple)

    @classmethod
    def of(cls, graphs: Iterable[GraphArrays], origin: str) -> "TrainedSplit":
        """Record the roles of graphs."""
        return cls(origin, [KnownGraph(*_hashes(graph), _roles(graph)) for graph in graphs])

    def roles(self, graph: GraphArrays) -> Roles | None:
        """Return the roles that vertices had in training, [N]; None for an unknown graph.

        If several training graphs have these features and other labels, a vertex has the first of
        the roles train, valid, test that it has in any of them.
        """
        vertices, labels = _hashes(graph)
        alike = [known for known in self.graphs if known.vertices == vertices]
        same = [known.roles for known in alike if known.labels == labels]
        found = same or [known.roles for known in alike]
        if not found:
            return None
        ranked = np.stack(found) - np.uint8(1)  # none = 255
        first: Roles = ranked.min(axis=0) + np.uint8(1)
        return first

    def save(self, folder: Path) -> None:
        """Write the split into a model folder.

        Raises CheckpointError if it cannot be written.
        """
        arrays: dict[str, Any] = {"origin": np.array(self.origin)}
        for number, known in enumerate(self.graphs):
            arrays[f"hashes_{number}"] = np.array([known.vertices, known.labels])
            arrays[f"roles_{number}"] = known.roles
        with atomic_write(folder / SPLIT_FILE, CheckpointError) as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, folder: Path) -> "TrainedSplit | None":
        """Read the split of a model folder; None if an earlier version wrote it without one.

        Raises CheckpointError if the file is damaged.
        """
        path = folder / SPLIT_FILE
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as file:
                count = sum(name.startswith("roles_") for name in file)
                graphs = []
                for n in range(count):
                    vertices, labels = map(str, file[f"hashes_{n}"])
                    graphs.append(KnownGraph(vertices, labels, file[f"roles_{n}"]))
                return cls(str(file["origin"]), graphs)
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise CheckpointError(
                f"{path}: is damaged ({error}); without it a test may use labels that were "
                "trained on, so evaluate another copy of the model"
            ) from None


def with_trained_split(
    graph: GraphArrays, trained: TrainedSplit | None, splits: Path | None = None
) -> tuple[GraphArrays, str]:
    """Give a graph the split of a model's training, as far as the model was trained on it.

    Where the training had no validation or no test, that part is the graph's own, as far as its
    vertices had no role in training: their labels may have been added later. Raises DataError if
    ``splits`` has vertices for validation or test that were trained on.

    Parameters
    ----------
    graph : as it was read
    trained : what the model was trained on; None if it does not say
    splits
        The file from which the graph's split was read; it is used if it asks for no test on what
        was trained on.

    Returns
    -------
    The graph, and a sentence that says which split it has.
    """
    own = "no split" if graph.roles is None else f"its own split ({_sizes(graph.roles)})"
    known = None if trained is None else trained.roles(graph)
    if trained is None:
        return graph, (
            f"{graph.name}: {own}; the model does not record which vertices it was trained on, so "
            "these parts may hold some"
        )
    if known is None:
        return graph, f"{graph.name}: {own}; it is not one of the training graphs"
    roles = _roles(graph)
    if splits is not None:
        for role in ROLES[1:]:
            both = np.flatnonzero(graph.mask(role) & (known == 1))
            if len(both):
                raise DataError(
                    f"{splits}: split '{role}' holds {len(both):,} vertices that the model was "
                    f"trained on, the first is {both[0]}; leave it out for the split of the "
                    "training"
                )
        return graph, f"{graph.name}: the split of {splits} ({_sizes(roles)})"
    chosen = known.copy()
    for number in (2, 3):
        if not (known == number).any():
            chosen[(known == 0) & (roles == number)] = number
    return (
        replace(graph, roles=chosen),
        f"{graph.name}: the split used in training, {trained.origin} ({_sizes(chosen)})",
    )


def _roles(graph: GraphArrays) -> Roles:
    return np.zeros(graph.num_nodes, dtype=np.uint8) if graph.roles is None else graph.roles


def _sizes(roles: Roles) -> str:
    counts = np.bincount(roles, minlength=len(ROLES) + 1)[1:]
    return ", ".join(f"{count:,} {role}" for role, count in zip(ROLES, counts, strict=True))


def _hashes(graph: GraphArrays) -> tuple[str, str]:
    """Hash what recognises a graph: its vertices, and its labels."""
    vertices = xxhash.xxh3_128(repr((graph.num_nodes, graph.num_features)).encode())
    features = graph.features
    if isinstance(features, SparseFeatures):
        ones = np.ones(0) if features.values is None else features.values
        for array in (features.indptr, features.indices, ones):
            vertices.update(np.ascontiguousarray(array).data)
    elif features is not None:
        vertices.update(np.ascontiguousarray(features).data)
    labels = np.zeros(0) if graph.labels is None else np.ascontiguousarray(graph.labels)
    return vertices.hexdigest(), xxhash.xxh3_128(labels.data).hexdigest()
