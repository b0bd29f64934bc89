"""Residues of a structure that are kept, and the offsets of their tokens and atoms."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bevatron.data.proteins.tokens import DNA, LIGAND, PROTEIN, RNA, TYPES
from bevatron.data.proteins.variants import Variant, variants_of
from bevatron.data.ragged import pointer
from bevatron.data.readers.proteins.components import Dictionary, expected_atoms
from bevatron.data.readers.proteins.structure import POLYMERS, Structure
from bevatron.errors import DataError
from bevatron.typing import IntArray

_SELENOMETHIONINE = "MSE"
_SULFUR = 16


@dataclass(frozen=True)
class Layout:
    """The U residues of an entry that have atoms, in the order of their structure.

    Attributes
    ----------
    structure : without waters
    residue : int64 [U]
        Residue of the structure.
    variants : [U]
    molecule : int8 [U]
        Type, one of `tokens`.
    chain : int64 [U]
        Chain of the entry, from 0; chains without atoms have no number.
    chains : int64 [C]
        Chain of the structure.
    token_ptr, atom_ptr : int64 [U + 1]
        Where the tokens and atoms of each residue begin.
    source : int32 [A]
        Atom of the structure; -1 if it was not observed.
    left_out : components that the dictionary lacks; their residues are not in the entry
    """

    structure: Structure
    residue: IntArray
    variants: list[Variant]
    molecule: npt.NDArray[np.int8]
    chain: IntArray
    chains: IntArray
    token_ptr: IntArray
    atom_ptr: IntArray
    source: npt.NDArray[np.int32]
    left_out: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, N."""
        return int(self.token_ptr[-1])

    @property
    def num_atoms(self) -> int:
        """Number of atoms, A."""
        return int(self.atom_ptr[-1])

    @property
    def residue_of_token(self) -> npt.NDArray[np.int32]:
        """Residue of each token, int32 [N]."""
        return _repeated(self.token_ptr)

    @property
    def residue_of_atom(self) -> npt.NDArray[np.int32]:
        """Residue of each atom, int32 [A]."""
        return _repeated(self.atom_ptr)


def lay_out(structure: Structure, components: Dictionary) -> Layout:
    """Find the residues, tokens and atoms of an entry.

    Waters and hydrogens are dropped, selenomethionine is taken as methionine, and NH1 of arginine
    is the nitrogen nearer to CD (supplement of AlphaFold3, section 2.1). Raises DataError if
    nothing is left, or the position of an atom is not finite.
    """
    dry = structure.take_chains(np.flatnonzero(structure.chains.kind != "water"))
    dry = _with_methionine(dry, components)
    expected = expected_atoms(dry, components)
    if not len(expected.name):
        raise DataError(
            f"{structure.name}: no atom of a polymer or ligand is left, only waters, hydrogens or "
            "components that the dictionary lacks; leave the entry out"
        )
    source = expected.atom.astype(np.int64)
    _check_positions(dry, source)
    residue, first = np.unique(expected.residue, return_index=True)
    atom_ptr = np.append(first, len(expected.name)).astype(np.int64)
    kinds = dry.chains.kind[dry.residues.chain[residue]].tolist()
    codes = dry.residues.component[residue].tolist()
    names = expected.name.tolist()
    known = variants_of(components)
    edges = atom_ptr.tolist()
    variants = [
        known.get(code, kind in POLYMERS, names[edges[place] : edges[place + 1]])
        for place, (code, kind) in enumerate(zip(codes, kinds, strict=True))
    ]
    chains, chain = np.unique(dry.residues.chain[residue], return_inverse=True)
    absent = set(dry.residues.component.tolist()) - {"", *codes}
    return Layout(
        structure=dry,
        residue=residue.astype(np.int64),
        variants=variants,
        molecule=np.array(
            [_molecule(v, kind) for v, kind in zip(variants, kinds, strict=True)], dtype=np.int8
        ),
        chain=chain.astype(np.int64),
        chains=chains.astype(np.int64),
        token_ptr=pointer([variant.num_tokens for variant in variants]),
        atom_ptr=atom_ptr,
        source=_with_arginine(dry, variants, atom_ptr, source),
        left_out=tuple(sorted(code for code in absent if code not in components)),
    )


def _with_methionine(structure: Structure, components: Dictionary) -> Structure:
    residues, atoms = structure.residues, structure.atoms
    found = residues.component == _SELENOMETHIONINE
    found &= np.isin(structure.chains.kind[residues.chain], POLYMERS)
    if not found.any() or "MET" not in components:
        return structure
    # The array of texts is wide enough: both codes have three letters.
    component = np.where(found, "MET", residues.component)
    selenium = found[atoms.residue] & (atoms.name == "SE")
    name = np.where(selenium, "SD", atoms.name)
    element = np.where(selenium, np.uint8(_SULFUR), atoms.element)
    return replace(
        structure,
        residues=replace(residues, component=component),
        atoms=replace(atoms, name=name, element=element),
    )


def _with_arginine(
    structure: Structure, variants: list[Variant], atom_ptr: IntArray, source: IntArray
) -> npt.NDArray[np.int32]:
    """Exchange NH1 and NH2 where NH2 is nearer to CD: files name them either way."""
    found = [
        [atom_ptr[place] + variant.places[name] for name in ("CD", "NH1", "NH2")]
        for place, variant in enumerate(variants)
        if variant.component.code == "ARG" and variant.standard
    ]
    atoms = np.array(found, dtype=np.int64).reshape(-1, 3)
    atoms = atoms[(source[atoms] >= 0).all(axis=1)]
    delta, near, far = (structure.atoms.position[source[atoms[:, side]]] for side in range(3))
    wrong = np.linalg.norm(near - delta, axis=1) > np.linalg.norm(far - delta, axis=1)
    exchanged = source.astype(np.int32)
    exchanged[atoms[wrong, 1]] = source[atoms[wrong, 2]]
    exchanged[atoms[wrong, 2]] = source[atoms[wrong, 1]]
    return exchanged


def _check_positions(structure: Structure, atoms: IntArray) -> None:
    used = atoms[atoms >= 0]
    bad = used[~np.isfinite(structure.atoms.position[used]).all(axis=1)]
    if len(bad):
        residue = structure.atoms.residue[bad[0]]
        chain = structure.chains.label[structure.residues.chain[residue]]
        raise DataError(
            f"{structure.name}: atom {structure.atoms.name[bad[0]]} of "
            f"{structure.residues.component[residue]} {structure.residues.number[residue]} in "
            f"chain {chain} has the position {structure.atoms.position[bad[0]].tolist()}; mend or "
            "remove the atom"
        )


def _molecule(variant: Variant, kind: str) -> int:
    """Type of a residue: its own if standard, else that of its chain or component."""
    if variant.standard is not None:
        return variant.standard.molecule
    if kind in TYPES:
        return TYPES[kind]
    if kind in POLYMERS:
        for word, molecule in (("PEPTIDE", PROTEIN), ("RNA", RNA), ("DNA", DNA)):
            if word in variant.component.type:
                return molecule
    return LIGAND


def _repeated(pointer: IntArray) -> npt.NDArray[np.int32]:
    return np.repeat(np.arange(len(pointer) - 1, dtype=np.int32), np.diff(pointer))
