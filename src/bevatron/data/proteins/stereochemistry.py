"""Bond lengths and angles of proteins with their deviations, and bounds of distances from them.

Mean values and standard deviations in crystals: Engh and Huber, International Tables for
Crystallography F (2001), 18.3. Lengths in Å, angles in degrees.
"""

from functools import cache
from math import cos, pi, sin, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bevatron.data.proteins.constants import ATOM14, ATOM14_MASK, ATOM14_RADIUS, RESIDUES

PEPTIDE_BOND = (1.329, 0.014)
"""Length of C-N between residues and its deviation, Å."""

PEPTIDE_BOND_PROLINE = (1.341, 0.016)
"""The same where the second residue is proline."""

COS_CA_C_N = (-0.4473, 0.0311)
COS_C_N_CA = (-0.5203, 0.0353)
"""Cosines of the two angles between residues and their deviations."""

NO_BOUND = 1e10
"""Upper bound of a distance that has none, Å."""

_BONDS = """
ALA: CA-CB 1.520 0.021  N-CA 1.459 0.020  CA-C 1.525 0.026  C-O 1.229 0.019
ARG: CA-CB 1.535 0.022  CB-CG 1.521 0.027  CG-CD 1.515 0.025  CD-NE 1.460 0.017  NE-CZ 1.326 0.013
ARG: CZ-NH1 1.326 0.013  CZ-NH2 1.326 0.013  N-CA 1.459 0.020  CA-C 1.525 0.026  C-O 1.229 0.019
ASN: CA-CB 1.527 0.026  CB-CG 1.506 0.023  CG-OD1 1.235 0.022  CG-ND2 1.324 0.025  N-CA 1.459 0.020
ASN: CA-C 1.525 0.026  C-O 1.229 0.019
ASP: CA-CB 1.535 0.022  CB-CG 1.513 0.021  CG-OD1 1.249 0.023  CG-OD2 1.249 0.023  N-CA 1.459 0.020
ASP: CA-C 1.525 0.026  C-O 1.229 0.019
CYS: CA-CB 1.526 0.013  CB-SG 1.812 0.016  N-CA 1.459 0.020  CA-C 1.525 0.026  C-O 1.229 0.019
GLN: CA-CB 1.535 0.022  CB-CG 1.521 0.027  CG-CD 1.506 0.023  CD-OE1 1.235 0.022
GLN: CD-NE2 1.324 0.025  N-CA 1.459 0.020  CA-C 1.525 0.026  C-O 1.229 0.019
GLU: CA-CB 1.535 0.022  CB-CG 1.517 0.019  CG-CD 1.515 0.015  CD-OE1 1.252 0.011
GLU: CD-OE2 1.252 0.011  N-CA 1.459 0.020  CA-C 1.525 0.026  C-O 1.229 0.019
GLY: N-CA 1.456 0.015  CA-C 1.514 0.016  C-O 1.232 0.016
HIS: CA-CB 1.535 0.022  CB-CG 1.492 0.016  CG-ND1 1.369 0.015  CG-CD2 1.353 0.017
HIS: ND1-CE1 1.343 0.025  CD2-NE2 1.415 0.021  CE1-NE2 1.322 0.023  N-CA 1.459 0.020
HIS: CA-C 1.525 0.026  C-O 1.229 0.019
ILE: CA-CB 1.544 0.023  CB-CG1 1.536 0.028  CB-CG2 1.524 0.031  CG1-CD1 1.500 0.069
ILE: N-CA 1.459 0.020  CA-C 1.525 0.026  C-O 1.229 0.019
LEU: CA-CB 1.533 0.023  CB-CG 1.521 0.029  CG-CD1 1.514 0.037  CG-CD2 1.514 0.037  N-CA 1.459 0.020
LEU: CA-C 1.525 0.026  C-O 1.229 0.019
LYS: CA-CB 1.535 0.022  CB-CG 1.521 0.027  CG-CD 1.520 0.034  CD-CE 1.508 0.025  CE-NZ 1.486 0.025
LYS: N-CA 1.459 0.020  CA-C 1.525 0.026  C-O 1.229 0.019
MET: CA-CB 1.535 0.022  CB-CG 1.509 0.032  CG-SD 1.807 0.026  SD-CE 1.774 0.056  N-CA 1.459 0.020
MET: CA-C 1.525 0.026  C-O 1.229 0.019
PHE: CA-CB 1.535 0.022  CB-CG 1.509 0.017  CG-CD1 1.383 0.015  CG-CD2 1.383 0.015
PHE: CD1-CE1 1.388 0.020  CD2-CE2 1.388 0.020  CE1-CZ 1.369 0.019  CE2-CZ 1.369 0.019
PHE: N-CA 1.459 0.020  CA-C 1.525 0.026  C-O 1.229 0.019
PRO: CA-CB 1.531 0.020  CB-CG 1.495 0.050  CG-CD 1.502 0.033  CD-N 1.474 0.014  N-CA 1.468 0.017
PRO: CA-C 1.524 0.020  C-O 1.228 0.020
SER: CA-CB 1.525 0.015  CB-OG 1.418 0.013  N-CA 1.459 0.020  CA-C 1.525 0.026  C-O 1.229 0.019
THR: CA-CB 1.529 0.026  CB-OG1 1.428 0.020  CB-CG2 1.519 0.033  N-CA 1.459 0.020  CA-C 1.525 0.026
THR: C-O 1.229 0.019
TRP: CA-CB 1.535 0.022  CB-CG 1.498 0.018  CG-CD1 1.363 0.014  CG-CD2 1.432 0.017
TRP: CD1-NE1 1.375 0.017  NE1-CE2 1.371 0.013  CD2-CE2 1.409 0.012  CD2-CE3 1.399 0.015
TRP: CE2-CZ2 1.393 0.017  CE3-CZ3 1.380 0.017  CZ2-CH2 1.369 0.019  CZ3-CH2 1.396 0.016
TRP: N-CA 1.459 0.020  CA-C 1.525 0.026  C-O 1.229 0.019
TYR: CA-CB 1.535 0.022  CB-CG 1.512 0.015  CG-CD1 1.387 0.013  CG-CD2 1.387 0.013
TYR: CD1-CE1 1.389 0.015  CD2-CE2 1.389 0.015  CE1-CZ 1.381 0.013  CE2-CZ 1.381 0.013
TYR: CZ-OH 1.374 0.017  N-CA 1.459 0.020  CA-C 1.525 0.026  C-O 1.229 0.019
VAL: CA-CB 1.543 0.021  CB-CG1 1.524 0.021  CB-CG2 1.524 0.021  N-CA 1.459 0.020  CA-C 1.525 0.026
VAL: C-O 1.229 0.019
"""

