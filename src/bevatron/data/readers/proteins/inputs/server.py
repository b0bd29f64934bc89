"""Lists of jobs in JSON: the AlphaFold Server's and Protenix's, which extends it.

https://github.com/google-deepmind/alphafold/tree/main/server and docs/infer_json_format.md of
Protenix; also its older keys.
"""

from pathlib import Path

from bevatron.data.readers.proteins.alphabet import Polymer
from bevatron.data.readers.proteins.inputs.complexes import (
    MOST_CHAINS,
    AtomName,
    Complex,
    Entity,
    Modification,
    checked_complex,
    checked_sequence,
    named_chains,
)
from bevatron.data.readers.proteins.inputs.keyed import Keyed

_POLYMERS: dict[str, Polymer] = {
    "proteinChain": "protein",
    "dnaSequence": "dna",
    "rnaSequence": "rna",
}
# Known, but without a place in a Complex.
_IGNORED_OF_JOB = ("constraint", "epitopes", "assembly_id")
_IGNORED_OF_CHAIN = ("useStructureTemplate", "maxTemplateDate", "templatesPath")


def read_server(job: Keyed, path: Path, stem: str) -> Complex:
    """Read one job of a list.

    Raises DataError naming the key that is missing, unknown or contradicts another.
    """
    for key in ("dialect", "version"):
        job.has(key)
    ignored = _ignored(job, _IGNORED_OF_JOB)
    entities, copies = [], []
    for part in job.at("sequences").items():
        kind, given = part.only()
        ignored += _ignored(given, _IGNORED_OF_CHAIN)
        entity, count = _entity(kind, given, path.parent)
        given.refuse_unknown()
        entities.append(entity)
        copies.append(count)
    named = named_chains(entities, copies)
    bonds = tuple(bond for part in job.items("covalent_bonds") for bond in _bonds(part, named))
    seeds = tuple(seed.integer() for seed in job.items("modelSeeds"))
    made = Complex(job.text("name", stem) or stem, named, bonds, seeds, ignored=tuple(ignored))
    job.refuse_unknown()
    return checked_complex(made, job.where)


def _ignored(given: Keyed, keys: tuple[str, ...]) -> list[str]:
    return [given.at(key).path for key in keys if given.has(key)]


def _entity(kind: str, given: Keyed, folder: Path) -> tuple[Entity, int]:
    chains = given.texts("id")
    count = given.integer("count", max(len(chains), 1))
    if count > MOST_CHAINS:
        raise given.error(f"has count {count}; at most {MOST_CHAINS:,} copies can be named")
    if count < 1 or (chains and len(chains) != count):
        raise given.error(f"has {len(chains)} ids and count {count}; expected one id for each copy")
    if kind in _POLYMERS:
        return _polymer(_POLYMERS[kind], given, chains, folder), count
    if kind == "ion":
        return Entity("ligand", chains, codes=(_code(given.text("ion")),)), count
    if kind == "ligand":
        return _ligand(given, chains, folder), count
    raise given.error(f"'{kind}' is unknown; expected {', '.join(_POLYMERS)}, ligand or ion")


def _code(text: str) -> str:
    return text.removeprefix("CCD_")


def _ligand(given: Keyed, chains: tuple[str, ...], folder: Path) -> Entity:
    text = given.text("ligand")
    if text.startswith("CCD_"):
        return Entity("ligand", chains, codes=tuple(_code(text).split("_")))
    if text.startswith("FILE_"):
        return Entity("ligand", chains, file=folder / text.removeprefix("FILE_"))
    if not text:
        raise given.error("'ligand' is empty; expected CCD_CODE, FILE_PATH or SMILES")
    return Entity("ligand", chains, smiles=text)


def _polymer(kind: Polymer, given: Keyed, chains: tuple[str, ...], folder: Path) -> Entity:
    if given.has("glycans") and list(given.items("glycans")):
        raise given.at("glycans").error(
            "does not say which atoms are bonded; give glycans as ligands with bonds between them"
        )
    unpaired = given.file_path("unpairedMsaPath", folder)
    paired = given.file_path("pairedMsaPath", folder)
    if given.has("msa"):
        msa = given.at("msa")
        database = msa.file_path("precomputed_msa_dir", folder)
        msa.has("pairing_db")
        msa.refuse_unknown()
        if database is not None:
            unpaired, paired = database / "non_pairing.a3m", database / "pairing.a3m"
    return Entity(
        kind,
        chains,
        checked_sequence(kind, given.text("sequence"), given.at("sequence").where),
        modifications=tuple(_modification(part) for part in given.items("modifications")),
        unpaired=unpaired,
        paired=paired,
    )


def _modification(part: Keyed) -> Modification:
    prefix = "ptm" if part.has("ptmType") else "base"
    code = part.text("ptmType" if prefix == "ptm" else "modificationType")
    position = part.integer(f"{prefix}Position")
    part.refuse_unknown()
    return Modification(position, _code(code))


def _bonds(part: Keyed, entities: tuple[Entity, ...]) -> list[tuple[AtomName, AtomName]]:
    """Return the bond between two copies, or between all pairs of copies if none is named."""
    old = part.has("left_entity")
    ends = [_end(part, side, entities) for side in (("left_", "right_") if old else ("1", "2"))]
    part.refuse_unknown()
    if len(ends[0]) != len(ends[1]):
        raise part.error(
            f"joins {len(ends[0])} copies with {len(ends[1])}; name the copy of both atoms"
        )
    return list(zip(*ends, strict=True))


def _end(part: Keyed, side: str, entities: tuple[Entity, ...]) -> list[AtomName]:
    def key(name: str) -> str:
        return f"{side}{name}" if side.endswith("_") else f"{name}{side}"

    number = part.integer(key("entity"))
    if not 1 <= number <= len(entities):
        raise part.at(key("entity")).error(
            f"is {number}; the entities are numbered 1 to {len(entities)}"
        )
    chains = entities[number - 1].chains
    if part.has(key("copy")):
        copy = part.integer(key("copy"))
        if not 1 <= copy <= len(chains):
            raise part.at(key("copy")).error(f"is {copy}; there are {len(chains)} copies")
        chains = chains[copy - 1 : copy]
    position, atom = part.integer(key("position"), 1), part.text(key("atom"))
    return [AtomName(chain, position, atom) for chain in chains]
