"""Data of a run on graphs: one graph with masks, or separate graphs for each split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash

from bevatron.config import to_dict
from bevatron.data.dataset import ROLES, Dataset, InMemory
from bevatron.data.graphs import GraphArrays, GraphOptions, read_graph
from bevatron.data.graphs.vertices import has_label
from bevatron.data.samples.graphs import WholeGraph
from bevatron.errors import ConfigError, DataError
from bevatron.models.graph_attention.config import LabelKind
from bevatron.recipes.graph.split import TrainedSplit
from bevatron.typing import IntArray


@dataclass(frozen=True)
class GraphDataConfig:
    """Files of graphs and how to read them.

    Attributes
    ----------
    train
        One file: a graph whose splits assign vertices to training, validation and test. Several
        files, or one together with ``valid``: graphs whose labelled vertices are all for training.
    valid : more graphs, for validation
    test : more graphs, for tests
    features : .npy file of features for an edge list, one row per vertex
    labels : .npy file of labels, likewise
    splits : .npz file with train, valid, test as masks or indices of vertices
    questions
        ``classes``: each vertex has one of several; ``yes_no``: one or several answers of 0 or 1,
        measured by ROC-AUC; ``auto``: yes_no if labels have several columns.
    read : self loops, reverse edges, duplicates, features, splits
    """

    train: tuple[Path, ...] = ()
    valid: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    features: Path | None = None
    labels: Path | None = None
    splits: Path | None = None
    questions: Literal["auto", "classes", "yes_no"] = "auto"
    read: GraphOptions = field(default_factory=GraphOptions)

    @property
    def inductive(self) -> bool:
        """Whether each split consists of separate graphs."""
        return len(self.train) > 1 or bool(self.valid) or bool(self.test)

    @property
    def split_origin(self) -> str:
        """Origin of the split, for messages."""
        if self.inductive:
            return "by whole graphs"
        if self.read.random_split is not None:
            shares = " ".join(f"{share:g}" for share in self.read.random_split)
            return f"drawn at random ({shares}, seed {self.read.split_seed})"
        return f"split {self.read.split} of {self.splits or self.train[0]}"


def graph_sizes(dataset: Dataset) -> dict[str, IntArray]:
    """Count what each graph uses of a batch's capacity: ``nodes``, ``edges``, ``graphs``."""
    nodes = dataset.lengths("labels")
    return {"nodes": nodes, "edges": dataset.lengths("edges"), "graphs": np.ones_like(nodes)}


@dataclass(frozen=True)
class GraphData:
    """Data sets of a run.

    Attributes
    ----------
    train, valid, test : one sample each if all are splits of one graph; None where a split is empty
    inputs, outputs, questions : width of the features, number of logits, kind of labels
    fingerprint : hash of edges, features, labels and splits
    split : roles of the vertices, which stay with the model
    generators : random number generators that all processes share, by name
    """

    train: Dataset
    valid: Dataset | None
    test: Dataset | None
    inputs: int
    outputs: int
    questions: LabelKind
    report: list[str]
    fingerprint: str
    split: TrainedSplit
    generators: Mapping[str, torch.Generator] = field(default_factory=dict)


