"""Structures of complexes in files: ranked mmCIF, scores, aligned errors and a page of each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.proteins.mmcif import format_mmcif
from bevatron.data.proteins.predicted import predicted_structure
from bevatron.data.readers.proteins import open_components, read_inputs
from bevatron.data.readers.proteins.components import INSTALLED
from bevatron.errors import DataError
from bevatron.files import atomic_write, make_writable, write_json_atomically, write_text_atomically
from bevatron.models.alphafold3.predict import Predicted, check_numbers, ranked
from bevatron.output import note, number
from bevatron.recipes.alphafold3.inputs import Prepared, prepared_input
from bevatron.recipes.alphafold3.pages import write_page
from bevatron.recipes.alphafold3.predictor import ComplexPredictor
from bevatron.recipes.devices import fitting
from bevatron.recipes.forward_progress import forward_progress
from bevatron.recipes.proteins.figures import untrained
from bevatron.recipes.proteins.inputs import check_seeds, file_names

SCORES, ERRORS, PAGE = "scores.json", "pae.npz", "report.html"


def predict_files(
    model: str | Path | ComplexPredictor,
    source: Path,
    out: Path,
    *,
    samples: int = 5,
    seeds: Sequence[int] = (),
    steps: int = 200,
    device: str = "auto",
    components: str = INSTALLED,
    searches: Sequence[Path] = (),
) -> dict[str, Any]:
    """Predict the complexes of a file; each gets a folder, ``OUT/NAME``.

    In it ``rank1.cif`` and so on with pLDDT as B-factors, ``scores.json``, ``pae.npz`` (aligned
    errors of the best, Å, and the probabilities of its contacts) and ``report.html``; they replace
    those of an earlier prediction. Raises DataError, CheckpointError or ConfigError if the file,
    the model or a setting cannot be used.

    Parameters
    ----------
    model : a run, a model folder, or what was loaded of one
    source : see `bevatron.data.readers.proteins.inputs.read_inputs`
    samples : structures of each seed
    seeds : seeds of the random numbers; none: those that the file names, else 0
    steps : steps of the sampling
    device : cpu, cuda, cuda:N or auto; for a model that is not loaded yet
    components : the chemical component dictionary: a file, or ``biotite``
    searches : files or folders of alignments, template hits, and the structures that they name

    Returns
    -------
    ``complexes``: of each ``name``, ``folder``, ``best`` (its mmCIF file) and ``structures``, the
    rows of ``scores.json``.
    """
    check_numbers(samples=samples, steps=steps)
    check_seeds(seeds, "seeds")
    given = read_inputs(source)
    for one in given:
        check_seeds(one.seeds, f"{one.where}, seeds")
    folders = [out / name for name in file_names([each.name for each in given])]
    dictionary = open_components(components)
    predictor = model if isinstance(model, ComplexPredictor) else ComplexPredictor(model, device)
    rows = []
    for one, folder in zip(given, folders, strict=True):
        if one.ignored:
            note(f"note: {one.name}: not used here: {', '.join(one.ignored)}")
        with prepared_input(one, dictionary, searches) as prepared:
            make_writable(folder, DataError)
            found = []
            size = f"{one.name}, {len(prepared.entry['restype']):,} tokens"
            stages = predictor.stages(samples, steps)
            for seed in seeds or one.seeds or (0,):
                with fitting(size, predictor.device), forward_progress(size, stages):
                    found += predictor.predict(prepared.sample(seed), samples, steps)
            rows.append({"name": one.name, **_write(folder, prepared, ranked(found))})
    return {"complexes": rows}


def _write(folder: Path, prepared: Prepared, found: Sequence[Predicted]) -> dict[str, Any]:
    rows, texts = [], []
    for rank, each in enumerate(found, start=1):
        structure = predicted_structure(
            prepared.entry, prepared.components, each.position, each.plddt
        )
        notes = {k: number(v) for k, v in each.scores.items() if not isinstance(v, list | None)}
        texts.append(format_mmcif(structure, notes))
        file = f"rank{rank}.cif"
        write_text_atomically(folder / file, texts[-1], DataError)
        rows.append({"file": file, "seed": each.seed, "sample": each.number, **each.scores})
    write_json_atomically(folder / SCORES, rows, DataError)
    written = {row["file"] for row in rows}
    for earlier in folder.glob("rank*.cif"):  # of more structures than these
        if earlier.name not in written:
            earlier.unlink()
    best = found[0]
    if untrained(best.plddt):
        note(f"note: {folder.name}: pLDDT is meaningless, its head was not trained")
    with atomic_write(folder / ERRORS, DataError) as stream:
        np.savez_compressed(stream, pae=best.pae, contacts=best.contacts)
    write_page(folder / PAGE, prepared.entry, best, rows, texts[0])
    return {"folder": str(folder), "best": str(folder / "rank1.cif"), "structures": rows}
