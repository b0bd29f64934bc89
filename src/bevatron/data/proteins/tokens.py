"""Tokens of AlphaFold3: residues that are one token, and their representative atoms.

A standard residue (20 amino acids, 4 ribo- and 4 deoxyribonucleotides, and the unknown one of each)
is one token; any other residue and any ligand is one token for each heavy atom (supplement of
AlphaFold3, section 2.6).
"""

from dataclasses import dataclass

from bevatron.data.readers.proteins.alphabet import CLASSES, LETTERS, UNKNOWN, Polymer

NUM_CLASSES = len(CLASSES)
"""Classes of a token: those of the alphabet."""

PROTEIN, RNA, DNA, LIGAND = 0, 1, 2, 3
"""Types of molecules."""

TYPES: dict[str, int] = {"protein": PROTEIN, "rna": RNA, "dna": DNA}
"""Type of a chain's kind, for the residues that are not standard; other kinds are ligands."""

_AMINO_ACIDS = "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL UNK"
_PURINES = {"A", "G"}
_PYRIMIDINES = {"C", "U", "T"}


@dataclass(frozen=True)
class Standard:
    """A residue that is one token.

    Attributes
    ----------
    restype : class of `alphabet.CLASSES`
    molecule : `PROTEIN`, `RNA` or `DNA`
    centre : atom from which distances of crops and confidences are taken: ``CA``, ``C1'``
    representative
        Atom of the distogram: ``CB`` (``CA`` of glycine), ``C4`` of a purine, ``C2`` of a
        pyrimidine; ``C1'`` of a nucleotide without a known base.
    frame : atoms of the token's frame: ``N CA C``, ``C1' C3' C4'``
    """

    restype: int
    molecule: int
    centre: str
    representative: str
    frame: tuple[str, str, str]


def _amino_acids() -> dict[str, Standard]:
    found = {}
    for code, letter in zip(_AMINO_ACIDS.split(), CLASSES[:21], strict=True):
        beta = "CA" if code == "GLY" else "CB"
        restype = LETTERS["protein"][letter]
        found[code] = Standard(restype, PROTEIN, "CA", beta, ("N", "CA", "C"))
    return found


def _nucleotides(kind: Polymer, prefix: str, molecule: int) -> dict[str, Standard]:
    found = {}
    for letter in "AGCTN" if kind == "dna" else "AGCUN":
        base = "C4" if letter in _PURINES else "C2" if letter in _PYRIMIDINES else "C1'"
        restype = LETTERS[kind][letter]
        frame = ("C1'", "C3'", "C4'")
        found[prefix + letter] = Standard(restype, molecule, "C1'", base, frame)
    return found


STANDARD: dict[str, Standard] = (
    _amino_acids() | _nucleotides("rna", "", RNA) | _nucleotides("dna", "D", DNA)
)
"""Standard residues by component; they are tokens in polymers only."""

_RARE = {"U": "SEC", "O": "PYL"}


def component_of_letter(kind: Polymer, letter: str) -> str:
    """Return the component of a letter of a sequence.

    Examples
    --------
    >>> [component_of_letter("protein", letter) for letter in "MBXU"]
    ['MET', 'ASP', 'UNK', 'SEC']
    >>> component_of_letter("dna", "A"), component_of_letter("rna", "R")
    ('DA', 'N')
    """
    if kind == "protein" and letter in _RARE:
        return _RARE[letter]
    return _BY_CLASS[LETTERS[kind][letter]]


_BY_CLASS = {standard.restype: code for code, standard in STANDARD.items()}

LIGAND_RESTYPE = UNKNOWN["protein"]
"""Class of the atoms of ligands."""


def residue_class(molecule: int, *letters: str) -> int:
    """Return the class of a residue that is not standard: that of the first letter that is known.

    Examples
    --------
    >>> residue_class(PROTEIN, "X", "M"), residue_class(PROTEIN, ""), residue_class(LIGAND, "M")
    (12, 20, 20)
    """
    kinds: dict[int, Polymer] = {PROTEIN: "protein", RNA: "rna", DNA: "dna"}
    if molecule == LIGAND:
        return LIGAND_RESTYPE
    kind = kinds[molecule]
    classes = (LETTERS[kind].get(letter, UNKNOWN[kind]) for letter in letters)
    return next((number for number in classes if number != UNKNOWN[kind]), UNKNOWN[kind])
