"""Reference poses: low-energy shapes of one component, by RDKit or from its dictionary."""

import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bevatron.data.compressed import format_suffix, read_whole
from bevatron.data.readers.elements import SYMBOLS
from bevatron.data.readers.proteins.components import Component
from bevatron.errors import DataError, MissingPackageError, require
from bevatron.output import note
from bevatron.typing import Array, IntArray

NUM_POSES = 16
"""Number of poses of a component, from which one is drawn each time."""

_MAX_ATTEMPTS, _MAX_FAILED = 20, 3
_MAX_SECONDS = 60  # of one pose; ligands of the dictionary that can be embedded take below two
_ORDERS = {0: "SINGLE", 1: "SINGLE", 2: "DOUBLE", 3: "TRIPLE", 4: "QUADRUPLE"}


def heavy_atoms(component: Component) -> IntArray:
    """Return the atoms of a component that are not hydrogen, in its own order."""
    return np.flatnonzero(component.elements != 1)


def component_key(component: Component) -> int:
    """Hash what determines the poses of a component: 63 bits of its atoms, bonds and coordinates.

    Components of equal code but other content (a newer dictionary, the user's own) differ.
    """
    digest = xxhash.xxh3_64("\0".join(component.atoms.tolist()).encode())
    for column in (
        component.elements,
        component.charges,
        component.bonds,
        component.orders,
        component.aromatic_bonds,
        component.ideal,
        component.model,
    ):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.intdigest() >> 1


def make_poses(component: Component, number: int = NUM_POSES) -> npt.NDArray[np.float32]:
    """Make reference poses of a component.

    By distance geometry with experimental torsions (RDKit's ETKDGv3; supplement of AlphaFold3,
    section 2.8), seeded by the component's content: a call repeats bit for bit with the same
    RDKit, and fewer poses are the first of more. What RDKit is not installed for, or cannot embed,
    has one pose: the ideal coordinates of the dictionary, or else the model's.

    Returns
    -------
    float32 [poses, n, 3]
        Positions of the heavy atoms, Å; NaN where nothing is known.
    """
    heavy = heavy_atoms(component)
    if len(heavy) > 1:
        poses = _embedded(component, number)
        if poses:
            return np.stack(poses)[:, heavy]
    return _listed(component)[None, heavy]


def _listed(component: Component) -> npt.NDArray[np.float32]:
    """Ideal coordinates if there are any, the model's of the atoms if none are missing there."""
    heavy = heavy_atoms(component)
    if np.isnan(component.ideal[heavy]).any() and not np.isnan(component.model[heavy]).any():
        return component.model
    return component.ideal if np.isfinite(component.ideal).any() else component.model


def _embedded(component: Component, number: int) -> list[npt.NDArray[np.float32]]:
    try:
        chem = require("rdkit.Chem", "molecules")
    except MissingPackageError as error:
        ideal = "reference conformers are the dictionary's ideal coordinates until then"
        _say_once(f"{error}; {ideal}")
        return []
    with require("rdkit.rdBase", "molecules").BlockLogs():
        molecule = _molecule(component, chem)
        return [] if molecule is None else _embed(molecule, number, component_key(component))


@lru_cache(maxsize=1)
def _say_once(sentence: str) -> None:
    note(sentence)


def _molecule(component: Component, chem: Any) -> Any | None:
    """Build RDKit's molecule with the stereochemistry of the coordinates; None if it cannot be."""
    if (component.elements == 0).any():
        return None
    editable = chem.RWMol()
    for element, charge in zip(
        component.elements.tolist(), component.charges.tolist(), strict=True
    ):
        atom = chem.Atom(element)
        atom.SetFormalCharge(charge)
        atom.SetNoImplicit(True)
        editable.AddAtom(atom)
    for (i, j), order in zip(component.bonds.tolist(), component.orders.tolist(), strict=True):
        editable.AddBond(i, j, getattr(chem.BondType, _ORDERS[order]))
    try:
        chem.SanitizeMol(editable)
        listed = _listed(component)
        if np.isfinite(listed).all():
            shape = chem.Conformer(len(listed))
            shape.SetPositions(listed.astype(np.float64))
            editable.AddConformer(shape)
            chem.AssignStereochemistryFrom3D(editable)
    except (ValueError, RuntimeError):
        return None
    return editable.GetMol()


def _embed(molecule: Any, number: int, key: int) -> list[npt.NDArray[np.float32]]:
    """Embed poses one by one, each with its own seed, until a few have failed."""
    geometry = require("rdkit.Chem.rdDistGeom", "molecules")
    settings = geometry.ETKDGv3()
    settings.maxIterations = _MAX_ATTEMPTS
    settings.clearConfs = True
    if hasattr(settings, "timeout"):  # not in older versions of RDKit
        settings.timeout = _MAX_SECONDS
    found: list[npt.NDArray[np.float32]] = []
    failed = 0
    while len(found) < number and failed < _MAX_FAILED:
        settings.randomSeed = (key + 7919 * (len(found) + failed)) % (2**31 - 1)
        if _embeds(molecule, settings):
            found.append(np.asarray(molecule.GetConformer().GetPositions(), dtype=np.float32))
        else:
            failed += 1
    return found


