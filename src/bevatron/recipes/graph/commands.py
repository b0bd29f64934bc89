"""The commands for graphs: typed arguments, each calls one function."""

from pathlib import Path
from typing import Annotated, Literal

from bevatron.output import Result, say
from bevatron.recipes.arguments import Device, Dtype, Files, Model, Out, Source, TableFile, option

Features = Annotated[
    Path | None, option(".npy file of features for an edge list, one row per vertex.")
]
Partition = Annotated[
    Literal["auto", "2d", "feature", "rows"],
    option("How the processes of torchrun cut a graph, as in training."),
]


def evaluate(
    model: Model,
    files: Files,
    features: Features = None,
    labels: Path | None = None,
    splits: Path | None = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    partition: Partition = "auto",
    out: TableFile = None,
) -> Result:
    """Print loss, accuracy and ROC-AUC of a node classifier on labelled vertices, by split.

    A graph that the model was trained on keeps the split used in training.

    Parameters
    ----------
    files : graphs in npz, edge lists, .pt of PyTorch Geometric, or folders of OGB
    labels : .npy file of labels, likewise
    splits : .npz file with train, valid, test as masks or indices of vertices

    Examples
    --------
    bevatron evaluate runs/cora cora.npz
    bevatron evaluate runs/cora edges.txt --features x.npy --labels y.npy --json
    """
    from bevatron.recipes.graph.evaluate import evaluate_graphs, print_metrics

    table = evaluate_graphs(
        *(model, files), features=features, labels=labels, splits=splits,
        device=device, dtype=dtype, partition=partition, out=out, tell=say,
    )  # fmt: skip
    return Result(table, lambda: print_metrics(table))


def predict(
    model: Model,
    source: Source,
    out: Out,
    features: Features = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    partition: Partition = "auto",
) -> Result:
    """Write class and probabilities of every vertex, in the order of the file.

    Parameters
    ----------
    source : a graph; read with the options of the model's training data
    out : NAME.csv (vertex, class, p0, p1, ...) or NAME.npz

    Examples
    --------
    bevatron predict runs/cora cora.npz classes.csv
    """
    from bevatron.recipes.graph.predict import predict_file

    done = predict_file(
        model, source, out, features=features, device=device, dtype=dtype, partition=partition
    )
    values = {"vertices": done, "out": out}
    return Result(values, lambda: say(f"{done:,} vertices in {out}"))
