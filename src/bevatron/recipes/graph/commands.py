"""The commands for graphs: typed arguments, each calls one function."""

from pathlib import Path
from typing import Literal

from bevatron.output import Result, say
from bevatron.recipes.arguments import Files, Model, Out, Source


def evaluate(
    model: Model,
    files: Files,
    features: Path | None = None,
    labels: Path | None = None,
    splits: Path | None = None,
    device: str = "auto",
    dtype: Literal["float64", "float32"] = "float32",
    partition: Literal["auto", "2d", "feature", "rows"] = "auto",
    out: Path | None = None,
) -> Result:
    """Print loss, accuracy and ROC-AUC of a node classifier on labelled vertices, by split.

    A graph that the model was trained on keeps the split used in training.

    Parameters
    ----------
    model
        A run or a model folder.
    files
        Graphs: npz, edge lists, .pt of PyTorch Geometric, folders of OGB.
    features
        .npy file of features for an edge list, one row per vertex.
    labels
        .npy file of labels, likewise.
    splits
        .npz file with train, valid, test as masks or indices of vertices.
    device
        cpu, cuda, cuda:N, or auto (a GPU if there is one).
    dtype
        Precision.
    partition
        How the processes of torchrun cut a graph, as in training.
    out
        Also write the table to this JSON file.

    Examples
    --------
    bevatron evaluate runs/cora cora.npz
    bevatron evaluate runs/cora edges.txt --features x.npy --labels y.npy --json
    """
    from bevatron.recipes.graph.evaluate import evaluate_graphs, print_metrics

    files_of_edge_list = {"features": features, "labels": labels, "splits": splits}
    table = evaluate_graphs(
        model,
        files,
        **files_of_edge_list,
        device=device,
        dtype=dtype,
        partition=partition,
        out=out,
        tell=say,
    )
    return Result(table, lambda: print_metrics(table))


def predict(
    model: Model,
    source: Source,
    out: Out,
    features: Path | None = None,
    device: str = "auto",
    dtype: Literal["float64", "float32"] = "float32",
    partition: Literal["auto", "2d", "feature", "rows"] = "auto",
) -> Result:
    """Write class and probabilities of every vertex, in the order of the file.

    Parameters
    ----------
    model
        A run or a model folder.
    source
        A graph; read with the options of the model's training data.
    out
        NAME.csv (vertex, class, p0, p1, ...) or NAME.npz.
    features
        .npy file of features for an edge list, one row per vertex.
    device
        cpu, cuda, cuda:N, or auto (a GPU if there is one).
    dtype
        Precision.
    partition
        How the processes of torchrun cut the graph, as in training.

    Examples
    --------
    bevatron predict runs/cora cora.npz classes.csv
    """
    from bevatron.recipes.graph.predict import predict_file

    done = predict_file(
        model, source, out, features=features, device=device, dtype=dtype, partition=partition
    )
    values = {"vertices": done, "out": out}
    return Result(values, lambda: say(f"{done:,} vertices are in {out}"))
