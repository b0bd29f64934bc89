"""The classes of residues in the rows of alignments: one alphabet for proteins, RNA and DNA.

Class 0 to 19 are the amino acids in the order ARNDCQEGHILKMFPSTWYV, 20 an unknown one; 21 to 24 are
A G C U of RNA, 25 an unknown one; 26 to 29 are A G C T of DNA, 30 an unknown one; 31 is the gap.
These are AlphaFold3's classes. AlphaFold2 knows the first 21 and calls the gap 21.
"""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Polymer = Literal["protein", "rna", "dna"]
"""Kinds of polymers."""

POLYMERS: tuple[Polymer, ...] = get_args(Polymer)

CLASSES = "ARNDCQEGHILKMFPSTWYVX" + "AGCUN" + "AGCTN" + "-"
"""The letter of each class."""

GAP = len(CLASSES) - 1
"""Class of the gap."""

UNKNOWN: dict[Polymer, int] = {"protein": 20, "rna": 25, "dna": 30}
"""Class of an unknown residue."""

LETTERS: dict[Polymer, dict[str, int]] = {
    "protein": {letter: number for number, letter in enumerate(CLASSES[:21])}
    # Aspartate or asparagine, glutamate or glutamine, selenocysteine, leucine or isoleucine,
    # pyrrolysine: as the alignments of AlphaFold2 and AlphaFold3 read them.
    | {"B": 3, "Z": 6, "U": 4, "J": 20, "O": 20},
    "rna": {letter: number for number, letter in enumerate("AGCUN", start=21)}
    | {"T": 24}
    | dict.fromkeys("RYSWKMBDHVXI", 25),
    "dna": {letter: number for number, letter in enumerate("AGCTN", start=26)}
    | {"U": 29}
    | dict.fromkeys("RYSWKMBDHVXI", 30),
}
"""Class of each letter of a sequence, in upper case; ambiguous letters are unknown residues."""


def sequence_classes(kind: Polymer, sequence: str) -> npt.NDArray[np.int8]:
    """Return the classes of a sequence's letters, as in queries of alignments, [L].

    Examples
    --------
    >>> sequence_classes("rna", "GA?").tolist()
    [22, 21, 25]
    """
    letters, unknown = LETTERS[kind], UNKNOWN[kind]
    return np.array([letters.get(letter, unknown) for letter in sequence], dtype=np.int8)
