"""The commands for graphs with many vertices: each calls one function of `recipes`."""

from pathlib import Path
from typing import Literal

from bevatron.cli.words import Files, Model, Out, Source, say


def evaluate_graph(
    model: Model,
    files: Files,
    device: str = "cpu",
    dtype: Literal["float64", "float32"] = "float32",
    out: Path | None = None,
) -> None:
    """Print loss, accuracy and ROC-AUC of a model of graphs on labelled vertices, by part.

    Parameters
    ----------
    model
        A run or a model folder.
    files
        Graphs: npz, edge lists with what stands beside, .pt of PyTorch Geometric, folders of OGB.
    device
        cpu, cuda or cuda:N.
    dtype
        Precision.
    out
        Also write the table to this JSON file.
    """
    from bevatron.recipes.graph_use import evaluate_graphs, print_metrics

    print_metrics(evaluate_graphs(model, files, device=device, dtype=dtype, out=out))


def predict_graph(
    model: Model,
    source: Source,
    out: Out,
    device: str = "cpu",
    dtype: Literal["float64", "float32"] = "float32",
) -> None:
    """Write class and probabilities of every vertex of a graph, in the order of the file.

    Parameters
    ----------
    model
        A run or a model folder.
    source
        A graph, read as those that the model was trained on.
    out
        NAME.csv (vertex, class, p0, p1, ...) or NAME.npz.
    device
        cpu, cuda or cuda:N.
    dtype
        Precision.
    """
    from bevatron.recipes.graph_use import predict_file

    done = predict_file(model, source, out, device=device, dtype=dtype)
    say(f"{done:,} vertices are in {out}")
