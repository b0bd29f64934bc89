"""Residues of proteins as numbers: types, atom names, torsions, rigid groups and their coordinates.

Residue types are numbered as in `bevatron.data.readers.proteins.alphabet`: 0 to 19 in the order
ARNDCQEGHILKMFPSTWYV, 20 unknown (no atoms here). Atoms are numbered in two ways: *atom37* has one
slot for each heavy-atom name that occurs, *atom14* lists the heavy atoms of a residue. Both are
those of AlphaFold2 (supplement, section 1.8.4 and table 2); slots without an atom point to slot 0.

Rigid groups: 0 backbone, 1 pre-omega, 2 phi (both without heavy atoms), 3 psi, 4 to 7 chi 1 to 4.
Torsions: 0 pre-omega, 1 phi, 2 psi, 3 to 6 chi 1 to 4.
"""

import numpy as np
import numpy.typing as npt

from bevatron.typing import BoolArray, FloatArray, IntArray

UNKNOWN = 20
"""Residue type without atoms."""

_ATOM37 = """
N CA C CB O CG CG1 CG2 OG OG1 SG CD CD1 CD2 ND1 ND2 OD1 OD2 SD CE CE1 CE2 CE3 NE NE1 NE2 OE1 OE2 CH2
NH1 NH2 OH CZ CZ2 CZ3 NZ OXT
"""

ATOM37 = tuple(_ATOM37.split())
"""Names of the 37 slots."""

N, CA, C, CB, O = range(5)  # noqa: E741
"""Slots of the backbone and of CB; in atom14 C is 2, O is 3 and CB is 4."""

VAN_DER_WAALS_RADIUS = {"C": 1.7, "N": 1.55, "O": 1.52, "S": 1.8}
"""Å, by element."""

_SWAPS = {
    "ASP": (("OD1", "OD2"),),
    "GLU": (("OE1", "OE2"),),
    "PHE": (("CD1", "CD2"), ("CE1", "CE2")),
    "TYR": (("CD1", "CD2"), ("CE1", "CE2")),
}
"""Atoms whose names are interchangeable: a turn of the last chi by 180 degrees exchanges them."""