_ANGLES = """
ALA: N-CA-CB 110.1 1.4  CB-CA-C 110.1 1.5  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
ARG: N-CA-CB 110.6 1.8  CB-CA-C 110.4 2.0  CA-CB-CG 113.4 2.2  CB-CG-CD 111.6 2.6
ARG: CG-CD-NE 111.8 2.1  CD-NE-CZ 123.6 1.4  NE-CZ-NH1 120.3 0.5  NE-CZ-NH2 120.3 0.5
ARG: NH1-CZ-NH2 119.4 1.1  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
ASN: N-CA-CB 110.6 1.8  CB-CA-C 110.4 2.0  CA-CB-CG 113.4 2.2  CB-CG-ND2 116.7 2.4
ASN: CB-CG-OD1 121.6 2.0  ND2-CG-OD1 121.9 2.3  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
ASP: N-CA-CB 110.6 1.8  CB-CA-C 110.4 2.0  CA-CB-CG 113.4 2.2  CB-CG-OD1 118.3 0.9
ASP: CB-CG-OD2 118.3 0.9  OD1-CG-OD2 123.3 1.9  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
CYS: N-CA-CB 110.8 1.5  CB-CA-C 111.5 1.2  CA-CB-SG 114.2 1.1  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
GLN: N-CA-CB 110.6 1.8  CB-CA-C 110.4 2.0  CA-CB-CG 113.4 2.2  CB-CG-CD 111.6 2.6
GLN: CG-CD-OE1 121.6 2.0  CG-CD-NE2 116.7 2.4  OE1-CD-NE2 121.9 2.3  N-CA-C 111.0 2.7
GLN: CA-C-O 120.1 2.1
GLU: N-CA-CB 110.6 1.8  CB-CA-C 110.4 2.0  CA-CB-CG 113.4 2.2  CB-CG-CD 114.2 2.7
GLU: CG-CD-OE1 118.3 2.0  CG-CD-OE2 118.3 2.0  OE1-CD-OE2 123.3 1.2  N-CA-C 111.0 2.7
GLU: CA-C-O 120.1 2.1
GLY: N-CA-C 113.1 2.5  CA-C-O 120.6 1.8
HIS: N-CA-CB 110.6 1.8  CB-CA-C 110.4 2.0  CA-CB-CG 113.6 1.7  CB-CG-ND1 123.2 2.5
HIS: CB-CG-CD2 130.8 3.1  CG-ND1-CE1 108.2 1.4  ND1-CE1-NE2 109.9 2.2  CE1-NE2-CD2 106.6 2.5
HIS: NE2-CD2-CG 109.2 1.9  CD2-CG-ND1 106.0 1.4  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
ILE: N-CA-CB 110.8 2.3  CB-CA-C 111.6 2.0  CA-CB-CG1 111.0 1.9  CB-CG1-CD1 113.9 2.8
ILE: CA-CB-CG2 110.9 2.0  CG1-CB-CG2 111.4 2.2  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
LEU: N-CA-CB 110.4 2.0  CB-CA-C 110.2 1.9  CA-CB-CG 115.3 2.3  CB-CG-CD1 111.0 1.7
LEU: CB-CG-CD2 111.0 1.7  CD1-CG-CD2 110.5 3.0  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
LYS: N-CA-CB 110.6 1.8  CB-CA-C 110.4 2.0  CA-CB-CG 113.4 2.2  CB-CG-CD 111.6 2.6
LYS: CG-CD-CE 111.9 3.0  CD-CE-NZ 111.7 2.3  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
MET: N-CA-CB 110.6 1.8  CB-CA-C 110.4 2.0  CA-CB-CG 113.3 1.7  CB-CG-SD 112.4 3.0
MET: CG-SD-CE 100.2 1.6  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
PHE: N-CA-CB 110.6 1.8  CB-CA-C 110.4 2.0  CA-CB-CG 113.9 2.4  CB-CG-CD1 120.8 0.7
PHE: CB-CG-CD2 120.8 0.7  CD1-CG-CD2 118.3 1.3  CG-CD1-CE1 120.8 1.1  CG-CD2-CE2 120.8 1.1
PHE: CD1-CE1-CZ 120.1 1.2  CD2-CE2-CZ 120.1 1.2  CE1-CZ-CE2 120.0 1.8  N-CA-C 111.0 2.7
PHE: CA-C-O 120.1 2.1
PRO: N-CA-CB 103.3 1.2  CB-CA-C 111.7 2.1  CA-CB-CG 104.8 1.9  CB-CG-CD 106.5 3.9
PRO: CG-CD-N 103.2 1.5  CA-N-CD 111.7 1.4  N-CA-C 112.1 2.6  CA-C-O 120.2 2.4
SER: N-CA-CB 110.5 1.5  CB-CA-C 110.1 1.9  CA-CB-OG 111.2 2.7  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
THR: N-CA-CB 110.3 1.9  CB-CA-C 111.6 2.7  CA-CB-OG1 109.0 2.1  CA-CB-CG2 112.4 1.4
THR: OG1-CB-CG2 110.0 2.3  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
TRP: N-CA-CB 110.6 1.8  CB-CA-C 110.4 2.0  CA-CB-CG 113.7 1.9  CB-CG-CD1 127.0 1.3
TRP: CB-CG-CD2 126.6 1.3  CD1-CG-CD2 106.3 0.8  CG-CD1-NE1 110.1 1.0  CD1-NE1-CE2 109.0 0.9
TRP: NE1-CE2-CD2 107.3 1.0  CE2-CD2-CG 107.3 0.8  CG-CD2-CE3 133.9 0.9  NE1-CE2-CZ2 130.4 1.1
TRP: CE3-CD2-CE2 118.7 1.2  CD2-CE2-CZ2 122.3 1.2  CE2-CZ2-CH2 117.4 1.0  CZ2-CH2-CZ3 121.6 1.2
TRP: CH2-CZ3-CE3 121.2 1.1  CZ3-CE3-CD2 118.8 1.3  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
TYR: N-CA-CB 110.6 1.8  CB-CA-C 110.4 2.0  CA-CB-CG 113.4 1.9  CB-CG-CD1 121.0 0.6
TYR: CB-CG-CD2 121.0 0.6  CD1-CG-CD2 117.9 1.1  CG-CD1-CE1 121.3 0.8  CG-CD2-CE2 121.3 0.8
TYR: CD1-CE1-CZ 119.8 0.9  CD2-CE2-CZ 119.8 0.9  CE1-CZ-CE2 119.8 1.6  CE1-CZ-OH 120.1 2.7
TYR: CE2-CZ-OH 120.1 2.7  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
VAL: N-CA-CB 111.5 2.2  CB-CA-C 111.4 1.9  CA-CB-CG1 110.9 1.5  CA-CB-CG2 110.9 1.5
VAL: CG1-CB-CG2 110.9 1.6  N-CA-C 111.0 2.7  CA-C-O 120.1 2.1
"""


