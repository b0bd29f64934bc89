"""Raw samples as RDKit molecules with implicit hydrogen, with their conformers if any.

Nothing here raises for a bad molecule; it returns a reason instead, since one bad row among
millions must not stop `prepare`.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.errors import require
from bevatron.models.gpspp.features.elements import NUM_ELEMENTS
from bevatron.typing import Array, Arrays

MAX_ATOMS = 1024
"""Larger molecules are refused, because their pairs alone would take megabytes."""

_NO_POSITIONS = np.zeros((0, 3), dtype=np.float32)


@dataclass(frozen=True)
class Molecule:
    """A parsed molecule, or the reason for its rejection.

    Attributes
    ----------
    graph : RDKit molecule; None if it cannot be used
    smiles : as given, or written by RDKit if no SMILES was given
    positions : [N, 3] Å or no rows
    reason : why ``graph`` is None, or what was left out; empty if all is well
    """

    graph: Any
    smiles: str
    positions: Array = field(default_factory=lambda: _NO_POSITIONS)
    reason: str = ""


def read_molecule(sample: Arrays) -> Molecule:
    """Parse a raw sample of `bevatron.data.readers.molecules`.

    The graph is that of ``smiles`` if given, otherwise of ``block``, an entry of an SDF.
    Coordinates are those of ``positions`` (in the order of the SMILES' atoms without explicit
    hydrogen), of ``block`` or of a CXSMILES. ``binary`` is an RDKit molecule and takes precedence.
    """
    binary = sample.get("binary")
    if binary is not None and len(binary):
        return from_rdkit(require("rdkit.Chem", "molecules").Mol(binary.tobytes()))
    text = _text(sample["smiles"])
    block = _text(sample["block"]) if "block" in sample else ""
    if not text.strip() and not block:
        return Molecule(None, text, reason="the SMILES is empty")
    graph, reason = _from_smiles(text) if text.strip() else _from_block(block)
    if graph is None:
        return Molecule(None, text, reason=reason)
    ignored = reason
    chem = require("rdkit.Chem", "molecules")
    smiles = text or chem.MolToSmiles(graph)
    reason = _why_unusable(graph)
    if reason:
        return Molecule(None, smiles, reason=reason)
    given = np.asarray(sample.get("positions", _NO_POSITIONS), dtype=np.float32)
    if len(given):
        positions: Array = given
        reason = _why_not_these(given, graph.GetNumAtoms())
    elif block and text.strip():
        positions, reason = _matched(block, graph)
    else:
        positions, reason = _conformer(graph)
    found = "; ".join(filter(None, (ignored, reason)))
    return Molecule(graph, smiles, _NO_POSITIONS if reason else positions, found)


def from_rdkit(graph: Any, positions: Array | None = None) -> Molecule:
    """Wrap an RDKit molecule, removing explicit hydrogen and keeping the conformer."""
    chem = require("rdkit.Chem", "molecules")
    graph = chem.RemoveHs(graph)
    smiles = chem.MolToSmiles(graph)
    reason = _why_unusable(graph)
    if reason:
        return Molecule(None, smiles, reason=reason)
    if positions is None:
        found, reason = _conformer(graph)
    else:
        found = np.asarray(positions, dtype=np.float32).reshape(-1, 3)
        reason = _why_not_these(found, graph.GetNumAtoms())
    return Molecule(graph, smiles, _NO_POSITIONS if reason else found, reason)


def _text(values: Array) -> str:
    return values.tobytes().decode("utf-8", errors="replace")


def _from_smiles(text: str) -> tuple[Any, str]:
    """Parse a SMILES; return the graph and what was ignored, or None and the reason."""
    # RDKit ends a SMILES at a space and drops letters other than ASCII at either end.
    smiles, *rest = re.split(r"[ \t\r\n]+", text.strip(" \t\r\n"), maxsplit=1)
    strange = next((letter for letter in smiles if not letter.isascii()), None)
    if strange is not None:
        name = unicodedata.name(strange, "unnamed").lower()
        return (
            None,
            f"the SMILES has '{strange}' (U+{ord(strange):04X}, {name}), which is not ASCII",
        )
    chem = require("rdkit.Chem", "molecules")
    graph = chem.MolFromSmiles(text)
    if graph is not None:
        only = not rest or rest[0].startswith("|")
        return graph, "" if only else "ignored: what follows the SMILES after a space"
    loose = chem.MolFromSmiles(text, sanitize=False)
    if loose is None:
        return None, "the SMILES cannot be parsed"
    return None, _problem(loose)


def _from_block(block: str) -> tuple[Any, str]:
    chem = require("rdkit.Chem", "molecules")
    graph = chem.MolFromMolBlock(block)
    if graph is not None:
        return graph, ""
    loose = chem.MolFromMolBlock(block, sanitize=False)
    if loose is None:
        return None, "the entry of the SDF cannot be parsed"
    return None, _problem(loose)


def _problem(loose: Any) -> str:
    chem = require("rdkit.Chem", "molecules")
    problems = chem.DetectChemistryProblems(loose)
    return problems[0].Message() if problems else "it gives no chemical structure"


def _why_unusable(graph: Any) -> str:
    num = graph.GetNumAtoms()
    if num == 0:
        return "there are no atoms"
    if num > MAX_ATOMS:
        return f"{num} atoms are more than the {MAX_ATOMS} that are allowed"
    for atom in atoms_of(graph):
        if not 1 <= atom.GetAtomicNum() <= NUM_ELEMENTS:
            return f"atom {atom.GetIdx()} ('{atom.GetSymbol()}') is not an element"
    return ""


def _why_not_these(positions: npt.NDArray[Any], num_atoms: int) -> str:
    if len(positions) != num_atoms:
        return f"3D left out: {len(positions)} positions for {num_atoms} atoms"
    if not np.isfinite(positions).all():
        return "3D left out: a coordinate is not finite"
    if num_atoms > 1 and not np.ptp(positions, axis=0).any():
        return "3D left out: all atoms are in one place"
    return ""


def _conformer(graph: Any) -> tuple[Array, str]:
    if not graph.GetNumConformers():
        return _NO_POSITIONS, ""
    conformer = graph.GetConformer()
    if not conformer.Is3D():
        return _NO_POSITIONS, "3D left out: the coordinates are those of a drawing"
    positions = np.asarray(conformer.GetPositions(), dtype=np.float32)
    return positions, _why_not_these(positions, graph.GetNumAtoms())


def _matched(block: str, graph: Any) -> tuple[Array, str]:
    """Reorder the conformer of an SDF entry to the SMILES' atoms."""
    shown, reason = _from_block(block)
    if shown is None:
        return _NO_POSITIONS, f"3D left out: {reason}"
    positions, reason = _conformer(shown)
    if reason or not len(positions):
        return _NO_POSITIONS, reason or "3D left out: the structure has no coordinates"
    order = _same_order(shown, graph)
    if order is None:
        return _NO_POSITIONS, "3D left out: the structure is of another molecule than the SMILES"
    return positions[list(order)], ""