# Residue types in their order with the atoms along the side chain's torsions; below each its heavy
# atoms in the order of atom14: name, rigid group, literature position in the group's frame in Å.
_RESIDUES = """
ALA:
    N 0 -0.525 1.363 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.526 0.000 0.000
    O 3 0.627 1.062 0.000
    CB 0 -0.529 -0.774 -1.205
ARG: N CA CB CG CD NE CZ
    N 0 -0.524 1.362 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.525 0.000 0.000
    O 3 0.626 1.062 0.000
    CB 0 -0.524 -0.778 -1.209
    CG 4 0.616 1.390 0.000
    CD 5 0.564 1.414 0.000
    NE 6 0.539 1.357 0.000
    CZ 7 0.758 1.093 0.000
    NH1 7 0.206 2.301 0.000
    NH2 7 2.078 0.978 0.000
ASN: N CA CB CG OD1
    N 0 -0.536 1.357 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.526 0.000 0.000
    O 3 0.625 1.062 0.000
    CB 0 -0.531 -0.787 -1.200
    CG 4 0.584 1.399 0.000
    OD1 5 0.633 1.059 0.000
    ND2 5 0.593 -1.188 0.001
ASP: N CA CB CG OD1
    N 0 -0.525 1.362 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.527 0.000 0.000
    O 3 0.626 1.062 0.000
    CB 0 -0.526 -0.778 -1.208
    CG 4 0.593 1.398 0.000
    OD1 5 0.610 1.091 0.000
    OD2 5 0.592 -1.101 -0.003
CYS: N CA CB SG
    N 0 -0.522 1.362 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.524 0.000 0.000
    O 3 0.625 1.062 0.000
    CB 0 -0.519 -0.773 -1.212
    SG 4 0.728 1.653 0.000
GLN: N CA CB CG CD OE1
    N 0 -0.526 1.361 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.526 0.000 0.000
    O 3 0.626 1.062 0.000
    CB 0 -0.525 -0.779 -1.207
    CG 4 0.615 1.393 0.000
    CD 5 0.587 1.399 0.000
    OE1 6 0.634 1.060 0.000
    NE2 6 0.593 -1.189 -0.001
GLU: N CA CB CG CD OE1
    N 0 -0.528 1.361 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.526 0.000 0.000
    O 3 0.626 1.062 0.000
    CB 0 -0.526 -0.781 -1.207
    CG 4 0.615 1.392 0.000
    CD 5 0.600 1.397 0.000
    OE1 6 0.607 1.095 0.000
    OE2 6 0.589 -1.104 -0.001
GLY:
    N 0 -0.572 1.337 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.517 0.000 0.000
    O 3 0.626 1.062 0.000
HIS: N CA CB CG ND1
    N 0 -0.527 1.360 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.525 0.000 0.000
    O 3 0.625 1.063 0.000
    CB 0 -0.525 -0.778 -1.208
    CG 4 0.600 1.370 0.000
    ND1 5 0.744 1.160 0.000
    CD2 5 0.889 -1.021 0.003
    CE1 5 2.030 0.851 0.002
    NE2 5 2.145 -0.466 0.004
ILE: N CA CB CG1 CD1
    N 0 -0.493 1.373 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.527 0.000 0.000
    O 3 0.627 1.062 0.000
    CB 0 -0.536 -0.793 -1.213
    CG1 4 0.534 1.437 0.000
    CG2 4 0.540 -0.785 -1.199
    CD1 5 0.619 1.391 0.000
LEU: N CA CB CG CD1
    N 0 -0.520 1.363 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.525 0.000 0.000
    O 3 0.625 1.063 0.000
    CB 0 -0.522 -0.773 -1.214
    CG 4 0.678 1.371 0.000
    CD1 5 0.530 1.430 0.000
    CD2 5 0.535 -0.774 1.200
LYS: N CA CB CG CD CE NZ
    N 0 -0.526 1.362 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.526 0.000 0.000
    O 3 0.626 1.062 0.000
    CB 0 -0.524 -0.778 -1.208
    CG 4 0.619 1.390 0.000
    CD 5 0.559 1.417 0.000
    CE 6 0.560 1.416 0.000
    NZ 7 0.554 1.387 0.000
MET: N CA CB CG SD CE
    N 0 -0.521 1.364 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.525 0.000 0.000
    O 3 0.625 1.062 0.000
    CB 0 -0.523 -0.776 -1.210
    CG 4 0.613 1.391 0.000
    SD 5 0.703 1.695 0.000
    CE 6 0.320 1.786 0.000
PHE: N CA CB CG CD1
    N 0 -0.518 1.363 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.524 0.000 0.000
    O 3 0.626 1.062 0.000
    CB 0 -0.525 -0.776 -1.212
    CG 4 0.607 1.377 0.000
    CD1 5 0.709 1.195 0.000
    CD2 5 0.706 -1.196 0.000
    CE1 5 2.102 1.198 0.000
    CE2 5 2.098 -1.201 0.000
    CZ 5 2.794 -0.003 -0.001
PRO: N CA CB CG CD
    N 0 -0.566 1.351 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.527 0.000 0.000
    O 3 0.621 1.066 0.000
    CB 0 -0.546 -0.611 -1.293
    CG 4 0.382 1.445 0.000
    CD 5 0.477 1.424 0.000
SER: N CA CB OG
    N 0 -0.529 1.360 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.525 0.000 0.000
    O 3 0.626 1.062 0.000
    CB 0 -0.518 -0.777 -1.211
    OG 4 0.503 1.325 0.000
THR: N CA CB OG1
    N 0 -0.517 1.364 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.526 0.000 0.000
    O 3 0.626 1.062 0.000
    CB 0 -0.516 -0.793 -1.215
    OG1 4 0.472 1.353 0.000
    CG2 4 0.550 -0.718 -1.228
TRP: N CA CB CG CD1
    N 0 -0.521 1.363 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.525 0.000 0.000
    O 3 0.627 1.062 0.000
    CB 0 -0.523 -0.776 -1.212
    CG 4 0.609 1.370 0.000
    CD1 5 0.824 1.091 0.000
    CD2 5 0.854 -1.148 -0.005
    NE1 5 2.140 0.690 -0.004
    CE2 5 2.186 -0.678 -0.007
    CE3 5 0.622 -2.530 -0.007
    CZ2 5 3.283 -1.543 -0.011
    CZ3 5 1.715 -3.389 -0.011
    CH2 5 3.028 -2.890 -0.013
TYR: N CA CB CG CD1
    N 0 -0.522 1.362 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.524 0.000 0.000
    O 3 0.627 1.062 0.000
    CB 0 -0.522 -0.776 -1.213
    CG 4 0.607 1.382 0.000
    CD1 5 0.716 1.195 0.000
    CD2 5 0.713 -1.194 -0.001
    CE1 5 2.107 1.200 -0.002
    CE2 5 2.104 -1.201 -0.003
    CZ 5 2.791 -0.001 -0.003
    OH 5 4.168 -0.002 -0.005
VAL: N CA CB CG1
    N 0 -0.494 1.373 0.000
    CA 0 0.000 0.000 0.000
    C 0 1.527 0.000 0.000
    O 3 0.627 1.062 0.000
    CB 0 -0.533 -0.795 -1.213
    CG1 4 0.540 1.429 0.000
    CG2 4 0.533 -0.776 1.203
"""


