"""What the readers of molecules share: their options and what one file is asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from bevatron.data.samples import Field
from bevatron.typing import Array, Arrays

RAW_MOLECULE_FIELDS: tuple[Field, ...] = (
    Field("smiles", "uint8", (), True, "UTF-8 bytes; empty where only a structure is given"),
    Field("block", "uint8", (), True, "UTF-8 bytes of an SDF entry; empty without one"),
    Field("binary", "uint8", (), True, "an RDKit molecule in RDKit's own bytes; empty without one"),
    Field("positions", "float32", (3,), True, "[N, 3] Å of the SMILES' atoms without explicit H"),
    Field("split", "int8", (), False, "0 train, 1 valid, 2 test, -1 = the file does not say"),
    Field("source", "int64", (2,), False, "(file, row), from 0"),
)
"""What a reader of molecules yields, besides ``targets`` (float32 [T], NaN = no label)."""

SPLITS = ("train", "valid", "test")
"""Names of the parts of a given division, in the order of their numbers."""

NO_BYTES = np.zeros(0, dtype=np.uint8)
NO_POSITIONS = np.zeros((0, 3), dtype=np.float32)


@dataclass(frozen=True)
class MoleculeOptions:
    """Where a file of molecules has its SMILES, its targets and its 3D structures.

    Attributes
    ----------
    smiles
        Column of the SMILES; found by itself if left out (smiles, canonical_smiles, ...).
    targets
        Columns of what is to be predicted, or names of data in an SDF; found by itself where just
        one column of numbers could be meant.
    geometry
        File of 3D structures, row for row those of the table: an SDF, or an npz of positions.
        Coordinates inside a CXSMILES are taken without it.
    split
        Column that says train, valid or test; found by itself if it is called ``split``.
    unlabelled
        Look for no targets: the molecules are to be predicted.
    """

    smiles: str | None = None
    targets: tuple[str, ...] = ()
    geometry: Path | None = None
    split: str | None = None
    unlabelled: bool = False


class MoleculeFile(Protocol):
    """One file of molecules, read lazily so that it pickles as little more than its name."""

    @property
    def name(self) -> str:
        """As given."""

    @property
    def content(self) -> str:
        """Hash of what it holds."""

    @property
    def num_rows(self) -> int:
        """Number of molecules."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the targets."""

    def raw(self, row: int) -> dict[str, Array]:
        """Give a molecule: some of `RAW_MOLECULE_FIELDS` and ``targets``."""

    def splits(self) -> Array | None:
        """For each row the number of its part in `SPLITS`, -1 for none; None without a division."""

    def report(self) -> list[str]:
        """Lines that say what was found."""


class Geometry(Protocol):
    """3D structures, one per row of a table; a row may have none."""

    @property
    def content(self) -> str:
        """Hash of what it holds."""

    def of(self, row: int) -> Arrays:
        """``positions`` or ``block`` of a row, or nothing."""


def text_bytes(text: str | bytes) -> Array:
    """Bytes of a text as an array."""
    data = text.encode() if isinstance(text, str) else text
    return np.frombuffer(data, dtype=np.uint8)
