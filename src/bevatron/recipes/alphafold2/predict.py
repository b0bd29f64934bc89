"""Structures of chains in files: mmCIF with pLDDT and a page of each."""

from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.proteins.chains import residue_types
from bevatron.data.proteins.mmcif import format_mmcif
from bevatron.data.proteins.rows_in_memory import RowsInMemory
from bevatron.data.proteins.sample import sequence_classes
from bevatron.data.readers.proteins import parse_alignment, read_alignment, read_inputs
from bevatron.data.readers.proteins.inputs import Entity
from bevatron.errors import DataError
from bevatron.files import write_text_atomically
from bevatron.recipes.alphafold2.predictor import ChainPredictor, PredictedChain, structure_of
from bevatron.recipes.structure_figures import map_figure, plddt_figure
from bevatron.train.report.page import Report
from bevatron.typing import Arrays

MOST_DELETIONS = np.iinfo(np.uint8).max


def predict_files(
    model: str | Path | ChainPredictor,
    source: Path,
    out: Path,
    *,
    seed: int = 0,
    device: str = "auto",
) -> dict[str, Any]:
    """Predict the protein chains of a file; each gets ``NAME.cif`` and ``NAME.html`` in a folder.

    Parameters
    ----------
    model
        A run, a model folder, or what was loaded of one.
    source
        See `bevatron.data.readers.proteins.inputs.read_inputs`: FASTA, or a JSON or YAML that also
        names alignments. Equal chains are predicted once.
    out
        The folder.
    seed
        Of the rows that are drawn.
    device
        cpu, cuda, cuda:N or auto; for a model that is not loaded yet.

    Returns
    -------
    ``chains``: of each ``name``, ``file``, ``plddt`` (the mean) and ``rows`` of its alignment.

    Raises
    ------
    DataError, CheckpointError, ConfigError
        If the file holds no protein, or something cannot be used.
    """
    given = [
        (f"{each.name}_{entity.chains[0]}", entity)
        for each in read_inputs(source)
        for entity in each.entities
        if entity.kind == "protein"
    ]
    if not given:
        raise DataError(f"{source}: holds no protein, of which AlphaFold2 predicts structures")
    predictor = model if isinstance(model, ChainPredictor) else ChainPredictor(model, device)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{out}: cannot be made ({error.strerror})") from None
    rows = []
    for name, entity in given:
        chain, alignment = chain_to_predict(entity), alignment_to_use(name, entity)
        found = predictor.predict(chain, alignment, seed)
        mmcif = format_mmcif(structure_of(name, chain, entity.chains[0], found))
        write_text_atomically(out / f"{name}.cif", mmcif, DataError)
        write_page(out / f"{name}.html", name, entity, found, mmcif)
        mean = float(found.plddt.mean())
        rows.append({
            "name": name, "file": str(out / f"{name}.cif"), "plddt": mean,
            "rows": alignment.num_rows,
        })  # fmt: skip
    return {"chains": rows}


def chain_to_predict(entity: Entity) -> Arrays:
    """Return a chain of which no atom is known."""
    length = len(entity.sequence)
    return {
        "aatype": residue_types(entity.sequence),
        "query": sequence_classes("protein", entity.sequence),
        "residue_index": np.arange(length, dtype=np.int32),
        "all_atom_positions": np.zeros((length, 37, 3), dtype=np.float32),
        "all_atom_mask": np.zeros((length, 37), dtype=np.bool_),
        "resolution": np.array(np.nan, dtype=np.float32),
    }


def alignment_to_use(name: str, entity: Entity) -> RowsInMemory:
    """Return the alignment that the input names; without one the sequence is its only row.

    Raises
    ------
    DataError
        If it begins with another sequence.
    """
    query = sequence_classes("protein", entity.sequence)
    given = entity.unpaired or entity.paired
    if not given:
        return RowsInMemory(query[None], np.zeros((1, len(query)), dtype=np.uint8))
    if isinstance(given, Path):
        found = read_alignment(given)
    else:
        found = parse_alignment(given.encode(), f"{name}: its alignment")
    if found.rows.shape[1] != len(query) or (found.rows[0] != query).any():
        raise DataError(f"{name}: its alignment begins with another sequence than the chain's")
    deletions = np.minimum(found.deletions, MOST_DELETIONS).astype(np.uint8)
    return RowsInMemory(found.rows, deletions)


def write_page(path: Path, name: str, entity: Entity, found: PredictedChain, mmcif: str) -> None:
    """Write the report of a chain."""
    report = Report(name, "predicted with AlphaFold2")
    report.section("Structure").highlights({"pLDDT": float(found.plddt.mean())})
    report.structure(mmcif, "The predicted structure.")
    report.section("Confidence")
    edges, labels = [0, len(found.plddt)], [entity.chains[0]]
    report.figure(
        plddt_figure(found.plddt, edges, labels),
        "Expected lDDT of each residue: above 90 very high, above 70 confident, below 50 very low.",
    )
    report.figure(
        map_figure(found.contacts, edges, labels, "probability", 1.0, "Blues"),
        "Probability, by the distogram, that two residues are within 8 Å.",
    )
    report.versions(("bevatron", "torch", "numpy"))
    report.write(path)
