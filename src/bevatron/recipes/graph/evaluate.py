"""Metrics of a trained node classifier on labelled vertices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bevatron.data.dataset import ROLES
from bevatron.data.graphs import GraphArrays
from bevatron.data.graphs.vertices import has_label
from bevatron.errors import ConfigError, DataError
from bevatron.files import check_writable, write_json_atomically
from bevatron.models.graph_attention import NodeClassifier
from bevatron.output import print_table
from bevatron.parallel.collectives import sum_over_ranks
from bevatron.parallel.mesh import Mesh
from bevatron.recipes.graph.partition import Scheme
from bevatron.recipes.graph.predict import Computed, open_for, processes, run_model
from bevatron.recipes.graph.split import TrainedSplit, with_trained_split
from bevatron.recipes.kinds import newest_model
from bevatron.typing import BoolArray

Metrics = dict[str, float]


def evaluate_graphs(
    model: NodeClassifier | Path | str,
    sources: Sequence[GraphArrays | Path | str],
    *,
    features: Path | None = None,
    labels: Path | None = None,
    splits: Path | None = None,
    device: str = "auto",
    dtype: str = "float32",
    partition: Scheme = "auto",
    out: Path | None = None,
    tell: Callable[[str], None] | None = None,
) -> dict[str, Metrics]:
    """Compute the metrics of a model on labelled graphs.

    A graph that the model was trained on keeps the split of its training, which is stored with the
    model, so that the test holds no label that was trained on. Several processes (torchrun) cut the
    graph as training does; all have the result. Raises ConfigError for no graph, or one file of
    features, labels or splits for several graphs; DataError for a graph without labels, or
    ``splits`` that test what was trained on.

    Parameters
    ----------
    model, device, dtype, partition : as for `predict_graph`
    sources : graphs or files
    features, labels, splits
        Files that belong to an edge list, if that is the only graph; see `read_graph`.
    out : also write the table to this JSON file
    tell : is given a line on the split of each graph

    Returns
    -------
    By part (``train``, ``valid``, ``test``, ``all labelled``): loss, accuracy and for yes-or-no
    questions ROC-AUC and average precision. With several graphs, prefixed by the graph's name.
    """
    if not sources:
        raise ConfigError("evaluate: expected at least one graph")
    more_files = {"features": features, "labels": labels, "splits": splits}
    given = [name for name, value in more_files.items() if value is not None]
    if given and len(sources) > 1:
        raise ConfigError(f"{given[0]}: belongs to one graph, but {len(sources)} are given")
    check_writable(out, DataError)
    table: dict[str, Metrics] = {}
    trained = None
    if not isinstance(model, NodeClassifier):
        trained = TrainedSplit.load(newest_model(Path(model)))
    with processes(device) as mesh:
        for source in sources:
            opened = open_for(model, source, mesh, dtype, **more_files)
            graph, line = with_trained_split(opened.graph, trained, splits)
            if graph.labels is None:
                raise DataError(f"{graph.name}: has no labels to compare with")
            if tell is not None and mesh.is_main:
                tell(line)
            computed = run_model(replace(opened, graph=graph), mesh, dtype, partition)
            prefix = f"{graph.name} " if len(sources) > 1 else ""
            found = _by_part(computed, graph, mesh)
            table |= {prefix + name: metrics for name, metrics in found.items()}
        if out is not None and mesh.is_main:
            write_json_atomically(out, table, DataError)
    return table


def _by_part(computed: Computed, graph: GraphArrays, mesh: Mesh) -> dict[str, Metrics]:
    """Compute the metrics of each part of a graph's labels, and of all of them."""
    assert graph.labels is not None
    known = has_label(graph.labels)
    parts: dict[str, BoolArray] = {
        role: graph.mask(role) for role in ROLES if graph.mask(role).any()
    }
    found = {}
    for name, mask in {**parts, "all labelled": known}.items():
        metrics = computed.task.metrics()
        batch = replace(computed.batch, mask=computed.own(mask & known), _copies={})
        metrics.update(batch, computed.outputs)
        if mesh.world > 1:
            metrics.load_sums(sum_over_ranks(metrics.sums(), mesh))
        found[name] = metrics.compute()
    return found


def print_metrics(table: Mapping[str, Metrics]) -> None:
    """Print metrics by split."""
    names = list(dict.fromkeys(name for metrics in table.values() for name in metrics))
    rows = [
        [part, *(f"{metrics[name]:.4f}" if name in metrics else "" for name in names)]
        for part, metrics in table.items()
    ]
    print_table(["", *names], rows)
