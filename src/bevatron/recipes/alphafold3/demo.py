"""The part of ``bevatron demo`` on proteins: AlphaFold3 begins to memorise a small protein."""

from pathlib import Path
from typing import Any

from bevatron.data.readers.proteins import read_structure
from bevatron.output import say
from bevatron.recipes.alphafold3 import SYSTEM
from bevatron.recipes.alphafold3.evaluate import evaluate_stores
from bevatron.recipes.alphafold3.predict import PAGE, predict_files
from bevatron.recipes.alphafold3.run import AlphaFold3Run, build
from bevatron.recipes.alphafold3.stores import prepare_complexes
from bevatron.recipes.demo import Part, bundled
from bevatron.recipes.run_config import SaveModel
from bevatron.train.loop import fit

DATA, COMPONENTS, NAME = "peptide.cif.gz", "components.cif.gz", "trp-cage"

SETTINGS: dict[str, Any] = {
    "preset": "small",
    # One structure needs no deep trunk, and its method gives no resolution: no confidences.
    "model": {"cycles": 1, "pairformer": {"num_blocks": 1}, "msa": {"num_blocks": 1}},
    "stages": {
        "initial": {
            "steps": 300,
            "evaluate_every": 100,
            "step": {"copies": 12, "confidence_every": 0},
        }
    },
    "optim": {"lr": 4e-3, "ema": 0.98},
    "schedule": {"warmup_steps": 20},
    "checkpoint": {"every_steps": 100},
    "train": {"device": "cpu", "threads": 1, "log_every": 25},
}
"""Settings of the demo that differ from the defaults."""

STEPS = 50
"""Steps of the sampling."""


def run_demo(out: Path) -> Part:
    """Train on the bundled structure, compare it with predictions, predict from the sequence.

    Raises MissingPackageError without gemmi or RDKit.

    Parameters
    ----------
    out : the demo's folder; a run in it is resumed
    """
    say("train a small AlphaFold3 on one structure, the Trp-cage of 20 residues")
    folder, source = out / "proteins", bundled(DATA, out)
    components, store = str(bundled(COMPONENTS, out)), out / "proteins" / "store"
    prepare_complexes([source], store, components=components, workers=1)
    config = AlphaFold3Run.from_values(
        {**SETTINGS, "output": str(folder), "data": {"train": [str(store)]}}
    )
    run = build(config, resume=True)
    untrained = folder / "untrained"
    SaveModel(SYSTEM.kind, config.model)(untrained, run.model.state_dict())
    before = _lddt(untrained, store)
    result = fit(run)
    if result.stopped_by is not None:
        return Part(exit_code=result.exit_code)
    say("predict it from its sequence")
    text = folder / f"{NAME}.fasta"
    text.write_text(f">{NAME}|protein\n{read_structure(source).sequence(0)}\n")
    predict_files(folder, text, folder, samples=1, steps=STEPS, device="cpu", components=components)
    return Part(
        f"lDDT of its protein {before:.2f} untrained, {_lddt(folder, store):.2f} now (best: 1)",
        (
            ("proteins/report.html", "learning curves"),
            (f"proteins/{NAME}/{PAGE}", "the predicted structure, to turn in a browser"),
        ),
    )


def _lddt(model: Path, store: Path) -> float:
    found = evaluate_stores(model, [store], steps=STEPS, device="cpu")
    return float(found["mean"]["lddt"]["value"])
