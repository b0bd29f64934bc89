"""A trained node classifier in use: errors on labelled vertices, predictions for all of them."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bevatron.config import from_dict
from bevatron.data.graphs import ROLES, GraphArrays, GraphOptions, read_graph
from bevatron.data.graphs.vertices import has_label
from bevatron.data.samples.graphs import GraphBatch, collate_graphs
from bevatron.errors import ConfigError, DataError, OutOfMemoryError
from bevatron.files import write_bytes_atomically, write_json_atomically, write_text_atomically
from bevatron.models.graph_attention import NodeClassifier, NodeTask
from bevatron.models.graph_attention import load_model as load_folder
from bevatron.recipes.devices import device_to_use
from bevatron.recipes.graph.data import sample_of
from bevatron.recipes.graph.run import READ_FILE
from bevatron.recipes.kinds import newest_model
from bevatron.train.evaluate import in_eval_mode

DTYPES = {"float64": torch.float64, "float32": torch.float32}

Metrics = dict[str, float]


@dataclass(frozen=True)
class Predictions:
    """What a model says of every vertex, in the order of the file.

    Attributes
    ----------
    ids : [N] the file's numbers of the vertices
    classes : [N] the most probable class; of yes-or-no questions [N, T] 0 or 1
    probabilities : [N, classes or questions]
    """

    ids: npt.NDArray[np.int64]
    classes: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]


def load_model(path: Path | str, dtype: str = "float32") -> NodeClassifier:
    """Read the node classifier of a run or a model folder; of a run under way, the best so far.

    Raises
    ------
    CheckpointError
        If there is none.
    ConfigError
        For another type than float32 and float64.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: expected 'float32' or 'float64', got '{dtype}'")
    return load_folder(newest_model(Path(path)), DTYPES[dtype]).eval()


def read_options(path: Path | str) -> GraphOptions:
    """Return how graphs for a model are read: as those it was trained on."""
    file = newest_model(Path(path)) / READ_FILE
    return (
        from_dict(GraphOptions, json.loads(file.read_text())) if file.is_file() else GraphOptions()
    )


def predict_graph(
    model: NodeClassifier | Path | str,
    graph: GraphArrays | Path | str,
    *,
    features: Path | None = None,
    device: str = "cpu",
    dtype: str = "float32",
) -> Predictions:
    """Classify every vertex of a graph.

    Parameters
    ----------
    model
        A model, a run or a model folder.
    graph
        A graph or a file; it is read as those that the model was trained on.
    features
        .npy file for an edge list, one row per vertex.
    device, dtype
        Where and in which precision.

    Raises
    ------
    DataError
        If the graph has other features than the model knows.
    """
    found = _graph(model, graph, features=features)
    ids = np.arange(found.num_nodes) if found.ids is None else found.ids
    _, outputs = _run(model, found, device, dtype)
    probabilities = outputs["probabilities"].double().cpu().numpy()
    classes = (
        (probabilities > 0.5).astype(np.int64)
        if _task_of(outputs).labels == "yes_no"
        else probabilities.argmax(axis=1)
    )
    return Predictions(ids, classes, probabilities)


def predict_file(
    model: Path | str,
    source: Path,
    out: Path,
    *,
    features: Path | None = None,
    device: str = "cpu",
    dtype: str = "float32",
) -> int:
    """Write what a model says of every vertex: ``.csv`` (vertex, class, p0, ...) or ``.npz``.

    Returns
    -------
    How many vertices were classified.

    Raises
    ------
    DataError
        If the graph cannot be read or ``out`` cannot be written.
    """
    if out.suffix not in {".csv", ".npz"}:
        raise DataError(f"{out}: expected a name that ends in .csv or .npz")
    found = predict_graph(model, source, features=features, device=device, dtype=dtype)
    if out.suffix == ".npz":
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            vertex=found.ids,
            predicted_class=found.classes,
            probabilities=found.probabilities.astype(np.float32),
        )
        write_bytes_atomically(out, buffer.getvalue(), DataError)
    else:
        write_text_atomically(out, _table(found), DataError)
    return len(found.ids)


