"""The part of ``bevatron demo`` on graphs: GAT learns communities from a few labels."""

from pathlib import Path
from typing import Any

from bevatron.output import say
from bevatron.recipes.demo import Part, bundled
from bevatron.recipes.graph.evaluate import evaluate_graphs, print_metrics
from bevatron.recipes.graph.predict import predict_file
from bevatron.recipes.graph.run import GraphRun, build
from bevatron.train.loop import fit

DATA = "communities.npz"

SETTINGS: dict[str, Any] = {
    "data": {"read": {"features": "rows"}},
    "train": {"epochs": 80, "patience": 40, "device": "cpu", "threads": 1, "log_every": 10},
    "optim": {"lr": 0.02},
}
"""Settings of the demo that differ from the defaults (GAT of two layers, 8 heads of 8)."""


def run_demo(out: Path) -> Part:
    """Train GAT on a bundled graph and classify all vertices.

    Parameters
    ----------
    out : the demo's folder; a run in it is resumed
    """
    folder, source = out / "graph", bundled(DATA, out)
    values = {**SETTINGS, "output": str(folder)}
    values["data"] = {**SETTINGS["data"], "train": [str(source)]}
    say("train GAT on 1,500 vertices in 5 communities, 20 labels of each")
    result = fit(build(GraphRun.from_values(values), resume=True))
    if result.stopped_by is not None:
        return Part(exit_code=result.exit_code)
    table = evaluate_graphs(folder, [source], tell=say)
    print_metrics(table)
    predict_file(folder, source, folder / "classes.csv")
    return Part(
        f"the community of {100 * table['test']['accuracy']:.0f} % of the test vertices "
        "(guessing: 20 %)",
        (
            ("graph/report.html", "learning curves, accuracy, confusion matrix"),
            ("graph/classes.csv", "class and probabilities of every vertex"),
        ),
    )
