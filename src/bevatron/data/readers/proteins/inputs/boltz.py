"""YAML of Boltz (docs/prediction.md of its repository)."""

from dataclasses import replace
from pathlib import Path

from bevatron.data.readers.proteins.alphabet import POLYMERS
from bevatron.data.readers.proteins.inputs.alphafold3 import (
    atom_name,
    chain_names,
    modifications_of,
)
from bevatron.data.readers.proteins.inputs.complexes import (
    Complex,
    Entity,
    Template,
    checked_complex,
    checked_sequence,
)
from bevatron.data.readers.proteins.inputs.keyed import Keyed

_CONSTRAINTS = ("bond", "pocket", "contact")


def read_boltz(job: Keyed, path: Path, stem: str) -> Complex:
    """Read one complex.

    Raises DataError naming the key that is missing, unknown or contradicts another.
    """
    job.has("version")
    entities = [_entity(part, path.parent) for part in job.at("sequences").items()]
    bonds, ignored = [], []
    for part in job.items("constraints"):
        kind, given = part.only()
        if kind not in _CONSTRAINTS:
            raise part.error(f"'{kind}' is unknown; expected {', '.join(_CONSTRAINTS)}")
        if kind == "bond":
            bonds.append((atom_name(given.at("atom1")), atom_name(given.at("atom2"))))
            given.refuse_unknown()
        else:
            ignored.append(given.path)
    ignored += [part.path for part in job.items("properties")]
    for part in job.items("templates"):
        entities, left = _with_template(part, entities, path.parent)
        ignored += left
    job.refuse_unknown()
    made = Complex(stem, tuple(entities), tuple(bonds), ignored=tuple(ignored))
    return checked_complex(made, str(path))


def _entity(part: Keyed, folder: Path) -> Entity:
    kind, given = part.only()
    chains = chain_names(given)
    if kind == "ligand":
        code, smiles = given.text("ccd", ""), given.text("smiles", "")
        if bool(code) == bool(smiles):
            raise given.error("needs either 'ccd' or 'smiles'")
        entity = Entity("ligand", chains, codes=(code,) if code else (), smiles=smiles)
    elif kind in POLYMERS:
        modifications = modifications_of(given, "ccd", "position")
        entity = Entity(
            kind,
            chains,
            checked_sequence(kind, given.text("sequence"), given.at("sequence").where),
            modifications=modifications,
            cyclic=given.flag("cyclic"),
            unpaired=_alignment(given, folder) if kind == "protein" else None,
        )
    else:
        raise part.error(f"'{kind}' is unknown; expected {', '.join(POLYMERS)} or ligand")
    given.refuse_unknown()
    return entity


def _alignment(given: Keyed, folder: Path) -> Path | str | None:
    return "" if given.text("msa", "") == "empty" else given.file_path("msa", folder)


def _with_template(
    part: Keyed, entities: list[Entity], folder: Path
) -> tuple[list[Entity], list[str]]:
    """Give a template to the proteins that it names, or to all of them."""
    file = part.file_path("cif", folder) or part.file_path("pdb", folder)
    part.has("pdb")
    if file is None:
        raise part.error("needs either 'cif' or 'pdb'")
    wanted, chains = part.texts("chain_id"), part.texts("template_id")
    ignored = [part.at(key).path for key in ("force", "threshold") if part.has(key)]
    part.refuse_unknown()
    known = {chain for entity in entities for chain in entity.chains if entity.kind == "protein"}
    for chain in wanted:
        if chain not in known:
            raise part.at("chain_id").error(f"'{chain}' is not a protein chain")
    if chains and wanted and len(chains) != len(wanted):
        raise part.error(f"names {len(wanted)} chains and {len(chains)} of the template")
    found = []
    for entity in entities:
        places = [wanted.index(chain) for chain in entity.chains if chain in wanted]
        if entity.kind == "protein" and (places or not wanted):
            own = tuple(chains[place] for place in places) if chains and wanted else chains
            templates = (*(entity.templates or ()), Template(file, chains=own))
            found.append(replace(entity, templates=templates))
        else:
            found.append(entity)
    return found, ignored
