"""Chemical features of atoms and bonds, from RDKit, as vocabulary indices.

Definitions follow the official GPS++ code, which took them from OGB and from the Graphormer entry
of KDD Cup 2021. Every feature consists of a function from the atoms (or bonds) of one molecule to
integers and a rule that maps these to indices for many molecules at once. Values beyond a
vocabulary become its last index ("other").
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from bevatron.data.samples import ATOM_VOCABULARIES, BOND_VOCABULARIES, FeatureSet
from bevatron.errors import require
from bevatron.models.gpspp.features.elements import element_tables, radius_tables
from bevatron.typing import Array, IntArray

Values = Sequence[int]
"""One whole number per atom or bond."""

GASTEIGER_EDGES = (
    *(-0.87431233, -0.47758285, -0.38806704, -0.32606976, -0.28913129, -0.25853269),
    *(-0.24494531, -0.20136365, -0.12197541, -0.08234462, -0.06248558, -0.06079668),
    *(-0.05704827, -0.05296379, -0.04884997, -0.04390136, -0.03881107, -0.03328515),
    *(-0.02582824, -0.01916618, -0.01005982, 0.0013529, 0.01490858, 0.0276433),
    *(0.04070013, 0.05610381, 0.07337645, 0.08998278, 0.11564625, 0.14390777),
    *(0.18754518, 0.27317209, 1.0),
)
"""Upper bounds of the bins of a partial charge, e; index 33 beyond the last, and for NaN."""

WRITTEN = frozenset({"chiral_tag", "explicit_valence", "implicit_valence", "direction"})
"""Features that by definition depend on the order of a molecule's atoms and bonds."""

_HYBRIDISATIONS = ("SP", "SP2", "SP3", "SP3D", "SP3D2")
_BOND_TYPES = ("SINGLE", "DOUBLE", "TRIPLE", "AROMATIC")
_STEREO = ("STEREONONE", "STEREOZ", "STEREOE", "STEREOCIS", "STEREOTRANS", "STEREOANY")


@dataclass(frozen=True)
class Rule:
    """A feature: how to read it from a molecule, and how to turn it into an index.

    Attributes
    ----------
    read : maps (molecule, its atoms or bonds) to integers
    index : maps the integers of many molecules to indices of the vocabulary
    """

    read: Callable[[Any, Sequence[Any]], Values]
    index: Callable[[IntArray], IntArray]


def atom_columns(
    molecules: Sequence[Any], atoms: Sequence[Sequence[Any]], chosen: FeatureSet
) -> dict[str, IntArray]:
    """Compute the features of atoms of many molecules, except the environments.

    Parameters
    ----------
    molecules, atoms : RDKit molecules and the list of atoms of each

    Returns
    -------
    Name -> index in the vocabulary, [N] over all molecules.
    """
    numbers = _read(lambda _, atoms: [a.GetAtomicNum() for a in atoms], molecules, atoms)
    tables: Mapping[str, IntArray] = element_tables()
    rules = _atom_rules()
    columns = {}
    for name in chosen.atom:
        if name.startswith("environment_"):
            continue
        if name in rules:
            columns[name] = rules[name].index(_read(rules[name].read, molecules, atoms))
            continue
        if name not in tables:
            tables = {**tables, **radius_tables()}
        columns[name] = tables[name][numbers]
    return columns


def bond_columns(
    molecules: Sequence[Any], bonds: Sequence[Sequence[Any]], chosen: FeatureSet
) -> dict[str, IntArray]:
    """Compute the features of bonds of many molecules; see `atom_columns`."""
    rules = _bond_rules()
    return {
        name: rules[name].index(_read(rules[name].read, molecules, bonds)) for name in chosen.bond
    }


def _read(
    read: Callable[[Any, Sequence[Any]], Values],
    molecules: Sequence[Any],
    items: Sequence[Sequence[Any]],
) -> IntArray:
    values = [read(molecule, own) for molecule, own in zip(molecules, items, strict=True)]
    return np.fromiter(chain.from_iterable(values), dtype=np.int64)


def _capped(name: str, offset: int = 0) -> Callable[[IntArray], IntArray]:
    """Give each value from ``offset`` on an index; values that do not fit get the last one."""
    vocabulary = {**BOND_VOCABULARIES, **ATOM_VOCABULARIES}
    last = vocabulary[name] - 1

    def index(values: IntArray) -> IntArray:
        places = values - offset
        return np.where((places < 0) | (places > last), last, places)

    return index


def _listed(kind: Any, names: Sequence[str], other: int) -> Callable[[IntArray], IntArray]:
    """Map values of an RDKit enumeration to their index in ``names``."""
    values = {int(value): str(value) for value in kind.values.values()}
    table = np.full(max(values) + 1, other, dtype=np.int64)
    for value, name in values.items():
        if name in names:
            table[value] = names.index(name)
    return lambda found: table[found]


