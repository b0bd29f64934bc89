"""Features from the periodic table: lookup tables by atomic number.

Periods count lanthanides as 8 and actinides as 9, groups put both into group 3, as GPS++ does.
"""

from functools import cache

import numpy as np

from bevatron.errors import require
from bevatron.typing import IntArray

NUM_ELEMENTS = 118
_NOBLE_GASES = np.array([2, 10, 18, 36, 54, 86, 118])

_LANTHANIDES = range(57, 72)
_ACTINIDES = range(89, 104)

_TYPES: tuple[tuple[int, ...], ...] = (
    (1, 6, 7, 8, 15, 16, 34),  # other non-metals
    (3, 11, 19, 37, 55, 87),  # alkali metals
    (4, 12, 20, 38, 56, 88),  # alkaline earth metals
    (),  # transition metals: all others
    tuple(_LANTHANIDES),
    tuple(_ACTINIDES),
    (13, 31, 49, 50, 81, 82, 83, 84, 113, 114, 115),  # other metals
    (5, 14, 32, 33, 51, 52),  # metalloids
    (9, 17, 35, 53, 85, 117),  # halogens
    (2, 10, 18, 36, 54, 86, 118),  # noble gases
)
_TRANSITION_METAL = 3

VAN_DER_WAALS_EDGES = (1.2, 1.5, 1.55, 1.6, 1.7, 1.8)
"""Å; the last of 7 bins is open upwards."""

COVALENT_EDGES = (0.33, 0.611, 0.66, 0.7, 0.77, 0.997, 1.04, 1.54)
"""Å; 9 bins. A radius on an edge belongs to the bin below."""


@cache
def element_tables() -> dict[str, IntArray]:
    """Index in the vocabulary by atomic number 0 to 118, for every feature of the element alone.

    Row 0 is unused: there is no such element.
    """
    period = np.zeros(NUM_ELEMENTS + 1, dtype=np.int64)
    group = np.zeros_like(period)
    kind = np.full_like(period, _TRANSITION_METAL)
    for number, members in enumerate(_TYPES):
        kind[list(members)] = number
    for z in range(1, NUM_ELEMENTS + 1):
        period[z] = _period(z) - 1
        group[z] = _group(z) - 1
    return {
        "atomic_number": np.maximum(np.arange(NUM_ELEMENTS + 1) - 1, 0),
        "period": period,
        "group": group,
        "element_type": kind,
    }


@cache
def radius_tables() -> dict[str, IntArray]:
    """Return indices from RDKit's periodic table by atomic number (Ying21)."""
    table = require("rdkit.Chem", "molecules").GetPeriodicTable()
    numbers = range(NUM_ELEMENTS + 1)
    valence = np.array([table.GetDefaultValence(z) for z in numbers])
    outer = np.array([table.GetNOuterElecs(z) for z in numbers])
    waals = np.array([table.GetRvdw(z) for z in numbers])
    covalent = np.array([table.GetRb0(z) for z in numbers])
    return {
        # -1 (none) to 3; all others, 4 included, share the last index.
        "default_valence": np.where((valence >= -1) & (valence <= 4), valence + 1, 5),
        "outer_electrons": np.where(outer <= 8, outer, 9),
        "van_der_waals_radius": np.searchsorted(VAN_DER_WAALS_EDGES, waals),
        "covalent_radius": np.searchsorted(COVALENT_EDGES, covalent),
    }


def _period(z: int) -> int:
    if z in _LANTHANIDES:
        return 8
    if z in _ACTINIDES:
        return 9
    return int(np.searchsorted(_NOBLE_GASES, z)) + 1


def _group(z: int) -> int:
    if z == 1:
        return 1
    if z in _LANTHANIDES or z in _ACTINIDES:
        return 3
    row = int(np.searchsorted(_NOBLE_GASES, z))
    if z == _NOBLE_GASES[row]:
        return 18
    place = z - (int(_NOBLE_GASES[row - 1]) if row else 0)
    if place <= 2:
        return place
    # Groups are counted from the right end beyond the second: a row has 8, 18 or 32 places.
    return 18 - (int(_NOBLE_GASES[row]) - z)