def _read() -> tuple[dict[str, list[str]], dict[str, dict[str, tuple[int, FloatArray]]]]:
    """Torsion atoms and atoms of each residue type, by three-letter name."""
    chains: dict[str, list[str]] = {}
    atoms: dict[str, dict[str, tuple[int, FloatArray]]] = {}
    for line in _RESIDUES.strip().split("\n"):
        if ":" in line:
            name, _, chain = line.partition(":")
            chains[name], atoms[name] = chain.split(), {}
        else:
            atom, group, *position = line.split()
            atoms[name][atom] = (int(group), np.array([float(x) for x in position]))
    return chains, atoms


_CHAINS, _ATOMS = _read()

RESIDUES = tuple(_ATOMS)
"""Three-letter names of types 0 to 19."""

ATOM14 = (*(tuple(atoms) for atoms in _ATOMS.values()), ())
"""Names of the heavy atoms of each type, at most 14."""


def _atom_tables() -> tuple[BoolArray, BoolArray, IntArray, IntArray, IntArray]:
    mask14, to37 = np.zeros((21, 14), dtype=bool), np.zeros((21, 14), dtype=np.int64)
    mask37, to14 = np.zeros((21, 37), dtype=bool), np.zeros((21, 37), dtype=np.int64)
    swap = np.tile(np.arange(14), (21, 1))
    for residue, names in enumerate(ATOM14):
        for slot, name in enumerate(names):
            slot37 = ATOM37.index(name)
            mask14[residue, slot] = mask37[residue, slot37] = True
            to37[residue, slot], to14[residue, slot37] = slot37, slot
    for residue_name, pairs in _SWAPS.items():
        residue = RESIDUES.index(residue_name)
        for pair in pairs:
            slots = [ATOM14[residue].index(name) for name in pair]
            swap[residue, slots] = slots[::-1]
    return mask14, mask37, to37, to14, swap


ATOM14_MASK, ATOM37_MASK, ATOM14_TO_ATOM37, ATOM37_TO_ATOM14, ATOM14_SWAP = _atom_tables()
"""Which slots hold an atom, bool [21, 14] and [21, 37]; the slot of one numbering in the other,
int64 [21, 14] and [21, 37]; the slot that an atom exchanges its name with, int64 [21, 14]."""

ATOM14_AMBIGUOUS: BoolArray = np.arange(14) != ATOM14_SWAP
"""Atoms with interchangeable names, bool [21, 14]."""


def _torsion_tables() -> tuple[BoolArray, IntArray, BoolArray]:
    mask, atoms = np.zeros((21, 4), dtype=bool), np.zeros((21, 4, 4), dtype=np.int64)
    periodic = np.zeros((21, 4), dtype=bool)
    for residue, (name, chain) in enumerate(_CHAINS.items()):
        count = max(len(chain) - 3, 0)
        mask[residue, :count] = True
        for chi in range(count):
            atoms[residue, chi] = [ATOM37.index(atom) for atom in chain[chi : chi + 4]]
        periodic[residue, count - 1] = name in _SWAPS
    return mask, atoms, periodic