def evaluate_graphs(
    model: NodeClassifier | Path | str,
    sources: Sequence[GraphArrays | Path | str],
    *,
    features: Path | None = None,
    labels: Path | None = None,
    splits: Path | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    out: Path | None = None,
) -> dict[str, Metrics]:
    """Compute the metrics of a model on labelled graphs.

    Parameters
    ----------
    model, device, dtype
        As of `predict_graph`.
    sources
        Graphs or files.
    features, labels, splits
        Files that stand beside the edge list, if that is the only graph; see `read_graph`.
    out
        Also write the table to this JSON file.

    Returns
    -------
    By part (``train``, ``valid``, ``test``, ``all labelled``): loss, accuracy and for yes-or-no
    questions ROC-AUC and average precision. With several graphs a name before it.

    Raises
    ------
    ConfigError
        For no graph, or one file of features, labels or splits beside several graphs.
    DataError
        For a graph without labels.
    """
    if not sources:
        raise ConfigError("evaluate: expected at least one graph")
    beside = {"features": features, "labels": labels, "splits": splits}
    given = [name for name, value in beside.items() if value is not None]
    if given and len(sources) > 1:
        raise ConfigError(f"{given[0]}: goes with one graph, but {len(sources)} are given")
    table: dict[str, Metrics] = {}
    for source in sources:
        graph = _graph(model, source, **beside)
        if graph.labels is None:
            raise DataError(f"{graph.name}: has no labels to compare with")
        batch, outputs = _run(model, graph, device, dtype)
        known = has_label(graph.labels)
        parts = {role: graph.mask(role) for role in ROLES if graph.mask(role).any()}
        prefix = f"{graph.name} " if len(sources) > 1 else ""
        for name, mask in {**parts, "all labelled": known}.items():
            metrics = _task_of(outputs).metrics()
            chosen = torch.from_numpy(mask & known).to(batch.mask.device)
            metrics.update(replace(batch, mask=chosen, _copies={}), outputs)
            table[prefix + name] = metrics.compute()
    if out is not None:
        write_json_atomically(out, table, DataError)
    return table


class _Outputs(dict[str, torch.Tensor]):
    """Outputs of a model, with the task that made them."""

    task: NodeTask


def _task_of(outputs: Mapping[str, torch.Tensor]) -> NodeTask:
    assert isinstance(outputs, _Outputs)
    return outputs.task


def _run(
    model: NodeClassifier | Path | str, graph: GraphArrays, device: str, dtype: str
) -> tuple[GraphBatch, _Outputs]:
    module: Any = model if isinstance(model, NodeClassifier) else load_model(model, dtype)
    config = module.config
    if not graph.num_features:
        raise DataError(f"{graph.name}: has no features; give them beside it (--features FILE.npy)")
    if graph.num_features != config.inputs:
        raise DataError(
            f"{graph.name}: has {graph.num_features} features per vertex, the model was trained on "
            f"{config.inputs}"
        )
    if graph.labels is not None and graph.num_classes > config.outputs > 1:
        raise DataError(
            f"{graph.name}: has {graph.num_classes} classes, the model knows {config.outputs}"
        )
    task = NodeTask(config.labels, config.outputs)
    batch = collate_graphs([sample_of(graph, config.labels)], np.zeros(1, np.int64), [1.0])
    place = device_to_use(device)
    try:
        module = module.to(place, DTYPES[dtype])
        moved = batch.to(place, DTYPES[dtype])
        with in_eval_mode(module):
            outputs = _Outputs(task.predict(module, moved))
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"{place} ran out of memory at a graph of {graph.num_nodes:,} vertices with "
            f"{graph.num_edges:,} edges; take float32 or several GPUs"
        ) from error
    outputs.task = task
    return moved, outputs


def _graph(
    model: NodeClassifier | Path | str,
    graph: GraphArrays | Path | str,
    **beside: Path | None,
) -> GraphArrays:
    if isinstance(graph, GraphArrays):
        return graph
    options = GraphOptions() if isinstance(model, NodeClassifier) else read_options(model)
    return read_graph(graph, options, **beside)


def _table(found: Predictions) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    several = found.classes.ndim == 2
    width = found.probabilities.shape[1]
    answers = [f"answer{t}" for t in range(width)] if several else ["class"]
    writer.writerow(["vertex", *answers, *(f"p{c}" for c in range(width))])
    for vertex, said, row in zip(found.ids, found.classes, found.probabilities, strict=True):
        writer.writerow([vertex, *np.atleast_1d(said), *(f"{p:.6g}" for p in row)])
    return text.getvalue()


def print_metrics(table: Mapping[str, Metrics]) -> None:
    """Print metrics by part."""
    names = list(dict.fromkeys(name for metrics in table.values() for name in metrics))
    width = max(map(len, table))
    print(" " * width, *(f"{name:>18}" for name in names))  # noqa: T201
    for part, metrics in table.items():
        cells = [f"{metrics[name]:18.4f}" if name in metrics else " " * 18 for name in names]
        print(f"{part:<{width}}", *cells)  # noqa: T201
