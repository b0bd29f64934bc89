"""Fields and protocols shared by the readers of molecules."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from bevatron.data.readers.base import LARGEST_LABEL
from bevatron.data.samples import Field
from bevatron.errors import DataError
from bevatron.typing import Array, Arrays, FloatArray

RAW_MOLECULE_FIELDS: tuple[Field, ...] = (
    Field("smiles", "uint8", (), True, "UTF-8 bytes; empty where only a structure is given"),
    Field("block", "uint8", (), True, "UTF-8 bytes of an SDF entry; empty without one"),
    Field("binary", "uint8", (), True, "an RDKit molecule in RDKit's own bytes; empty without one"),
    Field("positions", "float32", (3,), True, "[N, 3] Å of the SMILES' atoms without explicit H"),
    Field("split", "int8", (), False, "0 train, 1 valid, 2 test, -1 = the file does not say"),
    Field("source", "int64", (2,), False, "(file, row), from 0"),
)
"""Fields of a raw molecule, in addition to ``targets`` (float32 [T], NaN = no label)."""

NO_BYTES = np.zeros(0, dtype=np.uint8)
NO_POSITIONS = np.zeros((0, 3), dtype=np.float32)


class MoleculeFile(Protocol):
    """One file of molecules, read lazily so that it pickles as little more than its name."""

    @property
    def name(self) -> str:
        """The path as given."""

    @property
    def content(self) -> str:
        """Hash of the content."""

    @property
    def num_rows(self) -> int:
        """Number of molecules."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the targets."""

    def raw(self, row: int) -> dict[str, Array]:
        """Return a molecule: some of `RAW_MOLECULE_FIELDS` and ``targets``."""

    def splits(self) -> Array | None:
        """Index into `bevatron.data.dataset.ROLES` of each row, or -1; None without a split."""

    def report(self) -> list[str]:
        """Lines for the log: what was found."""


class Geometry(Protocol):
    """3D structures, one per row of a table; a row may have none."""

    @property
    def content(self) -> str:
        """Hash of the content."""

    def of(self, row: int) -> Arrays:
        """``positions`` or ``block`` of a row, or nothing."""


def check_labels(values: FloatArray, name: str, where: Callable[[int], str]) -> None:
    """Refuse labels that float32 cannot hold; NaN = no label is fine.

    Raises DataError naming the first.

    Parameters
    ----------
    values : [n]
    name : name of the target
    where : names the place of a row in the file
    """
    wrong = np.flatnonzero(np.abs(values) > LARGEST_LABEL)
    if len(wrong):
        row = int(wrong[0])
        value = values[row]
        found = "infinite" if np.isinf(value) else f"{value:g}, beyond {LARGEST_LABEL:.1e}"
        raise DataError(f"{where(row)}: '{name}' is {found}")


def text_bytes(text: str | bytes) -> Array:
    """Bytes of a text as an array."""
    data = text.encode() if isinstance(text, str) else text
    return np.frombuffer(data, dtype=np.uint8)
