"""Structures of chains in files: mmCIF and PDB with pLDDT and a page of each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.proteins.chain_index import UNKNOWN_DAY
from bevatron.data.proteins.chains import residue_types
from bevatron.data.proteins.constants import UNKNOWN
from bevatron.data.proteins.mmcif import format_mmcif, format_pdb
from bevatron.data.proteins.templates import NUM_TEMPLATES
from bevatron.data.readers.proteins import read_inputs
from bevatron.data.readers.proteins.alphabet import sequence_classes
from bevatron.data.readers.proteins.inputs import Complex, Entity
from bevatron.errors import DataError
from bevatron.files import atomic_write, make_writable, write_text_atomically
from bevatron.models.alphafold2.predict import PredictedChain
from bevatron.models.common.folding.metrics import MAX_ERROR
from bevatron.output import note
from bevatron.recipes.alphafold2.data import alignment_of, templates_of
from bevatron.recipes.alphafold2.predictor import ChainPredictor, structure_of
from bevatron.recipes.devices import fitting
from bevatron.recipes.forward_progress import forward_progress
from bevatron.recipes.proteins.figures import NO_CONFIDENCES, map_figure, plddt_figure, untrained
from bevatron.recipes.proteins.inputs import Known, check_seeds, file_names, known_of
from bevatron.train.report.page import Report
from bevatron.typing import Arrays


def predict_files(
    model: str | Path | ChainPredictor,
    source: Path,
    out: Path,
    *,
    seed: int = 0,
    device: str = "auto",
    searches: Sequence[Path] = (),
) -> dict[str, Any]:
    """Predict the protein chains of a file; each gets files of its name in a folder.

    ``NAME.cif`` and ``NAME.pdb`` are the structure, ``NAME.html`` shows it. A model with a head for
    the aligned error also gives ``NAME-pae.npz``, errors in Å. Raises DataError, CheckpointError or
    ConfigError if the file holds no protein, or an input cannot be used.

    Parameters
    ----------
    model : a run, a model folder, or what was loaded of one
    source
        See `bevatron.data.readers.proteins.inputs.read_inputs`: FASTA, or a JSON or YAML that also
        names alignments and templates. Equal chains are predicted once.
    seed : seed of the rows that are drawn
    device : cpu, cuda, cuda:N or auto; for a model that is not loaded yet
    searches : files or folders of alignments, template hits, and the structures that they name

    Returns
    -------
    ``chains``: of each ``name``, ``description`` in the input, ``file``, ``plddt`` (the mean),
    ``ptm`` or None, ``rows`` of its alignment and ``templates``.
    """
    check_seeds([seed], "seed")
    given = read_inputs(source)
    proteins = [[each for each in one.entities if each.kind == "protein"] for one in given]
    if not any(proteins):
        raise DataError(f"{source}: holds no protein, of which AlphaFold2 predicts structures")
    make_writable(out, DataError)
    predictor = model if isinstance(model, ChainPredictor) else ChainPredictor(model, device)
    named = zip(given, proteins, strict=True)
    names = iter(file_names([f"{one.name}_{each.chains[0]}" for one, own in named for each in own]))
    rows = []
    for each, own in zip(given, proteins, strict=True):
        if others := [e.chains[0] for e in each.entities if e.kind != "protein"]:
            note(f"note: {each.name}: only proteins are predicted, not {', '.join(others)}")
        _note_what_is_left_out(each, own)
        with known_of(each, searches) as known:
            rows += [_predict_chain(predictor, next(names), e, known, seed, out) for e in own]
    return {"chains": rows}


def _note_what_is_left_out(given: Complex, proteins: Sequence[Entity]) -> None:
    unused = [*given.ignored, *(["bonds"] if given.bonds else [])]
    unused += [f"modifications of chain {e.chains[0]}" for e in proteins if e.modifications]
    if unused:
        note(f"note: {given.name}: not used here: {', '.join(unused)}")
    for entity in proteins:
        unknown = np.flatnonzero(residue_types(entity.sequence) == UNKNOWN).tolist()
        if unknown:
            named = ", ".join(f"{entity.sequence[i]}{i + 1}" for i in unknown[:5])
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            note(
                f"note: {given.name}, chain {entity.chains[0]}: AlphaFold2 has no atoms of "
                f"{named}{more}, only the 20 amino acids"
            )


def _predict_chain(
    predictor: ChainPredictor, name: str, entity: Entity, known: Known, seed: int, out: Path
) -> dict[str, Any]:
    chain = chain_to_predict(entity)
    alignment = alignment_of(chain["query"], known.alignments)
    templates = templates_of(chain["query"], known.templates, UNKNOWN_DAY)
    size = f"{name}, {len(chain['query']):,} residues"
    with fitting(size, predictor.device), forward_progress(size, predictor.stages):
        found = predictor.predict({**chain, **templates}, alignment, seed)
    mmcif = format_mmcif(structure_of(name, chain, entity.chains[0], found))
    write_text_atomically(out / f"{name}.cif", mmcif, DataError)
    write_text_atomically(out / f"{name}.pdb", format_pdb(mmcif), DataError)
    if found.pae is not None:
        with atomic_write(out / f"{name}-pae.npz", DataError) as stream:
            np.savez_compressed(stream, pae=found.pae)
    write_page(out / f"{name}.html", name, entity, found, mmcif)
    return {
        "name": name,
        "description": entity.description,
        "file": str(out / f"{name}.cif"),
        "plddt": float(found.plddt.mean()),
        "ptm": found.ptm,
        "rows": alignment.num_rows,
        "templates": min(len(templates.get("template_released", ())), NUM_TEMPLATES),
    }


def chain_to_predict(entity: Entity) -> Arrays:
    """Return a chain without known atoms."""
    length = len(entity.sequence)
    return {
        "aatype": residue_types(entity.sequence),
        "query": sequence_classes("protein", entity.sequence),
        "residue_index": np.arange(length, dtype=np.int32),
        "all_atom_positions": np.zeros((length, 37, 3), dtype=np.float32),
        "all_atom_mask": np.zeros((length, 37), dtype=np.bool_),
        "resolution": np.array(np.nan, dtype=np.float32),
    }


def write_page(path: Path, name: str, entity: Entity, found: PredictedChain, mmcif: str) -> None:
    """Write the report of a chain."""
    what = f"{entity.description}, " if entity.description else ""
    report = Report(name, f"{what}predicted with AlphaFold2")
    if untrained(found.plddt):
        report.notes([NO_CONFIDENCES])
    surest = {"pLDDT": float(found.plddt.mean()), "pTM": found.ptm}
    report.section("Structure").highlights({k: v for k, v in surest.items() if v is not None})
    report.structure(mmcif, "The predicted structure.")
    report.section("Confidence")
    edges, labels = [0, len(found.plddt)], [entity.chains[0]]
    report.figure(
        plddt_figure(found.plddt, edges, labels, "residue"),
        "Expected lDDT of each residue: above 90 very high, above 70 confident, below 50 very low.",
    )
    if found.pae is not None:
        report.figure(
            map_figure(
                found.pae,
                edges,
                labels,
                "predicted aligned error (Å)",
                MAX_ERROR,
                "Greens_r",
                "residue",
            ),
            "Expected position error of the column's residue after alignment on the row's residue.",
        )
    report.figure(
        map_figure(found.contacts, edges, labels, "probability", 1.0, "Blues", "residue"),
        "Probability, by the distogram, that two residues are within 8 Å.",
    )
    report.section("Versions").versions(("bevatron", "torch", "numpy"))
    report.write(path)
