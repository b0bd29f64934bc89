"""Predictions of a trained node classifier for all vertices of a graph."""

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bevatron.config import from_dict
from bevatron.data.graphs import GraphArrays, GraphOptions, read_graph
from bevatron.data.samples.graphs import GraphBatch, collate_graphs
from bevatron.errors import ConfigError, DataError, OutOfMemoryError
from bevatron.files import write_bytes_atomically, write_text_atomically
from bevatron.models.graph_attention import NodeClassifier, NodeTask
from bevatron.models.graph_attention import load_model as load_folder
from bevatron.recipes.devices import announce, device_to_use
from bevatron.recipes.graph.data import sample_of
from bevatron.recipes.graph.run import READ_FILE
from bevatron.recipes.kinds import newest_model
from bevatron.train.evaluate import in_eval_mode

DTYPES = {"float64": torch.float64, "float32": torch.float32}

Metrics = dict[str, float]


@dataclass(frozen=True)
class Predictions:
    """Predictions for every vertex, in the order of the file.

    Attributes
    ----------
    ids : [N] vertices, as the file numbers them
    classes : [N] the most probable class; of yes-or-no questions [N, T] 0 or 1
    probabilities : [N, classes or questions]
    """

    ids: npt.NDArray[np.int64]
    classes: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]


def load_model(path: Path | str, dtype: str = "float32") -> NodeClassifier:
    """Read the node classifier of a run or a model folder; of an unfinished run, the best so far.

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
    """Return the options with which a model's training graphs were read."""
    file = newest_model(Path(path)) / READ_FILE
    return (
        from_dict(GraphOptions, json.loads(file.read_text())) if file.is_file() else GraphOptions()
    )


def predict_graph(
    model: NodeClassifier | Path | str,
    graph: GraphArrays | Path | str,
    *,
    features: Path | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> Predictions:
    """Classify every vertex of a graph.

    Parameters
    ----------
    model
        A model, a run or a model folder.
    graph
        A graph or a file; files are read with the options of the model's training data.
    features
        .npy file for an edge list, one row per vertex.
    device, dtype
        Where and in which precision to compute.

    Raises
    ------
    DataError
        If the graph does not have the features of the model.
    """
    found = graph_for(model, graph, features=features)
    ids = np.arange(found.num_nodes) if found.ids is None else found.ids
    task, _, outputs = run_model(model, found, device, dtype)
    probabilities = outputs["probabilities"].double().cpu().numpy()
    classes = (
        (probabilities > 0.5).astype(np.int64)
        if task.labels == "yes_no"
        else probabilities.argmax(axis=1)
    )
    return Predictions(ids, classes, probabilities)


def predict_file(
    model: Path | str,
    source: Path,
    out: Path,
    *,
    features: Path | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> int:
    """Write the predictions for every vertex: ``.csv`` (vertex, class, p0, ...) or ``.npz``.

    Returns
    -------
    Number of vertices.

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


def run_model(
    model: NodeClassifier | Path | str, graph: GraphArrays, device: str, dtype: str
) -> tuple[NodeTask, GraphBatch, dict[str, torch.Tensor]]:
    """Run a model on one graph.

    Returns
    -------
    task, batch, outputs

    Raises
    ------
    DataError
        If features or classes are not those of the model.
    OutOfMemoryError
        If the graph does not fit on the device.
    """
    module: Any = model if isinstance(model, NodeClassifier) else load_model(model, dtype)
    config = module.config
    if not graph.num_features:
        raise DataError(f"{graph.name}: has no features; give them in a file (--features FILE.npy)")
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
    announce(place, dtype)
    try:
        module = module.to(place, DTYPES[dtype])
        moved = batch.to(place, DTYPES[dtype])
        with in_eval_mode(module):
            outputs = dict(task.predict(module, moved))
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"{place} ran out of memory at a graph of {graph.num_nodes:,} vertices with "
            f"{graph.num_edges:,} edges; use float32 or several GPUs"
        ) from error
    return task, moved, outputs


def graph_for(
    model: NodeClassifier | Path | str,
    graph: GraphArrays | Path | str,
    **more_files: Path | None,
) -> GraphArrays:
    """Read a graph with the options of a model's training data; see `read_graph`."""
    if isinstance(graph, GraphArrays):
        return graph
    options = GraphOptions() if isinstance(model, NodeClassifier) else read_options(model)
    return read_graph(graph, options, **more_files)


def _table(found: Predictions) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    several = found.classes.ndim == 2
    width = found.probabilities.shape[1]
    answers = [f"answer{t}" for t in range(width)] if several else ["class"]
    writer.writerow(["vertex", *answers, *(f"p{c}" for c in range(width))])
    for vertex, answer, row in zip(found.ids, found.classes, found.probabilities, strict=True):
        writer.writerow([vertex, *np.atleast_1d(answer), *(f"{p:.6g}" for p in row)])
    return text.getvalue()