def load_graphs(config: GraphDataConfig) -> GraphData:
    """Read all graphs of a run.

    Raises ConfigError if no file is given, or files of one graph are given with several; DataError
    for data that must not be trained on.
    """
    if not config.train:
        raise ConfigError('data.train: expected a graph to train on (`data="FILE"`)')
    graphs = [read_one(path, config, several=config.inductive) for path in config.train]
    parts: dict[str, list[GraphArrays]] = {"train": graphs}
    for role in ROLES[1:]:
        paths: Sequence[Path] = getattr(config, role)
        parts[role] = [read_one(path, config, several=True) for path in paths]
    fingerprint = _fingerprint([graph for each in parts.values() for graph in each], config)
    if config.inductive:
        parts = {role: [_whole_in(graph, role) for graph in each] for role, each in parts.items()}
        trained = {_hash_of([replace(graph, roles=None)]) for graph in parts["train"]}
        for graph in parts["test"]:
            if _hash_of([replace(graph, roles=None)]) in trained:
                raise DataError(
                    f"{graph.name}: is given for training and for test; leave it out of data.test"
                )
    everything = [graph for each in parts.values() for graph in each]
    questions = _questions(config, everything)
    _check_alike(everything)
    _check_classes(everything)
    if config.inductive:
        sets = {role: _set_of(each, role, questions) for role, each in parts.items()}
    else:
        sets = _parts_of_one(graphs[0], questions)
    train = sets["train"]
    if train is None:
        raise DataError(_nothing_to_train_on(graphs[0].name))
    classes = max(graph.num_classes for graph in everything)
    binary = questions == "yes_no" and _columns(everything[0]) == 1
    return GraphData(
        train=train,
        valid=sets["valid"],
        test=sets["test"],
        inputs=everything[0].num_features,
        outputs=1 if binary else classes,
        questions=questions,
        report=[line for graph in everything for line in graph.report()],
        fingerprint=fingerprint,
        split=TrainedSplit.of(everything, config.split_origin),
    )


def describe_vertices(vertices: GraphArrays, config: GraphDataConfig) -> GraphData:
    """Describe inputs and outputs of a graph whose edges are read elsewhere.

    Raises ConfigError or DataError as for `load_graphs`.
    """
    _check_learnable(vertices, Path(vertices.name))
    questions = _questions(config, [vertices])
    _check_classes([vertices])
    if not vertices.mask("train").any():
        raise DataError(_nothing_to_train_on(vertices.name))
    binary = questions == "yes_no" and _columns(vertices) == 1
    digest = xxhash.xxh3_128(_fingerprint([vertices], config).encode())
    digest.update(repr([(p.name, p.stat().st_size) for p in config.train]).encode())
    return GraphData(
        train=InMemory([], str),
        valid=None,
        test=None,
        inputs=vertices.num_features,
        outputs=1 if binary else vertices.num_classes,
        questions=questions,
        report=[line for line in vertices.report() if "features" in line],
        fingerprint=digest.hexdigest(),
        split=TrainedSplit.of([vertices], config.split_origin),
    )


def _nothing_to_train_on(name: str) -> str:
    return (
        f"{name}: no labelled vertex is set aside to train on; give a split (data.splits FILE.npz) "
        "or draw one (data.read.random_split 0.6 0.2 0.2)"
    )


def _check_learnable(graph: GraphArrays, path: Path) -> None:
    if not graph.num_features:
        raise DataError(f"{path}: has no features; give them with data.features FILE.npy")
    if graph.labels is None:
        raise DataError(f"{path}: has no labels; give them with data.labels FILE.npy")


def read_one(path: Path, config: GraphDataConfig, *, several: bool) -> GraphArrays:
    """Read a graph, with the files of features, labels and splits of an edge list.

    Raises ConfigError if files of features, labels or splits are given for several graphs;
    DataError if the graph has no features or labels to learn from.
    """
    more_files = {"features": config.features, "labels": config.labels, "splits": config.splits}
    given = [name for name, value in more_files.items() if value is not None]
    if several and given:
        raise ConfigError(
            f"data.{given[0]}: belongs to one graph, but several are given; put all of a "
            "graph into its npz file"
        )
    options = config.read
    if several and options.random_split is not None:
        raise ConfigError("data.read.random_split: splits one graph, but several are given")
    graph = read_graph(path, options, **more_files)
    _check_learnable(graph, path)
    return graph


def sample_of(graph: GraphArrays, questions: LabelKind) -> dict[str, Any]:
    """Turn a graph into a sample; answers to one question become a column."""
    sample: dict[str, Any] = graph.sample()
    if questions == "yes_no" and sample["labels"].ndim == 1:
        labels = sample["labels"]
        sample["labels"] = np.where(labels < 0, np.nan, labels)[:, None].astype(np.float32)
    return sample