def _same_order(shown: Any, graph: Any) -> Sequence[int] | None:
    """Return the atom of ``shown`` for each of ``graph``; bond orders may differ.

    Files of one origin agree atom by atom. Otherwise the full chemistry is matched, and if that
    fails elements and bonds alone.
    """
    num = graph.GetNumAtoms()
    if shown.GetNumAtoms() != num or shown.GetNumBonds() != graph.GetNumBonds():
        return None
    if _skeleton(shown) == _skeleton(graph):
        return range(num)
    for first, second in ((shown, graph), (_plain(shown), _plain(graph))):
        match: Sequence[int] = first.GetSubstructMatch(second)
        if len(match) == num:
            return match
    return None


def atoms_of(graph: Any) -> list[Any]:
    """List a molecule's atoms; several times faster than RDKit's own iterator."""
    return [graph.GetAtomWithIdx(i) for i in range(graph.GetNumAtoms())]


def bonds_of(graph: Any) -> list[Any]:
    """List a molecule's bonds."""
    return [graph.GetBondWithIdx(i) for i in range(graph.GetNumBonds())]


def _skeleton(graph: Any) -> tuple[list[int], set[tuple[int, int]]]:
    bonds = ((b.GetBeginAtomIdx(), b.GetEndAtomIdx()) for b in bonds_of(graph))
    numbers = [atom.GetAtomicNum() for atom in atoms_of(graph)]
    return numbers, {(min(pair), max(pair)) for pair in bonds}


def _plain(graph: Any) -> Any:
    """Elements joined by single bonds, nothing else."""
    chem = require("rdkit.Chem", "molecules")
    plain = chem.RWMol()
    for atom in atoms_of(graph):
        plain.AddAtom(chem.Atom(atom.GetAtomicNum()))
    for bond in bonds_of(graph):
        plain.AddBond(bond.GetBeginAtomIdx(), bond.GetEndAtomIdx(), chem.BondType.SINGLE)
    return plain
