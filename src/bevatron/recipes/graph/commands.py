"""The commands for graphs with many vertices: each calls one function of `recipes`."""

from pathlib import Path
from typing import Literal

from bevatron.recipes.arguments import Files, Model, Out, Source, say


def evaluate_graph(
    model: Model,
    files: Files,
    features: Path | None = None,
    labels: Path | None = None,
    splits: Path | None = None,
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
        Graphs: npz, edge lists, .pt of PyTorch Geometric, folders of OGB.
    features
        .npy file for an edge list, one row per vertex.
    labels
        The same.
    splits
        .npz file with train, valid, test as masks or numbers of vertices.
    device
        cpu, cuda, cuda:N, or auto: a GPU if there is one.
    dtype
        Precision.
    out
        Also write the table to this JSON file.
    """
    from bevatron.recipes.graph.predict import evaluate_graphs, print_metrics

    beside = {"features": features, "labels": labels, "splits": splits}
    print_metrics(evaluate_graphs(model, files, **beside, device=device, dtype=dtype, out=out))


def predict_graph(
    model: Model,
    source: Source,
    out: Out,
    features: Path | None = None,
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
    features
        .npy file for an edge list, one row per vertex.
    device
        cpu, cuda, cuda:N, or auto: a GPU if there is one.
    dtype
        Precision.
    """
    from bevatron.recipes.graph.predict import predict_file

    done = predict_file(model, source, out, features=features, device=device, dtype=dtype)
    say(f"{done:,} vertices are in {out}")


def bench_graph(
    model: tuple[Literal["VA", "AGNN", "GAT"], ...] = ("GAT",),
    dataset: Literal["kronecker", "uniform", "file"] = "kronecker",
    vertices: int = 1000,
    edges: int = 10000,
    features: tuple[int, ...] = (128,),
    layers: tuple[int, ...] = (3,),
    inference: bool = False,
    repeat: int = 10,
    warmup: int = 2,
    seed: int = 42,
    file: Path | None = None,
    type: Literal["float32", "float64", "bfloat16"] = "float32",  # noqa: A002  the artifact's name
    sweep: Literal["strong", "weak"] | None = None,
    shrink: int = 1,
    partition: Literal[
        "auto", "two_dimensional", "feature_parallel", "rows", "one_and_half_d"
    ] = "auto",
    device: str = "auto",
    out: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Time attention on one graph, on this device or over all processes of torchrun.

    Parameters
    ----------
    model
        VA, AGNN, GAT; several are timed one after another.
    dataset
        kronecker, uniform (both random) or file.
    vertices
        Of a random graph.
    edges
        Asked for; of those drawn twice one is stored.
    features
        Width of all layers, or several to try.
    layers
        Number of layers, or several to try.
    inference
        Forward only; otherwise forward and backward.
    repeat
        Timed runs.
    warmup
        Runs before them.
    seed
        Of graph, features and weights.
    file
        A graph: npz, edge list, OGB.
    type
        Of the features.
    sweep
        The configurations of Besta et al. (SC 2023): strong (Figure 6) or weak (7 and 8) scaling,
        for the number of processes at hand; they set model, graph, width, layers and inference.
    shrink
        Divide the vertices of a sweep by this, and the edges by its square.
    partition
        How the graph is cut over several processes.
    device
        auto, cpu, cuda or cuda:N.
    out
        CSV file that rows are added to.
    plot
        Picture of all rows in that file.
    """
    from bevatron.recipes import graph_benchmark as bench

    base = bench.GraphCase(
        dataset=dataset,
        vertices=vertices,
        edges=edges,
        seed=seed,
        file=file,
        dtype=type,
        partition=partition,
    )
    cases = bench.chosen_cases(base, model, features, layers, inference, sweep, shrink)
    if plot is not None:
        bench.check_plot(out)
    bench.run_cases(cases, repeat=repeat, warmup=warmup, device=device, out=out, tell=say)
    if plot is not None:
        say(f"picture: {bench.draw(out, plot)}")
