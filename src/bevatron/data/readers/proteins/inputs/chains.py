"""FASTA of chains: all records are one complex."""

import re
from pathlib import Path

from bevatron.data.readers.proteins.alphabet import POLYMERS, Polymer
from bevatron.data.readers.proteins.fasta import as_text, split_records
from bevatron.data.readers.proteins.inputs.complexes import (
    Complex,
    Entity,
    checked_complex,
    checked_sequence,
    named_chains,
)
from bevatron.errors import DataError

_LIGANDS = ("ccd", "smiles", "ligand")
_RCSB_CHAINS = re.compile(r"Chains? (.+)")
_AUTHOR = re.compile(r"\[.*?\]")
_MOLECULE = re.compile(r"\bmol:(protein|na)\b")
_NUCLEIC = set("ACGTUN")
_CHAIN, _WORD = re.compile(r"\w{1,4}"), re.compile(r"[A-Za-z]+")
_DATABASES = {"bbm", "bbs", "dbj", "emb", "gb", "gi", "gnl", "lcl", "pat", "pdb", "pir", "prf"}
_DATABASES |= {"ref", "sp", "tpd", "tpe", "tpg", "tr"}


def read_chains(data: bytes, path: Path, stem: str) -> Complex:
    """Read records as chains.

    A header may say what a chain is: ``>A|protein``, ``>B|dna``, ``>C|rna``, ``>D|smiles``,
    ``>E|ccd``, with an alignment in a third field (Boltz); ``>protein|name=...`` (Chai);
    ``mol:protein``, ``mol:na`` (PDB). Without it a chain is a protein; one whose letters are all
    those of nucleotides is refused. Colons in a sequence separate chains (ColabFold); ``Chains A,
    B`` (RCSB) are copies. Raises DataError naming the record that is empty, unclear, of an unknown
    kind or holds a letter that is not a residue.
    """
    records = split_records(data, str(path))
    entities, copies = [], []
    for number, (header, letters) in enumerate(
        zip(records.headers, records.sequences, strict=True)
    ):
        where = records.where(number)
        fields = [field.strip() for field in header.split("|")]
        chains, kind = _named(fields, header, where)
        sequence = "".join(as_text(letters, str(path)).split())
        if kind in _LIGANDS:
            entities.append(_ligand(kind, sequence, chains, header, where))
            copies.append(1)
            continue
        parts = sequence.split(":")
        for part in parts:
            polymer = _polymer_kind(kind, part, where)
            entities.append(
                Entity(
                    polymer,
                    chains if len(parts) == 1 else (),
                    checked_sequence(polymer, part, where),
                    unpaired=_alignment(fields, path.parent),
                    description=header,
                )
            )
            copies.append(1)
    made = Complex(stem, named_chains(entities, copies))
    return checked_complex(made, str(path))


def _named(fields: list[str], header: str, where: str) -> tuple[tuple[str, ...], str]:
    """Return the chains and kind that a header states; refuse an unknown kind."""
    kinds = (*POLYMERS, *_LIGANDS)
    if len(fields) > 1 and fields[1].lower() in kinds:
        return ((fields[0],) if fields[0] else ()), fields[1].lower()
    if len(fields) > 1 and fields[0].lower() in kinds:
        return (), fields[0].lower()
    if len(fields) > 2 and (match := _RCSB_CHAINS.fullmatch(fields[1])):
        chains = tuple(chain.strip() for chain in _AUTHOR.sub("", match[1]).split(","))
        words = fields[2].split(" ", maxsplit=1)
        return chains, {"DNA": "dna", "RNA": "rna"}.get(words[0].upper(), "")
    if len(fields) > 1 and (word := _unknown_kind(fields)):
        raise DataError(f"{where}: the kind '{word}' is unknown; write one of {', '.join(kinds)}")
    molecule = _MOLECULE.search(header)
    return (), molecule[1] if molecule else ""


def _unknown_kind(fields: list[str]) -> str:
    """Return an unknown word in the place of Boltz's or Chai's kind, except names of databases."""
    if fields[1].startswith("name="):
        return fields[0]
    of_boltz = _CHAIN.fullmatch(fields[0]) and fields[0].lower() not in _DATABASES
    return fields[1] if of_boltz and _WORD.fullmatch(fields[1]) else ""


def _alignment(fields: list[str], folder: Path) -> Path | str | None:
    if len(fields) < 3 or fields[1].lower() not in POLYMERS or not fields[2]:
        return None
    return "" if fields[2] == "empty" else folder / fields[2]


def _polymer_kind(kind: str, sequence: str, where: str) -> Polymer:
    for polymer in POLYMERS:
        if kind == polymer:
            return polymer
    letters = set(sequence.upper())
    if kind == "na" and letters >= {"T", "U"}:
        raise DataError(f"{where}: holds both T and U; write '>NAME|dna' or '>NAME|rna'")
    if kind == "na" and letters & {"T", "U"}:
        return "rna" if "U" in letters else "dna"
    if letters and letters <= _NUCLEIC:
        raise DataError(
            f"{where}: its letters are those of nucleotides and of amino acids; write "
            "'>NAME|dna', '>NAME|rna' or '>NAME|protein'"
        )
    return "protein"


def _ligand(kind: str, text: str, chains: tuple[str, ...], header: str, where: str) -> Entity:
    if not text:
        raise DataError(f"{where}: the ligand is empty; expected SMILES or a component's code")
    if kind == "ccd":
        return Entity("ligand", chains, codes=(text.upper(),), description=header)
    return Entity("ligand", chains, smiles=text, description=header)
