"""The part of `bevatron demo` on graphs: attention learns communities, and its time is measured."""

from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from bevatron.recipes.graph.predict import evaluate_graphs, predict_file, print_metrics
from bevatron.recipes.graph.run import GraphRun, build
from bevatron.recipes.graph_benchmark import MODELS, GraphCase, run_cases
from bevatron.recipes.graph_benchmark_plots import plot_times
from bevatron.train.loop import fit

DATA = "communities.npz"

SETTINGS: dict[str, Any] = {
    "data": {"read": {"features": "rows"}},
    "train": {"epochs": 80, "patience": 40, "device": "cpu", "threads": 1, "log_every": 10},
    "optim": {"lr": 0.02},
}
"""What the demonstration changes of the defaults (GAT of two layers, 8 heads of 8)."""


def graph_demo(out: Path) -> int:
    """Train GAT on a bundled graph, classify all vertices, time attention on random graphs.

    Parameters
    ----------
    out
        Folder for everything; a run that is there goes on.

    Returns
    -------
    The exit code: 0, or that of a training which was stopped.
    """
    with as_file(files("bevatron.recipes") / "demo_data" / DATA) as source:
        values = {**SETTINGS, "output": str(out / "graph")}
        values["data"] = {**SETTINGS["data"], "train": [str(source)]}
        _say("graph: training GAT on 1,500 vertices in 5 communities, 20 labels of each")
        result = fit(build(GraphRun.from_values(values), resume=True))
        if result.stopped_by is not None:
            _say("stopped; `bevatron demo` again goes on")
            return result.exit_code
        print_metrics(evaluate_graphs(out / "graph", [source]))
        predict_file(out / "graph", source, out / "graph" / "classes.csv")
    _say("graph: attention on Kronecker graphs, three layers, forward and backward")
    table = out / "graph" / "times.csv"
    table.unlink(missing_ok=True)
    cases = [
        GraphCase(model=model, vertices=2**scale, edges=16 * 2**scale, features=16)
        for scale in (10, 12)
        for model in MODELS
    ]
    run_cases(cases, repeat=5, warmup=1, device="cpu", out=table, tell=_say)
    plot_times(table, out / "graph" / "times.png")
    _say(f"graph: report.html, classes.csv and times.csv are in {out / 'graph'}")
    return 0


def _say(*lines: str) -> None:
    print(*lines, sep="\n")  # noqa: T201
