"""3D structures for a table of SMILES: SDF files and positions in an npz."""

import gzip
import mmap
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.ragged import pointer
from bevatron.data.readers.base import state_and_hash
from bevatron.data.readers.molecules.base import check_labels, text_bytes
from bevatron.errors import DataError
from bevatron.output import counted
from bevatron.typing import Array, Arrays, BoolArray, IntArray

_END = b"$$$$"
_ITEM = re.compile(r">[^<]*<([^>]+)>")


class SdfEntries:
    """Random access to the entries of an SDF as text.

    Raises DataError if it cannot be read or holds no entry.

    Parameters
    ----------
    path : the file; one ending in .gz is unpacked into memory
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state, self.content = state_and_hash(path)
        if not len(self):
            raise DataError(f"{path}: the file holds no structure")

    def __getstate__(self) -> dict[str, Any]:
        # With the offsets of the entries: finding them again means reading the whole file.
        return {name: getattr(self, name) for name in ("path", "state", "content", "_ends")}

    def __len__(self) -> int:
        return len(self._ends)

    def entry(self, number: int) -> bytes:
        """Text of one entry, without the line that ends it."""
        start = int(self._ends[number - 1, 1]) if number else 0
        return bytes(self._data[start : int(self._ends[number, 0])])

    def mentions(self, text: str) -> bool:
        """Whether the file contains a text."""
        return bool(self._data.find(text.encode()) >= 0)

    @cached_property
    def _data(self) -> Any:
        self.state.refuse_change()
        try:
            if self.path.suffix.lower() == ".gz":
                return gzip.decompress(self.path.read_bytes())
            with self.path.open("rb") as file:
                if not self.state.size:
                    return b""
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, EOFError) as error:
            raise DataError(f"{self.path}: cannot be read ({error})") from None

    @cached_property
    def _ends(self) -> IntArray:
        """End of each entry and beginning of the next, [n, 2]."""
        data, found, place = self._data, [], 0
        begin = 0
        while (at := data.find(_END, place)) >= 0:
            place = at + len(_END)
            if at and data[at - 1 : at] != b"\n":
                continue
            line = data.find(b"\n", at)
            begin = len(data) if line < 0 else line + 1
            found.append((at, begin))
        if bytes(data[begin:]).strip():
            found.append((len(data), len(data)))
        return np.array(found, dtype=np.int64).reshape(-1, 2)


class SdfGeometry:
    """Structures of an SDF for the rows of a table; DataError if the counts differ.

    Parameters
    ----------
    rows : [number of entries] or None
        The row that each entry belongs to; None = the entries are the rows.
    """

    def __init__(self, path: Path, num_rows: int, rows: IntArray | None = None) -> None:
        self.entries = SdfEntries(path)
        expected = num_rows if rows is None else len(rows)
        if len(self.entries) != expected:
            raise DataError(
                f"{path}: holds {len(self.entries)} structures for {expected} rows of the table; "
                f"give the SDF that belongs to it"
            )
        self._entry = np.full(num_rows, -1, dtype=np.int64)
        self._entry[np.arange(num_rows) if rows is None else rows] = np.arange(expected)

    @property
    def content(self) -> str:
        """Hash of the file."""
        return self.entries.content

    def of(self, row: int) -> Arrays:
        """``block`` of a row, or nothing."""
        number = int(self._entry[row])
        return {} if number < 0 else {"block": text_bytes(self.entries.entry(number))}


class NpzGeometry:
    """Positions of all atoms in an npz, and which of them are the SMILES' heavy atoms.

    The file holds per molecule ``n_atoms``, ``n_heavy``, ``map_status`` (0 = structure and SMILES
    disagree: no positions) and optionally ``idx``; per atom ``pos_e4`` (1e-4 Å); per heavy atom
    ``heavy_perm``, which atom of the molecule is atom k of the parsed SMILES. Raises DataError if
    the file lacks something or the two do not agree.

    Parameters
    ----------
    identifiers : [num_rows] or None
        The table's ``idx``, to check that both have the same order.
    """

    def __init__(self, path: Path, num_rows: int, identifiers: Array | None = None) -> None:
        self.path = path
        self.state, self.content = state_and_hash(path)
        found = len(self._arrays["n_atoms"])
        if found != num_rows:
            raise DataError(f"{path}: holds {found} molecules for {num_rows} rows of the table")
        own = self._arrays.get("idx")
        if identifiers is not None and own is not None and not np.array_equal(own, identifiers):
            row = int(np.flatnonzero(np.asarray(own) != np.asarray(identifiers))[0])
            raise DataError(
                f"{path}: molecule {row} has idx {own[row]}, the table's row {row} has "
                f"{identifiers[row]}; both must be in the same order"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("path", "state", "content")}

    def of(self, row: int) -> Arrays:
        """``positions`` of a row, or nothing."""
        if not self._usable[row]:
            return {}
        heavy = self._heavy[self._heavy_ptr[row] : self._heavy_ptr[row + 1]].astype(np.int64)
        atoms = self._atoms[self._atom_ptr[row] : self._atom_ptr[row + 1]]
        if len(heavy) and heavy.max() >= len(atoms):
            raise DataError(f"{self.path}: molecule {row}: heavy_perm names an atom that is not")
        return {"positions": (atoms[heavy] * 1e-4).astype(np.float32)}

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        self.state.refuse_change()
        needed = ("n_atoms", "n_heavy", "map_status", "pos_e4", "heavy_perm")
        try:
            with np.load(self.path, allow_pickle=False) as file:
                missing = [name for name in needed if name not in file]
                if missing:
                    raise DataError(
                        f"{self.path}: lacks '{missing[0]}'; a file of positions has "
                        f"{', '.join(needed)}"
                    )
                return {name: file[name] for name in (*needed, "idx") if name in file}
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: not a npz of positions ({error})") from None

    @cached_property
    def _usable(self) -> BoolArray:
        return np.asarray(self._arrays["map_status"] != 0)

    @cached_property
    def _atoms(self) -> Any:
        return self._arrays["pos_e4"]

    @cached_property
    def _heavy(self) -> Any:
        return self._arrays["heavy_perm"]

    @cached_property
    def _atom_ptr(self) -> IntArray:
        return pointer(self._arrays["n_atoms"])

    @cached_property
    def _heavy_ptr(self) -> IntArray:
        return pointer(self._arrays["n_heavy"])


class SdfFile:
    """An SDF as a file of molecules: structures, and targets from its data items.

    Parameters
    ----------
    targets : names of the data items that are targets
    """

    def __init__(self, path: Path, targets: tuple[str, ...]) -> None:
        self.entries = SdfEntries(path)
        self.name, self.targets = str(path), targets
        self.items = sorted(_items(self.entries.entry(0)))
        for target in targets:
            # A later entry may have what the first lacks.
            if target not in self.items and not self.entries.mentions(f"<{target}>"):
                listed = ", ".join(self.items) or "none"
                raise DataError(
                    f"{path}: no entry has a data item '{target}' (those of the first: {listed})"
                )

    @property
    def content(self) -> str:
        """Hash of the file."""
        return self.entries.content

    @property
    def num_rows(self) -> int:
        """Number of entries."""
        return len(self.entries)

    def raw(self, row: int) -> dict[str, Array]:
        """Return an entry and its targets."""
        text = self.entries.entry(row)
        sample: dict[str, Array] = {"block": text_bytes(text)}
        if self.targets:
            items = _items(text)
            first = {name: text.partition("\n")[0] for name, text in items.items()}
            values = [self._number(first.get(name, ""), name, row) for name in self.targets]
            sample["targets"] = np.array(values, dtype=np.float32)
        return sample

    def everything(self) -> dict[str, list[str | None]]:
        """Titles of the entries, under an empty name, and all data items by name, as text."""
        titles: list[str | None] = []
        columns: dict[str, list[str | None]] = {}
        for row in range(self.num_rows):
            entry = self.entries.entry(row)
            title, _, _ = entry.partition(b"\n")
            titles.append(title.decode("utf-8", errors="replace").strip())
            for name, text in _items(entry).items():
                columns.setdefault(name, [None] * self.num_rows)[row] = text
        return {"": titles, **columns}

    def _number(self, text: str, name: str, row: int) -> float:
        if text.strip().lower() in {"", "nan", "na", "n/a", "null", "none"}:
            return float("nan")
        try:
            value = float(text)
        except ValueError:
            raise DataError(
                f"{self.name}, row {row}: '{name}' is '{text}', expected a number"
            ) from None
        check_labels(np.array([value]), name, lambda _: f"{self.name}, row {row}")
        return value

    def splits(self) -> Array | None:
        """None: an SDF has no split."""
        return None

    def report(self) -> list[str]:
        """Report the number of structures and the targets."""
        found = ", ".join(self.targets) or "no targets"
        if not self.targets and self.items:
            found += f" (columns.targets may name {', '.join(self.items)})"
        return [f"{self.name}: {counted(self.num_rows, 'structure')} with {found}"]


def _items(entry: bytes) -> dict[str, str]:
    """Find the data items that follow the structure: ``> <name>``, then lines up to an empty one.

    The number of the entry may follow the name, ``> <name>  (7)``.
    """
    items: dict[str, list[str]] = {}
    own: list[str] | None = None
    for line in entry.decode("utf-8", errors="replace").splitlines():
        name = _ITEM.match(line)
        if name:
            own = items[name[1]] = []
        elif not line.strip():
            own = None
        elif own is not None:
            own.append(line.strip())
    return {name: "\n".join(lines) for name, lines in items.items()}
