"""Predictions of a trained node classifier for all vertices of a graph."""

import copy
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevatron.config import from_dict
from bevatron.data.graphs import GraphArrays, GraphOptions, read_graph
from bevatron.data.samples.graphs import GraphBatch, collate_graphs
from bevatron.errors import ConfigError, DataError
from bevatron.files import atomic_write, write_csv_atomically
from bevatron.models.graph_attention import NodeClassifier, NodeTask
from bevatron.models.graph_attention import load_model as load_folder
from bevatron.parallel.graph_partition import DistributedGraph
from bevatron.parallel.mesh import Mesh, open_mesh, ranks_from_environment
from bevatron.recipes.devices import announce, device_to_use, fitting
from bevatron.recipes.finite import check_finite
from bevatron.recipes.graph.data import sample_of
from bevatron.recipes.graph.partition import PartedGraph, Scheme, Source, open_graph
from bevatron.recipes.graph.run import READ_FILE
from bevatron.recipes.kinds import newest_model
from bevatron.train.evaluate import in_eval_mode
from bevatron.typing import FloatArray, IntArray

DTYPES = {"float64": torch.float64, "float32": torch.float32}

GATHERED_NUMBERS = 2**26
"""Number of outputs gathered from all processes at a time."""


@dataclass(frozen=True)
class Predictions:
    """Predictions for every vertex, in the order of the file.

    Attributes
    ----------
    ids : [N] vertices, as the file numbers them
    classes : [N] the most probable class; of yes-or-no questions [N, T] 0 or 1
    probabilities : [N, classes or questions]
    """

    ids: IntArray
    classes: IntArray
    probabilities: FloatArray


def load_model(path: Path | str, dtype: str = "float32") -> NodeClassifier:
    """Read the node classifier of a run or a model folder; of an unfinished run, the best so far.

    Raises CheckpointError if there is none; ConfigError for another type than float32 and float64.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: expected 'float32' or 'float64', got '{dtype}'")
    return load_folder(newest_model(Path(path)), DTYPES[dtype]).eval()


def read_options(path: Path | str) -> GraphOptions:
    """Return the options with which a model's training graphs were read."""
    file = newest_model(Path(path)) / READ_FILE
    return (
        from_dict(GraphOptions, json.loads(file.read_text(encoding="utf-8")))
        if file.is_file()
        else GraphOptions()
    )


def predict_graph(
    model: NodeClassifier | Path | str,
    graph: GraphArrays | Path | str,
    *,
    features: Path | None = None,
    device: str = "auto",
    dtype: str = "float32",
    partition: Scheme = "auto",
) -> Predictions:
    """Classify every vertex of a graph.

    Several processes (torchrun) partition the graph as training does; the first has the result, the
    others an empty one. Raises DataError if the graph does not have the features of the model.

    Parameters
    ----------
    model : a model, a run or a model folder
    graph : a graph or a file; files are read with the options of the model's training data
    features : .npy file for an edge list, one row per vertex
    device, dtype : where and in which precision to compute
    partition : how processes partition the graph; see `bevatron.recipes.graph.run.GraphRun`
    """
    with processes(device) as mesh:
        opened = open_for(model, graph, mesh, dtype, features=features)
        computed = run_model(opened, mesh, dtype, partition)
        probabilities = computed.gathered("probabilities")
    found = opened.graph
    several = computed.task.labels == "yes_no"
    if not mesh.is_main:
        nothing = np.zeros(0, dtype=np.int64)
        return Predictions(nothing, nothing, probabilities)
    ids = np.arange(found.num_nodes) if found.ids is None else found.ids
    chosen = (probabilities > 0.5).astype(np.int64) if several else probabilities.argmax(axis=1)
    return Predictions(ids, chosen, probabilities)


def predict_file(
    model: Path | str,
    source: Path,
    out: Path,
    *,
    features: Path | None = None,
    device: str = "auto",
    dtype: str = "float32",
    partition: Scheme = "auto",
) -> int:
    """Write the predictions for every vertex: ``.csv`` (vertex, class, p0, ...) or ``.npz``.

    With several processes the first writes. Raises DataError if the graph cannot be read or ``out``
    cannot be written.

    Returns
    -------
    Number of vertices written by this process.
    """
    if out.suffix not in {".csv", ".npz"}:
        raise DataError(f"{out}: expected a name that ends in .csv or .npz")
    with processes(device) as mesh:
        found = predict_graph(
            *(model, source), features=features, device=device, dtype=dtype, partition=partition
        )
        if mesh.is_main:
            if out.suffix == ".npz":
                shares = found.probabilities.astype(np.float32)
                with atomic_write(out, DataError) as file:
                    np.savez_compressed(
                        file, vertex=found.ids, predicted_class=found.classes, probabilities=shares
                    )
            else:
                write_csv_atomically(out, _rows(found), DataError)
    return len(found.ids)


@contextmanager
def processes(device: str) -> Iterator[Mesh]:
    """Join the processes of torchrun; one process uses a device that was tried out."""
    if ranks_from_environment(os.environ)[1] == 1:
        yield Mesh(device=device_to_use(device))
        return
    with open_mesh(device) as mesh:
        yield mesh