CHI_MASK, CHI_ATOMS, CHI_PI_PERIODIC = _torsion_tables()
"""Which chi a residue has, bool [21, 4]; its four atoms in atom37, int64 [21, 4, 4]; whether half a
turn gives the same residue with two atoms renamed, bool [21, 4]."""


def _group_atoms() -> tuple[BoolArray, IntArray]:
    mask, atoms = np.zeros((21, 8), dtype=bool), np.zeros((21, 8, 3), dtype=np.int64)
    mask[:, [0, 3]] = True
    mask[:, 4:] = CHI_MASK
    atoms[:, 0], atoms[:, 3] = (C, CA, N), (CA, C, O)
    atoms[:, 4:] = CHI_ATOMS[:, :, 1:]
    return mask, atoms


GROUP_MASK, GROUP_ATOMS = _group_atoms()
"""Which rigid groups a residue has, bool [21, 8]; three atoms in atom37 that fix each: the x axis
points from the first to the second, the origin (the other way in the backbone), and the third is in
the xy plane with y > 0, int64 [21, 8, 3]."""

GROUP_AMBIGUOUS: BoolArray = np.concatenate([np.zeros((21, 4), bool), CHI_PI_PERIODIC], axis=1)
"""Rigid groups with interchangeable names, bool [21, 8]."""


def _literature() -> tuple[IntArray, npt.NDArray[np.float32], FloatArray]:
    group = np.zeros((21, 14), dtype=np.int64)
    position = np.zeros((21, 14, 3), dtype=np.float32)
    radius = np.zeros((21, 14))
    for residue, atoms in enumerate(_ATOMS.values()):
        for slot, (name, (number, xyz)) in enumerate(atoms.items()):
            group[residue, slot], position[residue, slot] = number, xyz
            radius[residue, slot] = VAN_DER_WAALS_RADIUS[name[0]]
    return group, position, radius


ATOM14_GROUP, ATOM14_POSITION, ATOM14_RADIUS = _literature()
"""Rigid group of each atom, int64 [21, 14]; its position in the group's frame, float32 [21, 14, 3]
Å; its van der Waals radius, float64 [21, 14] Å."""

ATOM14_MEMBER: BoolArray = ATOM14_GROUP[..., None] == np.arange(8)
"""Whether an atom slot is in a rigid group, bool [21, 14, 8]; empty slots are in the backbone."""


def _frame(x_axis: FloatArray, in_xy: FloatArray, origin: FloatArray) -> FloatArray:
    e_1 = x_axis / np.linalg.norm(x_axis)
    across = in_xy - np.dot(in_xy, e_1) * e_1
    e_2 = across / np.linalg.norm(across)
    frame = np.eye(4)
    frame[:3] = np.stack([e_1, e_2, np.cross(e_1, e_2), origin], axis=1)
    return frame


def _group_frames() -> npt.NDArray[np.float32]:
    frames = np.zeros((21, 8, 4, 4))
    frames[:UNKNOWN, :2] = np.eye(4)
    for residue, (chain, atoms) in enumerate(zip(_CHAINS.values(), _ATOMS.values(), strict=True)):
        n, ca, c = (atoms[name][1] for name in ("N", "CA", "C"))
        frames[residue, 2] = _frame(n - ca, np.array([1.0, 0.0, 0.0]), n)
        frames[residue, 3] = _frame(c - ca, ca - n, c)
        for chi in range(len(chain) - 3):
            end = atoms[chain[chi + 2]][1]
            if chi == 0:
                frames[residue, 4] = _frame(end - ca, n - ca, end)
            else:
                frames[residue, 4 + chi] = _frame(end, np.array([-1.0, 0.0, 0.0]), end)
    return frames.astype(np.float32)


GROUP_FRAME = _group_frames()
"""Frame of each rigid group at torsion 0 in that of its parent (backbone, or the chi before), as
homogeneous matrices, float32 [21, 8, 4, 4]. Zero where a residue has no such group, which includes
all groups of an unknown residue, as in AlphaFold2."""
