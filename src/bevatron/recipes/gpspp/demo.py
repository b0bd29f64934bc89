"""The part of ``bevatron demo`` on molecules: a small GPS++ from SMILES, in 2D and 3D."""

from pathlib import Path
from typing import Any

from bevatron.models.gpspp.features import canonical
from bevatron.output import say
from bevatron.recipes.demo import Part, bundled
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
"""Settings of the demo that differ from the defaults."""

UNKNOWN = "smiles\nCCO\nc1ccccc1O\nnot a molecule\nCC(=O)Nc1ccc(O)cc1\nC\n"
"""Input of predict: one is not a molecule, one is larger than all in training."""


def run_demo(out: Path) -> Part:
    """Train on bundled molecules, compute the errors in 2D and 3D, predict from SMILES.

    Raises MissingPackageError without RDKit.

    Parameters
    ----------
    out : the demo's folder; a run in it is resumed
    """
    canonical("C")  # before any work is done: refused without RDKit
    folder = out / "molecules"
    values = {**SETTINGS, "output": str(folder)}
    values["data"] = {**SETTINGS["data"], "train": [str(bundled(DATA, out))]}
    config = GpsppRun.from_values(values)
    say("train a small GPS++ on 400 SMILES with HOMO-LUMO gaps of GFN2-xTB")
    result = fit(build(config, resume=True))
    if result.stopped_by is not None:
        return Part(exit_code=result.exit_code)
    table = folder / "unknown.csv"
    table.write_text(UNKNOWN)
    predict_file(MoleculePredictor(folder), table, folder / "predicted.csv")
    say("predict from SMILES alone, of molecules larger than those in training too:")
    say(*(f"   {line}" for line in (folder / "predicted.csv").read_text().splitlines()))
    return Part(
        _learned(config),
        (
            ("molecules/report.html", "learning curves, parity plots, errors"),
            ("molecules/predicted.csv", "gaps predicted from SMILES"),
        ),
    )


def _learned(config: GpsppRun) -> str:
    """Return the errors on the test molecules, in both modes, in one line."""
    data = load_molecules(config.data, config.output / "prepared")
    assert data.test is not None
    found = evaluate_molecules(trained_model(config.output), data.test, ("2d", "3d")).metrics
    labels = labels_of(data.test)
    guess = abs(labels - labels_of(data.train).mean()).mean()
    return (
        f"gaps to {found['gap_mae']:.2f} eV in 2D, {found['3d/gap_mae']:.2f} eV in 3D "
        f"(MAE; by guessing: {guess:.2f} eV)"
    )