@dataclass(frozen=True, eq=False)
class Opened:
    """A model and its graph, or the vertices and a source of edges of one to be partitioned."""

    model: NodeClassifier
    graph: GraphArrays
    edges: Source | None


def open_for(
    model: NodeClassifier | Path | str,
    source: GraphArrays | Path | str,
    mesh: Mesh,
    dtype: str,
    **more_files: Path | None,
) -> Opened:
    """Read a graph with the options of a model's training data; see `read_graph`.

    Raises DataError if features or classes are not those of the model.
    """
    # A given model is copied: moving it would change it for the caller.
    module = copy.deepcopy(model) if isinstance(model, NodeClassifier) else load_model(model, dtype)
    options = GraphOptions() if isinstance(model, NodeClassifier) else read_options(model)
    config, edges = module.config, None
    if mesh.world > 1:
        loops = config.self_loops
        edges, graph = open_graph(source, options, self_loops=loops, **more_files)
    elif isinstance(source, GraphArrays):
        graph = source
    else:
        graph = read_graph(source, options, **more_files)
    if not graph.num_features:
        raise DataError(f'{graph.name}: has no features; give them (`features="FILE.npy"`)')
    if graph.num_features != config.inputs:
        raise DataError(
            f"{graph.name}: has {graph.num_features} features per vertex, the model was trained on "
            f"{config.inputs}"
        )
    if graph.labels is not None and graph.num_classes > config.outputs > 1:
        raise DataError(
            f"{graph.name}: has {graph.num_classes} classes, the model knows {config.outputs}"
        )
    return Opened(module, graph, edges)


@dataclass(frozen=True, eq=False)
class Computed:
    """Predictions for a graph, or for this process's vertices of a partitioned one.

    Attributes
    ----------
    task, batch, outputs : the task, the batch of these vertices and the outputs for them
    whole : the graph if it is partitioned, else None
    """

    task: NodeTask
    batch: GraphBatch
    outputs: Mapping[str, Tensor]
    whole: DistributedGraph | None

    def own(self, values: npt.NDArray[Any]) -> Tensor:
        """Return the rows of these vertices, of an array over all."""
        if self.whole is not None:
            values = values[self.whole.vertices.cpu().numpy()]
        return torch.from_numpy(values).to(self.batch.mask.device)

    def gathered(self, name: str) -> FloatArray:
        """Return an output for all vertices, [N, _] on the first process and [0, _] elsewhere."""
        rows = self.outputs[name].double()
        if self.whole is None:
            return rows.cpu().numpy()
        # A few columns at a time: no device needs to hold all outputs of all vertices.
        width = max(GATHERED_NUMBERS // max(self.whole.num_vertices, 1), 1)
        count = self.whole.num_vertices if self.whole.mesh.is_main else 0
        found = np.empty((count, rows.shape[1]))
        for start in range(0, rows.shape[1], width):
            part = self.whole.gather(rows[:, start : start + width])
            found[:, start : start + width] = part[:count].cpu().numpy()
        return found


def run_model(opened: Opened, mesh: Mesh, dtype: str, partition: Scheme = "auto") -> Computed:
    """Run a model on one graph.

    Raises OutOfMemoryError if the graph does not fit on the device; DivergenceError if a prediction
    is not finite.
    """
    module, graph = opened.model, opened.graph
    config, place = module.config, mesh.device
    task = NodeTask(config.labels, config.outputs)
    announce(place, dtype)
    size = f"{graph.num_nodes:,} vertices with {graph.num_features:,} features"
    advice = "use float32, or more processes (torchrun), which share the graph"
    with fitting(f"{graph.name}, {size}; {advice}", place):
        if opened.edges is None:
            whole = None
            sample = sample_of(graph, config.labels)
            batch = collate_graphs([sample], np.zeros(1, np.int64), [1.0])
        else:
            parted = PartedGraph(opened.edges, graph, config, partition, str(place))
            whole, batch = parted.graph(), parted.batch(0)
        module = module.to(place, DTYPES[dtype])
        moved = batch.to(place, DTYPES[dtype])
        with in_eval_mode(module):
            outputs = dict(task.predict(module, moved))
    computed = Computed(task, moved, outputs, whole)
    probabilities = computed.outputs["probabilities"]
    bad = (~probabilities.isfinite()).any(1).nonzero()
    if len(bad):
        first = int(bad[0])
        vertex = int(computed.own(np.arange(graph.num_nodes))[first])
        vertex = vertex if graph.ids is None else int(graph.ids[vertex])
        row = probabilities[first].double().cpu().numpy()
        check_finite({"probability": row}, lambda: f"{graph.name}, vertex {vertex}")
    return computed


def _rows(found: Predictions) -> Iterator[list[Any]]:
    several = found.classes.ndim == 2
    width = found.probabilities.shape[1]
    answers = [f"answer{t}" for t in range(width)] if several else ["class"]
    yield ["vertex", *answers, *(f"p{c}" for c in range(width))]
    for vertex, answer, row in zip(found.ids, found.classes, found.probabilities, strict=True):
        yield [vertex, *np.atleast_1d(answer), *(f"{p:.6g}" for p in row)]
