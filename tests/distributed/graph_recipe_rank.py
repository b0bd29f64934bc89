"""What a rank does in the test of the recipe: ``torchrun graph_recipe_rank.py FILE FOLDER``."""

import sys
from pathlib import Path

from bevatron.parallel.mesh import open_mesh
from bevatron.recipes.graph import GraphRun, build
from bevatron.train.loop import fit

LAYERS = {"2d": "gat", "feature": "gat", "rows": "agnn"}
"""Partition -> a layer to try it with."""


def run(file, folder, scheme):
    """Train a few epochs in float64, without dropout."""
    config = GraphRun.from_values({
        "data": {"train": [str(file)]}, "output": str(folder / scheme), "partition": scheme,
        "model": {"layer": LAYERS[scheme], "hidden": 4, "heads": 2, "dropout": 0.0,
                  "attention_dropout": 0.0},
        "train": {"epochs": 20, "evaluate_every": 5, "dtype": "float64", "device": "cpu",
                  "threads": 1},
        "report": scheme == "2d",
    })  # fmt: skip
    return fit(build(config))


if __name__ == "__main__":
    with open_mesh("cpu", 60):
        for name in LAYERS:
            run(Path(sys.argv[1]), Path(sys.argv[2]), name)
