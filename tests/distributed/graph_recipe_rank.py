"""What a rank does in the tests of the recipe."""

from bevatron import cli
from bevatron.errors import BevatronError
from bevatron.recipes.graph.run import GraphRun, build
from bevatron.train.loop import fit

LAYERS = {"2d": "gat", "feature": "gat", "rows": "agnn", "2d weighted": "gat"} | {
    f"auto {layer}": layer
    for layer in ("gatv2", "agnn_paper", "va", "va_scaled", "va_softmax", "gcn", "sgc", "gin")
} | {"auto weighted": "gcn"}  # fmt: skip
"""Partition, and whether edges have weights -> a layer to try it with."""

DROPPED = {"2d": "gat", "rows": "gatv2"}
"""Partition -> a layer whose attention dropout is tried."""


def graph_of(name, folder):
    """The file of a case."""
    return folder / ("weighted.npz" if name.endswith("weighted") else "plain.npz")


def run(name, graphs, folder):
    """Train in float64, without dropout: 20 epochs, or a few where only the layer is new."""
    epochs = 4 if name.startswith("auto") else 20
    config = GraphRun.from_values({
        "data": {"train": [str(graph_of(name, graphs))]}, "output": str(folder / name),
        "partition": name.split()[0],
        "model": {"layer": LAYERS[name], "hidden": 4, "heads": 2, "dropout": 0.0,
                  "attention_dropout": 0.0},
        "train": {"epochs": epochs, "evaluate_every": epochs // 4, "dtype": "float64",
                  "device": "cpu", "threads": 1},
        "report": name == "2d",
    })  # fmt: skip
    return fit(build(config))


def run_dropped(partition, graphs, folder, epochs, *, resume=False):
    """Train with dropout of features and attention."""
    config = GraphRun.from_values({
        "data": {"train": [str(graphs / "plain.npz")]}, "output": str(folder / partition),
        "partition": partition, "report": False,
        "model": {"layer": DROPPED[partition], "hidden": 4, "heads": 2, "dropout": 0.2,
                  "attention_dropout": 0.4},
        "train": {"epochs": epochs, "dtype": "float64", "device": "cpu", "threads": 1},
    })  # fmt: skip
    return fit(build(config, resume=resume))


def train(folder):
    """Train every case."""
    for name in LAYERS:
        run(name, folder, folder / "several")


def resume(folder):
    """Train at once, and with a break."""
    for partition in DROPPED:
        run_dropped(partition, folder, folder / "whole", 6)
        run_dropped(partition, folder, folder / "resumed", 3)
        run_dropped(partition, folder, folder / "resumed", 6, resume=True)


def use(folder):
    """Evaluate and predict as on the command line, each by all ranks."""
    run, out = str(folder / "run"), folder / "cut"
    common = ["--device", "cpu", "--dtype", "float64"]
    for name in ("plain.npz", "packed.pt"):
        table, classes = str(out / f"{name}.json"), str(out / f"{name}.csv")
        words = ["evaluate", run, str(folder / name), "--out", table, *common]
        assert cli.main(words) == 0
        words = ["predict", run, str(folder / name), classes, *common]
        assert cli.main(words) == 0


def refuse(folder):
    """Return what this rank says of data that only some ranks see to be wrong."""
    said = []
    for name in ("twice.npz", "few.npz"):
        values = {"data": {"train": [str(folder / name)]}, "output": str(folder / "r"),
                  "partition": "2d", "train": {"device": "cpu", "epochs": 1}}  # fmt: skip
        try:
            build(GraphRun.from_values(values)).train[0].batch()
            said.append("")
        except BevatronError as error:
            said.append(str(error))
    return said