def _embeds(molecule: Any, settings: Any) -> bool:
    """Embed a pose; whether that succeeded.

    RDKit takes Ctrl-C for itself while it embeds, and returns as if it had failed. What fails only
    once was interrupted: KeyboardInterrupt.
    """
    embed = require("rdkit.Chem.rdDistGeom", "molecules").EmbedMolecule
    begun = time.monotonic()
    try:
        if embed(molecule, settings) >= 0:
            return True
        if time.monotonic() - begun > _MAX_SECONDS:
            return False
        interrupted = embed(molecule, settings) >= 0
    except (ValueError, RuntimeError):
        return False
    if interrupted:
        raise KeyboardInterrupt
    return False


def component_of_smiles(smiles: str, code: str) -> Component:
    """Make a component from a SMILES string; atoms are named by element and number, as ``CL2``.

    Its ideal coordinates are those of an embedded pose, which keeps the stereochemistry. Raises
    DataError if the SMILES is not valid or cannot be embedded, MissingPackageError if RDKit is not
    installed.
    """
    chem = require("rdkit.Chem", "molecules")
    with require("rdkit.rdBase", "molecules").BlockLogs():
        parsed = chem.MolFromSmiles(smiles)
        if parsed is None or not parsed.GetNumAtoms():
            raise DataError(f"'{smiles}' is not valid SMILES; check the string")
        molecule = chem.AddHs(parsed)
        shape = _shape(molecule, smiles)
    return _component(molecule, shape, smiles, code)


def component_of_file(path: Path, code: str) -> Component:
    """Make a component from the first molecule of an SDF, MOL, MOL2 or PDB file, as from a SMILES.

    Its ideal coordinates are those of the file. Raises DataError if the file is of another kind or
    has no molecule in three dimensions, MissingPackageError if RDKit is not installed.
    """
    chem = require("rdkit.Chem", "molecules")
    readers = {
        ".sdf": chem.MolFromMolBlock,
        ".mol": chem.MolFromMolBlock,
        ".mol2": chem.MolFromMol2Block,
        ".pdb": chem.MolFromPDBBlock,
    }
    suffix = format_suffix(path)
    if suffix not in readers:
        raise DataError(
            f"{path}: is not in a known ligand format; the name must end in one of "
            f"{', '.join(readers)}"
        )
    with require("rdkit.rdBase", "molecules").BlockLogs():
        parsed = readers[suffix](read_whole(path).decode("utf-8", "replace"), removeHs=False)
        if parsed is None or not parsed.GetNumConformers() or not parsed.GetConformer().Is3D():
            raise DataError(f"{path}: holds no molecule with coordinates in three dimensions")
        chem.AssignStereochemistryFrom3D(parsed)
        molecule = chem.AddHs(parsed, addCoords=True)
    shape = np.asarray(molecule.GetConformer().GetPositions(), dtype=np.float32)
    return _component(molecule, shape, path.name, code)


def _component(molecule: Any, shape: npt.NDArray[np.float32], name: str, code: str) -> Component:
    chem = require("rdkit.Chem", "molecules")
    chem.Kekulize(molecule, clearAromaticFlags=False)
    atoms, bonds = list(molecule.GetAtoms()), list(molecule.GetBonds())
    elements = np.array([atom.GetAtomicNum() for atom in atoms], dtype=np.uint8)
    pairs = [(bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()) for bond in bonds]
    return Component(
        code=code,
        name=name,
        type="NON-POLYMER",
        parent="",
        letter="",
        status="",
        replaced_by="",
        atoms=(names := _numbered(elements)),
        other_names=names,
        elements=elements,
        charges=np.array([atom.GetFormalCharge() for atom in atoms], dtype=np.int8),
        leaving=np.zeros(len(atoms), dtype=np.bool_),
        aromatic=np.array([atom.GetIsAromatic() for atom in atoms], dtype=np.bool_),
        ideal=shape,
        model=np.full((len(atoms), 3), np.nan, dtype=np.float32),
        bonds=np.array(pairs, dtype=np.int32).reshape(-1, 2),
        orders=np.array([_order(bond) for bond in bonds], dtype=np.uint8),
        aromatic_bonds=np.array([bond.GetIsAromatic() for bond in bonds], dtype=np.bool_),
    )


def _order(bond: Any) -> int:
    """Return the order in the dictionary; 0 for a bond without one, as to a metal."""
    order = int(bond.GetBondType())
    return order if order in _ORDERS else 0


def _shape(molecule: Any, smiles: str) -> npt.NDArray[np.float32]:
    if molecule.GetNumAtoms() == 1:
        return np.zeros((1, 3), dtype=np.float32)
    geometry = require("rdkit.Chem.rdDistGeom", "molecules")
    for random in (False, True):
        settings = geometry.ETKDGv3()
        settings.randomSeed = xxhash.xxh3_64_intdigest(smiles.encode()) % (2**31 - 1)
        settings.maxIterations = _MAX_ATTEMPTS
        settings.useRandomCoords = random
        if _embeds(molecule, settings):
            return np.asarray(molecule.GetConformer().GetPositions(), dtype=np.float32)
    raise DataError(f"RDKit finds no shape for '{smiles}'; check the string")


def _numbered(elements: Array) -> Any:
    counts: dict[int, int] = {}
    names = []
    for element in elements.tolist():
        counts[element] = counts.get(element, 0) + 1
        names.append(f"{SYMBOLS[element].upper()}{counts[element]}")
    return np.array(names, dtype=np.str_)
