"""The part of `bevatron demo` on molecules: a small GPS++ from SMILES, seen in 2D and in 3D."""

from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from bevatron.errors import MissingPackageError
from bevatron.models.gpspp.features import canonical
from bevatron.recipes.gpspp.data import load_molecules
from bevatron.recipes.gpspp.finetune import trained_model
from bevatron.recipes.gpspp.predict import predict_file
from bevatron.recipes.gpspp.predictor import MoleculePredictor
from bevatron.recipes.gpspp.report import evaluate_molecules
from bevatron.recipes.gpspp.run import GpsppRun, build
from bevatron.recipes.gpspp.targets import labels_of
from bevatron.train.loop import fit

DATA = "molecules.csv.gz"

SETTINGS: dict[str, Any] = {
    "model": {
        "num_layers": 2, "node_width": 64, "edge_width": 32, "global_width": 16, "num_heads": 8,
        "ffn_width": 64, "expansion": 2, "embedding_width": 16, "num_kernels": 32,
        "dropout": {"node": 0.1, "attention": 0.1, "graph": 0.1, "global_": 0.1, "encoder": 0.1},
    },
    "data": {"valid_size": 50, "test_size": 50, "prepare_workers": 1},
    "targets": {"units": {"gap": "eV"}},
    "loss": {"node_weight": 0.3, "edge_weight": 0.3},
    "optim": {"lr": 2e-3, "ema": 0.98},
    "molecules": 32,
    "train": {"epochs": 45, "device": "cpu", "threads": 1, "log_every": 10, "evaluate_every": 3},
    "checkpoint": {"every_epochs": 15},
}  # fmt: skip
"""What the demonstration changes of the defaults."""

UNKNOWN = "smiles\nCCO\nc1ccccc1O\nnot a molecule\nCC(=O)Nc1ccc(O)cc1\nC\n"
"""Molecules to predict: one is none, one is larger than all that were trained on."""


def gpspp_demo(out: Path) -> int:
    """Train on bundled molecules, tell the errors in 2D and 3D, predict from SMILES.

    Parameters
    ----------
    out
        Folder for everything; a run that is there goes on.

    Returns
    -------
    The exit code: 0, or that of a training which was stopped.
    """
    folder = out / "molecules"
    try:
        canonical("C")
    except MissingPackageError:
        _say('molecules: left out, RDKit is not installed (pip install "bevatron[molecules]")')
        return 0
    with as_file(files("bevatron.recipes") / "demo_data" / DATA) as source:
        values = {**SETTINGS, "output": str(folder)}
        values["data"] = {**SETTINGS["data"], "train": [str(source)]}
        config = GpsppRun.from_values(values)
        _say("molecules: training a small GPS++ on 400 SMILES with gaps of GFN2-xTB")
        result = fit(build(config, resume=True))
        if result.stopped_by is not None:
            _say("stopped; `bevatron demo` again goes on")
            return result.exit_code
        _say(_errors(config))
    table = folder / "unknown.csv"
    table.write_text(UNKNOWN)
    predict_file(MoleculePredictor(folder), table, folder / "predicted.csv")
    _say("molecules: from SMILES alone, larger ones than in training too:")
    _say(*(f"   {line}" for line in (folder / "predicted.csv").read_text().splitlines()))
    _say(f"molecules: report.html and predicted.csv are in {folder}")
    return 0


def _errors(config: GpsppRun) -> str:
    """Say how large the errors on the test molecules are, in both modes."""
    data = load_molecules(config.data, config.output / "prepared")
    assert data.test is not None
    found = evaluate_molecules(trained_model(config.output), data.test, ("2d", "3d")).metrics
    labels = labels_of(data.test)
    guess = abs(labels - labels_of(data.train).mean()).mean()
    return (
        f"molecules: error on {len(data.test)} others: {found['gap_mae']:.2f} eV in 2D, "
        f"{found['3d/gap_mae']:.2f} eV in 3D (guessing the mean: {guess:.2f} eV)"
    )


def _say(*lines: str) -> None:
    print(*lines, sep="\n")  # noqa: T201
