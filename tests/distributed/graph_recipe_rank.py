"""What a rank does in the test of the recipe: ``torchrun graph_recipe_rank.py FOLDER``."""

import sys
from pathlib import Path

from bevatron.parallel.mesh import open_mesh
from bevatron.recipes.graph.run import GraphRun, build
from bevatron.train.loop import fit

LAYERS = {"2d": "gat", "feature": "gat", "rows": "agnn", "2d weighted": "gat"}
"""Partition, and whether edges have weights -> a layer to try it with."""


def graph_of(name, folder):
    """The file of a case."""
    return folder / ("weighted.npz" if name.endswith("weighted") else "plain.npz")


def run(name, graphs, folder):
    """Train a few epochs in float64, without dropout."""
    config = GraphRun.from_values({
        "data": {"train": [str(graph_of(name, graphs))]}, "output": str(folder / name),
        "partition": name.split()[0],
        "model": {"layer": LAYERS[name], "hidden": 4, "heads": 2, "dropout": 0.0,
                  "attention_dropout": 0.0},
        "train": {"epochs": 20, "evaluate_every": 5, "dtype": "float64", "device": "cpu",
                  "threads": 1},
        "report": name == "2d",
    })  # fmt: skip
    return fit(build(config))


if __name__ == "__main__":
    with open_mesh("cpu", 60):
        for name in LAYERS:
            run(name, Path(sys.argv[1]), Path(sys.argv[1]) / "several")
