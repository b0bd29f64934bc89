"""Metrics of a trained node classifier on labelled vertices."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bevatron.data.graphs import ROLES, GraphArrays
from bevatron.data.graphs.vertices import has_label
from bevatron.errors import ConfigError, DataError
from bevatron.files import write_json_atomically
from bevatron.models.graph_attention import NodeClassifier
from bevatron.output import print_table
from bevatron.recipes.graph.predict import graph_for, run_model

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
    out: Path | None = None,
) -> dict[str, Metrics]:
    """Compute the metrics of a model on labelled graphs.

    Parameters
    ----------
    model, device, dtype
        As for `predict_graph`.
    sources
        Graphs or files.
    features, labels, splits
        Files that belong to an edge list, if that is the only graph; see `read_graph`.
    out
        Also write the table to this JSON file.

    Returns
    -------
    By part (``train``, ``valid``, ``test``, ``all labelled``): loss, accuracy and for yes-or-no
    questions ROC-AUC and average precision. With several graphs, prefixed by the graph's name.

    Raises
    ------
    ConfigError
        For no graph, or one file of features, labels or splits for several graphs.
    DataError
        For a graph without labels.
    """
    if not sources:
        raise ConfigError("evaluate: expected at least one graph")
    more_files = {"features": features, "labels": labels, "splits": splits}
    given = [name for name, value in more_files.items() if value is not None]
    if given and len(sources) > 1:
        raise ConfigError(f"{given[0]}: belongs to one graph, but {len(sources)} are given")
    table: dict[str, Metrics] = {}
    for source in sources:
        graph = graph_for(model, source, **more_files)
        if graph.labels is None:
            raise DataError(f"{graph.name}: has no labels to compare with")
        task, batch, outputs = run_model(model, graph, device, dtype)
        known = has_label(graph.labels)
        parts = {role: graph.mask(role) for role in ROLES if graph.mask(role).any()}
        prefix = f"{graph.name} " if len(sources) > 1 else ""
        for name, mask in {**parts, "all labelled": known}.items():
            metrics = task.metrics()
            chosen = torch.from_numpy(mask & known).to(batch.mask.device)
            metrics.update(replace(batch, mask=chosen, _copies={}), outputs)
            table[prefix + name] = metrics.compute()
    if out is not None:
        write_json_atomically(out, table, DataError)
    return table


def print_metrics(table: Mapping[str, Metrics]) -> None:
    """Print metrics by split."""
    names = list(dict.fromkeys(name for metrics in table.values() for name in metrics))
    rows = [
        [part, *(f"{metrics[name]:.4f}" if name in metrics else "" for name in names)]
        for part, metrics in table.items()
    ]
    print_table(["", *names], rows)