def _parts_of_one(graph: GraphArrays, questions: LabelKind) -> dict[str, InMemory | None]:
    whole, names = WholeGraph(sample_of(graph, questions)), [graph.name]
    return {
        role: InMemory([whole.part(role)], names.__getitem__) if graph.mask(role).any() else None
        for role in ROLES
    }


def _whole_in(graph: GraphArrays, role: str) -> GraphArrays:
    """Give all labelled vertices of a graph one role, whatever its own split."""
    assert graph.labels is not None
    known = has_label(graph.labels)
    if not known.any():
        raise DataError(f"{graph.name}: has no labelled vertices")
    number = 1 + ROLES.index(role)
    return replace(graph, roles=(known * number).astype(np.uint8))


def _set_of(graphs: Sequence[GraphArrays], role: str, questions: LabelKind) -> InMemory | None:
    """Build a data set of graphs, with all labelled vertices."""
    if not graphs:
        return None
    part = np.array(ROLES.index(role), dtype=np.int32)
    samples = [{**sample_of(graph, questions), "part": part} for graph in graphs]
    return InMemory(samples, [graph.name for graph in graphs].__getitem__)


def _columns(graph: GraphArrays) -> int:
    assert graph.labels is not None
    return 1 if graph.labels.ndim == 1 else int(graph.labels.shape[1])


def _questions(config: GraphDataConfig, graphs: Sequence[GraphArrays]) -> LabelKind:
    columns = {_columns(graph) for graph in graphs}
    if config.questions == "classes" and columns != {1}:
        raise ConfigError("data.questions: 'classes' needs one label per vertex, found several")
    if config.questions == "auto":
        return "classes" if columns == {1} else "yes_no"
    if config.questions == "yes_no" and columns == {1}:
        for graph in graphs:
            if graph.num_classes > 2:
                raise ConfigError(
                    f"data.questions: 'yes_no' needs labels 0 and 1, {graph.name} has "
                    f"{graph.num_classes} classes"
                )
    return config.questions


def _check_alike(graphs: Sequence[GraphArrays]) -> None:
    first = graphs[0]
    for graph in graphs[1:]:
        if graph.num_features != first.num_features or _columns(graph) != _columns(first):
            raise DataError(
                f"{graph.name}: has {graph.num_features} features and {_columns(graph)} labels per "
                f"vertex, {first.name} has {first.num_features} and {_columns(first)}"
            )
        if isinstance(graph.features, np.ndarray) != isinstance(first.features, np.ndarray):
            raise DataError(
                f"{graph.name}: has dense features and {first.name} sparse ones, or vice "
                "versa; store them alike"
            )


EMPTY_CLASSES = 100
"""Classes without a vertex that are tolerated, besides as many as there are classes with one."""


def _check_classes(graphs: Sequence[GraphArrays]) -> None:
    """Refuse labels with gaps that would make a model of countless logits."""
    if _columns(graphs[0]) > 1:
        return
    found = np.unique(np.concatenate([np.unique(graph.labels) for graph in graphs]))  # type: ignore[arg-type]
    classes = found[found >= 0]
    if len(classes) and classes[-1] + 1 > 2 * len(classes) + EMPTY_CLASSES:
        raise DataError(
            f"{graphs[0].name}: has {len(classes):,} different labels up to {classes[-1]:,}, which "
            f"would make a model of {classes[-1] + 1:,} logits; number the classes 0, 1, 2, ..."
        )


def _fingerprint(graphs: Sequence[GraphArrays], config: GraphDataConfig) -> str:
    options = repr(sorted(to_dict(config.read).items()))
    return _hash_of(graphs, options.encode())


def _hash_of(graphs: Sequence[GraphArrays], more: bytes = b"") -> str:
    digest = xxhash.xxh3_128()
    for graph in graphs:
        for array in graph.sample().values():
            digest.update(np.ascontiguousarray(array).data if array.ndim else array.tobytes())
    digest.update(more)
    return digest.hexdigest()
