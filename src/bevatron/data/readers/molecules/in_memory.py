"""Molecules in memory, SMILES or RDKit molecules, as a reader."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from bevatron.data.readers.molecules.base import check_labels, text_bytes
from bevatron.data.readers.molecules.reader import MoleculeReader
from bevatron.errors import DataError
from bevatron.output import counted
from bevatron.typing import Array


class GivenMolecules:
    """A list of molecules with the interface of a file.

    Parameters
    ----------
    molecules
        SMILES, or RDKit molecules, which keep their conformers; None and NaN, pandas' signs of a
        missing entry, are not molecules and keep their places.
    targets : [n, T] or [n]
        NaN = no label; None for molecules to predict.
    """

    name = "molecules"

    def __init__(
        self, molecules: Sequence[Any], targets: Any = None, names: Sequence[str] | None = None
    ) -> None:
        self._items: list[tuple[str, bytes]] = []
        for number, molecule in enumerate(molecules):
            if _is_missing(molecule):
                self._items.append(("smiles", b""))
            elif isinstance(molecule, str):
                self._items.append(("smiles", molecule.encode()))
            elif hasattr(molecule, "ToBinary"):
                self._items.append(("binary", molecule.ToBinary()))
            else:
                raise DataError(
                    f"molecule {number}: expected a SMILES or an RDKit molecule, got "
                    f"{type(molecule).__name__}"
                )
        self._values = None
        self.targets: tuple[str, ...] = ()
        if targets is not None:
            values = np.asarray(targets, dtype=np.float64)
            values = values.reshape(len(values), -1)
            if len(values) != len(self._items):
                raise DataError(f"targets: {len(values)} rows for {len(self._items)} molecules")
            width = values.shape[1]
            self.targets = tuple(names or (f"target_{i}" for i in range(width)))
            if len(self.targets) != width:
                raise DataError(f"targets: {width} columns but {len(self.targets)} names")
            for name, column in zip(self.targets, values.T, strict=True):
                check_labels(column, name, lambda row: f"molecule {row}")
            self._values = values.astype(np.float32)

    @property
    def content(self) -> str:
        """Hash of molecules and targets."""
        digest = xxhash.xxh3_128()
        for kind, data in self._items:
            digest.update(f"{kind} {len(data)} ".encode() + data)
        if self._values is not None:
            digest.update(self._values.tobytes())
        return digest.hexdigest()

    @property
    def num_rows(self) -> int:
        """Number of molecules."""
        return len(self._items)

    def raw(self, row: int) -> dict[str, Array]:
        """Return one molecule."""
        kind, data = self._items[row]
        sample: dict[str, Array] = {kind: text_bytes(data)}
        if self._values is not None:
            sample["targets"] = self._values[row]
        return sample

    def splits(self) -> Array | None:
        """None: a list has no split."""
        return None

    def report(self) -> list[str]:
        """Report the number of molecules."""
        return [counted(self.num_rows, "molecule")]


def _is_missing(molecule: Any) -> bool:
    if molecule is None or type(molecule).__name__ == "NAType":
        return True
    return isinstance(molecule, float) and bool(np.isnan(molecule))


def molecules_in_memory(
    molecules: Sequence[Any], targets: Any = None, names: Sequence[str] | None = None
) -> MoleculeReader:
    """Build a reader of SMILES or RDKit molecules; see `GivenMolecules`.

    Examples
    --------
    >>> reader = molecules_in_memory(["CCO", "C"], targets=[1.0, 2.0])
    >>> [bytes(sample["smiles"]) for sample in reader.read(0, 2)]
    [b'CCO', b'C']
    """
    return MoleculeReader([GivenMolecules(molecules, targets, names)])
