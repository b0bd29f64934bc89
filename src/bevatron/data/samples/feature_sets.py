"""The features stored for atoms and bonds as integers: names and numbers of values.

The sets are those of the GPS++ report (arXiv 2212.02229, table 2): OGB's own features, the 28 of
the Graphormer entry of KDD Cup 2021, and three that were searched for. How a value is computed
from a molecule is in `bevatron.models.gpspp.features`; an embedding table of a feature has one
row per value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bevatron.errors import ConfigError

FEATURES_VERSION = 2
"""Version of the computation of features; stores and models record theirs, 1 if they record none.

1: eigenvectors depend on the order in which the atoms of a molecule are written. 2: they do not.
"""

ATOM_VOCABULARIES: Mapping[str, int] = MappingProxyType(
    {
        "atomic_number": 119,
        "period": 9,
        "group": 18,
        "element_type": 10,
        "chiral_tag": 4,
        "degree": 12,
        "formal_charge": 12,
        "num_hydrogens": 10,
        "num_radical_electrons": 6,
        "hybridisation": 6,
        "aromatic": 2,
        "in_ring": 2,
        "chiral_centre": 3,
        "explicit_valence": 13,
        "implicit_valence": 13,
        "total_valence": 26,
        "total_degree": 32,
        "default_valence": 6,
        "outer_electrons": 10,
        "van_der_waals_radius": 7,
        "covalent_radius": 9,
        "environment_2": 18,
        "environment_3": 25,
        "environment_4": 32,
        "environment_5": 39,
        "environment_6": 42,
        "environment_7": 46,
        "environment_8": 47,
        "gasteiger_charge": 34,
        "donor": 2,
        "acceptor": 2,
    }
)
"""Number of values of every feature of an atom."""

BOND_VOCABULARIES: Mapping[str, int] = MappingProxyType(
    {"bond_type": 5, "stereo": 6, "conjugated": 2, "in_ring": 2, "direction": 16}
)
"""Number of values of every feature of a bond."""


@dataclass(frozen=True)
class FeatureSet:
    """Features of atoms and bonds, in the order of their columns.

    Attributes
    ----------
    name : as in configurations
    atom, bond : names of the features

    Examples
    --------
    >>> sum(feature_set("set1").atom_sizes), sum(feature_set("set1").bond_sizes)
    (203, 13)
    """

    name: str
    atom: tuple[str, ...]
    bond: tuple[str, ...]

    @property
    def atom_sizes(self) -> tuple[int, ...]:
        """Number of values of every column of ``atom_features``."""
        return tuple(ATOM_VOCABULARIES[name] for name in self.atom)

    @property
    def bond_sizes(self) -> tuple[int, ...]:
        """Number of values of every column of ``bond_features``."""
        return tuple(BOND_VOCABULARIES[name] for name in self.bond)


_ELEMENT = ("atomic_number", "period", "group", "element_type")
_ORIGINAL = (
    "atomic_number",
    "chiral_tag",
    "degree",
    "formal_charge",
    "num_hydrogens",
    "num_radical_electrons",
    "hybridisation",
    "aromatic",
    "in_ring",
)
_YING21 = (
    *_ORIGINAL,
    "explicit_valence",
    "implicit_valence",
    "total_valence",
    "total_degree",
    "default_valence",
    "outer_electrons",
    "van_der_waals_radius",
    "covalent_radius",
    *(f"environment_{radius}" for radius in range(2, 9)),
    "gasteiger_charge",
    "donor",
    "acceptor",
    "chiral_centre",
)
_SET1 = (
    *_ELEMENT,
    "degree",
    "formal_charge",
    "num_hydrogens",
    "num_radical_electrons",
    "aromatic",
    "in_ring",
    "chiral_centre",
)
_SET2 = (
    *_ELEMENT,
    "degree",
    "num_hydrogens",
    "num_radical_electrons",
    "hybridisation",
    "aromatic",
    "in_ring",
    "chiral_centre",
)
_SET3 = (
    *_ELEMENT,
    "degree",
    "formal_charge",
    "num_hydrogens",
    "num_radical_electrons",
    "hybridisation",
    "in_ring",
    "chiral_centre",
)
_YING21_BONDS = ("bond_type", "stereo", "conjugated", "in_ring", "direction")

FEATURE_SETS: Mapping[str, FeatureSet] = MappingProxyType(
    {
        made.name: made
        for made in (
            FeatureSet("set1", _SET1, ("bond_type", "stereo", "in_ring")),
            FeatureSet("set2", _SET2, ("stereo", "conjugated", "in_ring")),
            FeatureSet("set3", _SET3, ("stereo", "conjugated", "in_ring")),
            FeatureSet("original", _ORIGINAL, ("bond_type", "stereo", "conjugated")),
            FeatureSet("ying21", _YING21, _YING21_BONDS),
            FeatureSet("ying21_periodic", (*_ELEMENT, *_YING21[1:]), _YING21_BONDS),
        )
    }
)
"""All sets by name; ``ying21_periodic`` is Ying21 with period, group and type of the element."""


def feature_set(name: str) -> FeatureSet:
    """Look a feature set up.

    Raises ConfigError if there is none of that name.
    """
    if name not in FEATURE_SETS:
        raise ConfigError(f"feature_set: expected one of {', '.join(FEATURE_SETS)}, got '{name}'")
    return FEATURE_SETS[name]