@cache
def _atom_rules() -> Mapping[str, Rule]:
    chem = require("rdkit.Chem", "molecules")
    return {
        "chiral_tag": Rule(
            lambda _, atoms: [int(a.GetChiralTag()) for a in atoms], _capped("chiral_tag")
        ),
        "degree": Rule(lambda _, atoms: [a.GetTotalDegree() for a in atoms], _capped("degree")),
        "formal_charge": Rule(
            lambda _, atoms: [a.GetFormalCharge() for a in atoms], _capped("formal_charge", -5)
        ),
        "num_hydrogens": Rule(
            lambda _, atoms: [a.GetTotalNumHs() for a in atoms], _capped("num_hydrogens")
        ),
        "num_radical_electrons": Rule(
            lambda _, atoms: [a.GetNumRadicalElectrons() for a in atoms],
            _capped("num_radical_electrons"),
        ),
        "hybridisation": Rule(
            lambda _, atoms: [int(a.GetHybridization()) for a in atoms],
            _listed(chem.HybridizationType, _HYBRIDISATIONS, len(_HYBRIDISATIONS)),
        ),
        "aromatic": Rule(lambda _, atoms: [a.GetIsAromatic() for a in atoms], _same),
        "in_ring": Rule(lambda _, atoms: [a.IsInRing() for a in atoms], _same),
        "chiral_centre": Rule(_chiral_centres, _same),
        "explicit_valence": Rule(
            lambda _, atoms: [_valence(a, explicit=True) for a in atoms],
            _capped("explicit_valence"),
        ),
        "implicit_valence": Rule(
            lambda _, atoms: [_valence(a, explicit=False) for a in atoms],
            _capped("implicit_valence"),
        ),
        "total_valence": Rule(
            lambda _, atoms: [a.GetTotalValence() for a in atoms], _capped("total_valence")
        ),
        "total_degree": Rule(
            lambda _, atoms: [a.GetTotalDegree() for a in atoms], _capped("total_degree")
        ),
        "gasteiger_charge": Rule(_gasteiger_bins, _same),
        "donor": Rule(lambda molecule, _: _family(molecule, "Donor"), _same),
        "acceptor": Rule(lambda molecule, _: _family(molecule, "Acceptor"), _same),
    }


@cache
def _bond_rules() -> Mapping[str, Rule]:
    chem = require("rdkit.Chem", "molecules")
    return {
        "bond_type": Rule(
            lambda _, bonds: [int(b.GetBondType()) for b in bonds],
            _listed(chem.BondType, _BOND_TYPES, len(_BOND_TYPES)),
        ),
        # Atropisomers, which RDKit did not know then, count as unknown stereo.
        "stereo": Rule(
            lambda _, bonds: [int(b.GetStereo()) for b in bonds],
            _listed(chem.BondStereo, _STEREO, _STEREO.index("STEREOANY")),
        ),
        "conjugated": Rule(lambda _, bonds: [b.GetIsConjugated() for b in bonds], _same),
        "in_ring": Rule(lambda _, bonds: [b.IsInRing() for b in bonds], _same),
        "direction": Rule(
            lambda _, bonds: [int(b.GetBondDir()) for b in bonds], _capped("direction")
        ),
    }


def _valence(atom: Any, explicit: bool) -> int:
    kinds = getattr(require("rdkit.Chem", "molecules"), "ValenceType", None)
    if kinds is None:  # before RDKit 2024.9
        return int(atom.GetExplicitValence() if explicit else atom.GetImplicitValence())
    return int(atom.GetValence(kinds.EXPLICIT if explicit else kinds.IMPLICIT))


def _same(values: IntArray) -> IntArray:
    return values


def _chiral_centres(molecule: Any, atoms: Sequence[Any]) -> Values:
    """0 for none, 1 for R, 2 for S.

    Computed only if something could be chiral, because the search is slow.
    """
    found = [0] * len(atoms)
    if any(map(int, (a.GetChiralTag() for a in atoms))):
        chem = require("rdkit.Chem", "molecules")
        for atom, label in chem.FindMolChiralCenters(molecule):
            found[atom] = {"R": 1, "S": 2}.get(label, 0)
    return found


def _gasteiger_bins(molecule: Any, atoms: Sequence[Any]) -> Values:
    require("rdkit.Chem.rdPartialCharges", "molecules").ComputeGasteigerCharges(molecule)
    charges = [a.GetDoubleProp("_GasteigerCharge") for a in atoms]
    other = len(GASTEIGER_EDGES)
    return [
        int(np.searchsorted(GASTEIGER_EDGES, charge)) if math.isfinite(charge) else other
        for charge in charges
    ]


@cache
def _feature_factory() -> Any:
    config = require("rdkit.RDConfig", "molecules")
    features = require("rdkit.Chem.ChemicalFeatures", "molecules")
    return features.BuildFeatureFactory(f"{config.RDDataDir}/BaseFeatures.fdef")


def _family(molecule: Any, family: str) -> Values:
    found = [0] * molecule.GetNumAtoms()
    for feature in _feature_factory().GetFeaturesForMol(molecule, includeOnly=family):
        for atom in feature.GetAtomIds():
            found[atom] = 1
    return found


def stack(columns: Mapping[str, Array], names: Sequence[str], rows: int) -> Array:
    """Stack columns in a feature set's order, int16 [rows, features]."""
    if not rows:
        return np.zeros((0, len(names)), dtype=np.int16)
    return np.stack([columns[name] for name in names], axis=1).astype(np.int16)
