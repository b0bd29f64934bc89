"""JSON of AlphaFold3, versions 1 to 4 (docs/input.md of its repository)."""

from pathlib import Path

import numpy as np

from bevatron.data.readers.proteins.alphabet import POLYMERS, Polymer
from bevatron.data.readers.proteins.inputs.complexes import (
    MOST_RESIDUES,
    AtomName,
    Complex,
    Entity,
    Modification,
    Template,
    checked_complex,
    checked_sequence,
)
from bevatron.data.readers.proteins.inputs.keyed import Keyed

_VERSIONS = (1, 2, 3, 4)


def read_alphafold3(job: Keyed, path: Path, stem: str) -> Complex:
    """Read one job; DataError naming the key that is missing, unknown or contradicts another."""
    if job.text("dialect") != "alphafold3":
        raise job.at("dialect").error(
            f"is '{job.text('dialect')}'; expected 'alphafold3', or a list of jobs as the "
            "AlphaFold Server and Protenix have it"
        )
    version = job.integer("version")
    if version not in _VERSIONS:
        raise job.at("version").error(f"is {version}; expected one of {_VERSIONS}")
    entities = tuple(_entity(part, path.parent) for part in job.at("sequences").items())
    bonds = tuple(_bond(part) for part in job.items("bondedAtomPairs"))
    made = Complex(
        job.text("name", stem) or stem,
        entities,
        bonds,
        tuple(seed.integer() for seed in job.items("modelSeeds")),
        _text_or_file(job, "userCCD", path.parent),
    )
    job.refuse_unknown()
    return checked_complex(made, str(path))


def _entity(part: Keyed, folder: Path) -> Entity:
    kind, given = part.only()
    chains = chain_names(given)
    description = given.text("description", "")
    if kind == "ligand":
        codes, smiles = given.texts("ccdCodes"), given.text("smiles", "")
        if bool(codes) == bool(smiles):
            raise given.error("needs either 'ccdCodes' or 'smiles'")
        entity = Entity("ligand", chains, codes=codes, smiles=smiles, description=description)
    elif kind in POLYMERS:
        entity = _polymer(kind, given, chains, folder)
    else:
        raise part.error(f"'{kind}' is unknown; expected {', '.join(POLYMERS)} or ligand")
    given.refuse_unknown()
    return entity


def _polymer(kind: Polymer, given: Keyed, chains: tuple[str, ...], folder: Path) -> Entity:
    names = (
        ("ptmType", "ptmPosition") if kind == "protein" else ("modificationType", "basePosition")
    )
    modifications = modifications_of(given, *names)
    templates = None
    if kind == "protein" and given.has("templates"):
        templates = tuple(_template(part, folder) for part in given.items("templates"))
    return Entity(
        kind,
        chains,
        checked_sequence(kind, given.text("sequence"), given.at("sequence").where),
        modifications=modifications,
        unpaired=None if kind == "dna" else _text_or_file(given, "unpairedMsa", folder),
        paired=_text_or_file(given, "pairedMsa", folder) if kind == "protein" else None,
        templates=templates,
        description=given.text("description", ""),
    )


def _template(part: Keyed, folder: Path) -> Template:
    structure = _text_or_file(part, "mmcif", folder)
    if not structure:
        raise part.error("needs either 'mmcif' or 'mmcifPath'")
    columns = [
        [place.integer() for place in part.at(key).items()]
        for key in ("queryIndices", "templateIndices")
    ]
    part.refuse_unknown()
    if len(columns[0]) != len(columns[1]):
        raise part.error(
            f"has {len(columns[0])} queryIndices and {len(columns[1])} templateIndices; expected "
            "as many of both"
        )
    if not all(0 <= place < MOST_RESIDUES for column in columns for place in column):
        raise part.error(
            f"has a negative index or one above {MOST_RESIDUES:,}; positions count from 0"
        )
    return Template(structure, np.array(columns, dtype=np.int32).T)


def _bond(part: Keyed) -> tuple[AtomName, AtomName]:
    atoms = [atom_name(atom) for atom in part.items()]
    if len(atoms) != 2:
        raise part.error(f"has {len(atoms)} atoms; expected two")
    return atoms[0], atoms[1]


def chain_names(given: Keyed) -> tuple[str, ...]:
    """Read the names of the copies of an entity, as in Boltz too."""
    chains = given.texts("id")
    if not chains or "" in chains:
        raise given.error("has no 'id'; every copy needs a name")
    return chains


def modifications_of(given: Keyed, component: str, position: str) -> tuple[Modification, ...]:
    """Read the modifications of a polymer, by the keys of their components and positions."""
    found = []
    for part in given.items("modifications"):
        found.append(Modification(part.integer(position), part.text(component)))
        part.refuse_unknown()
    return tuple(found)


def atom_name(part: Keyed) -> AtomName:
    """Read an atom written as a list of chain, position and name, as in Boltz too."""
    fields = list(part.items())
    if len(fields) != 3:
        raise part.error("is not an atom; expected a chain, a position from 1 and the atom's name")
    return AtomName(fields[0].text(), fields[1].integer(), fields[2].text())


def _text_or_file(given: Keyed, key: str, folder: Path) -> str | Path | None:
    """Return the text of ``key``, or the file of ``keyPath``; None if neither is there."""
    file = given.file_path(f"{key}Path", folder)
    if not given.has(key):
        return file
    if file is not None:
        raise given.error(f"has both '{key}' and '{key}Path'; keep one")
    return given.text(key)