def _read(text: str) -> dict[str, list[tuple[tuple[str, ...], float, float]]]:
    table: dict[str, list[tuple[tuple[str, ...], float, float]]] = {}
    for line in text.strip().split("\n"):
        name, _, entries = line.partition(":")
        words = entries.split()
        table.setdefault(name, []).extend(
            (tuple(atoms.split("-")), float(mean), float(deviation))
            for atoms, mean, deviation in zip(words[::3], words[1::3], words[2::3], strict=True)
        )
    return table


class DistanceBounds(NamedTuple):
    """Bounds of the distances between the atoms of a residue, float32 [21, 14, 14] Å."""

    lower: npt.NDArray[np.float32]
    upper: npt.NDArray[np.float32]


@cache
def distance_bounds(overlap_tolerance: float, deviations: float) -> DistanceBounds:
    r"""Bounds of the distances within residues, by residue type.

    Bonded atoms and those two bonds apart: mean :math:`\pm` ``deviations`` standard deviations. All
    others: no closer than the sum of their radii less ``overlap_tolerance`` (Å). AlphaFold2's
    supplement, section 1.9.11. 0 where there is no atom.
    """
    bonds, angles = _read(_BONDS), _read(_ANGLES)
    pair = ATOM14_MASK[:, :, None] & ATOM14_MASK[:, None, :] & ~np.eye(14, dtype=bool)
    reach = ATOM14_RADIUS[:, :, None] + ATOM14_RADIUS[:, None, :]
    lower = np.where(pair, reach - overlap_tolerance, 0.0)
    upper = np.where(pair, NO_BOUND, 0.0)
    for residue, name in enumerate(RESIDUES):
        lengths = {frozenset(atoms): (mean, spread) for atoms, mean, spread in bonds[name]}
        found = [(atoms, mean, spread) for atoms, mean, spread in bonds[name]]
        found += [
            ((a, c), *_opposite(lengths[frozenset((a, b))], lengths[frozenset((b, c))], mean, std))
            for (a, b, c), mean, std in angles[name]
        ]
        for atoms, mean, spread in found:
            i, j = (ATOM14[residue].index(atom) for atom in atoms)
            lower[residue, [i, j], [j, i]] = mean - deviations * spread
            upper[residue, [i, j], [j, i]] = mean + deviations * spread
    return DistanceBounds(lower.astype(np.float32), upper.astype(np.float32))


def _opposite(
    first: tuple[float, float], second: tuple[float, float], degrees: float, deviation: float
) -> tuple[float, float]:
    """Third side of a triangle by the law of cosines; its deviation if errors are independent."""
    (a, a_std), (b, b_std) = first, second
    angle, angle_std = degrees / 180 * pi, deviation / 180 * pi
    side = sqrt(a * a + b * b - 2 * a * b * cos(angle))
    by_angle = a * b * sin(angle) / side
    by_a, by_b = (a - b * cos(angle)) / side, (b - a * cos(angle)) / side
    return side, sqrt((by_angle * angle_std) ** 2 + (by_a * a_std) ** 2 + (by_b * b_std) ** 2)
