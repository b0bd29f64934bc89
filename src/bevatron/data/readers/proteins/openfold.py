"""Files of OpenFold and OpenProteinSet, read in place: duplicates, alignment databases, dates.

docs/source/Aux_seq_files.md of OpenFold's repository has examples of all of them.
"""

import datetime as dt
import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.compressed import read_whole
from bevatron.data.readers.proteins.fasta import as_text
from bevatron.errors import DataError


def read_duplicate_chains(path: str | Path) -> tuple[tuple[str, ...], ...]:
    """Read groups of chains with the same sequence, one group per line, blanks between names.

    OpenProteinSet keeps alignments of one chain of each group. Raises DataError if a chain is in
    two groups or twice in one.
    """
    name = str(path)
    groups = []
    lines: dict[str, int] = {}
    for number, line in enumerate(as_text(read_whole(path), name).split("\n"), start=1):
        chains = tuple(line.split())
        for chain in chains:
            if chain in lines:
                raise DataError(
                    f"{name}, line {number}: chain '{chain}' is in line {lines[chain]} already; a "
                    "chain belongs to one group"
                )
            lines[chain] = number
        if chains:
            groups.append(chains)
    return tuple(groups)


def read_release_dates(path: str | Path) -> dict[str, dt.date]:
    """Read the release dates of entries, by PDB code in lower case.

    Raises DataError naming the entry that has no date or another than one of its chains.

    Parameters
    ----------
    path : OpenFold's ``mmcif_cache.json`` or ``chain_data_cache.json``, or JSON of codes and dates
    """
    name = str(path)
    dates: dict[str, dt.date] = {}
    for key, value in _json(read_whole(path), name).items():
        text = value.get("release_date") if isinstance(value, dict) else value
        try:
            date = dt.date.fromisoformat(str(text))
        except ValueError:
            raise DataError(
                f"{name}: entry '{key}' has the release date {json.dumps(text)}; expected "
                "YYYY-MM-DD"
            ) from None
        entry = (key.rpartition("_")[0] or key).lower()
        if dates.setdefault(entry, date) != date:
            raise DataError(
                f"{name}: '{key}' was released on {date}, other chains of it on {dates[entry]}"
            )
    return dates


def read_obsolete(path: str | Path) -> dict[str, str]:
    """Read the successors of obsolete entries, by code in lower case.

    Raises DataError if a line is not one of these.

    Parameters
    ----------
    path : the archive's ``obsolete.dat``: lines ``OBSLTE    31-JUL-94 116L     216L``
    """
    name = str(path)
    found: dict[str, str] = {}
    for number, line in enumerate(as_text(read_whole(path), name).split("\n"), start=1):
        words = line.lower().split()
        if not words or words[0] != "obslte":
            if words and number > 1:  # the first line is a title
                raise DataError(f"{name}, line {number}: expected 'OBSLTE', found '{line[:40]}'")
            continue
        if len(words) < 3:
            raise DataError(f"{name}, line {number}: names no entry; it may be cut off")
        if len(words) > 3:
            found[words[2]] = words[3]
    return found


def _json(data: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(as_text(data, name))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{name}, line {error.lineno}, column {error.colno}: is not valid JSON "
            f"({error.msg}); it may be cut off"
        ) from None
    except RecursionError:
        raise DataError(f"{name}: is nested too deeply") from None
    if not isinstance(found, dict):
        raise DataError(f"{name}: holds no names of chains or entries; expected keys and values")
    return found


class AlignmentDatabase:
    """OpenFold's alignment database: files of many chains joined in a few, and their index.

    Only the index is in memory, as arrays; any number of processes can read. Raises DataError if
    the index is damaged or names a database outside its folder or one that is missing.

    Parameters
    ----------
    index : ``alignment_db.index`` (JSON); the databases that it names lie in its folder
    """

    def __init__(self, index: str | Path) -> None:
        self.path = Path(index)
        names: dict[str, int] = {}
        databases: dict[str, int] = {}
        files = array("q")
        self._rows: dict[str, tuple[int, int]] = {}
        for chain, entry in _json(read_whole(index), str(index)).items():
            first = len(files) // 4
            try:
                database = databases.setdefault(str(entry["db"]), len(databases))
                for name, start, size in entry["files"]:
                    number = names.setdefault(str(name), len(names))
                    files.extend((database, number, int(start), int(size)))
            except (TypeError, KeyError, ValueError, OverflowError):
                raise DataError(
                    f"{self.path}: the entry of '{chain}' is damaged; expected 'db' and 'files' "
                    "with names, first bytes and sizes"
                ) from None
            self._rows[chain] = (first, len(files) // 4)
        self._names, self._databases = tuple(names), tuple(databases)
        self._sizes = tuple(self._size(database) for database in databases)
        self._files = np.array(files, dtype=np.int64).reshape(-1, 4)

    @property
    def chains(self) -> tuple[str, ...]:
        """Names of all chains, in the order of the index."""
        return tuple(self._rows)

    def files(self, chain: str) -> tuple[str, ...]:
        """Return the files of a chain: ``uniref90_hits.a3m``, ``pdb70_hits.hhr``.

        Raises DataError if there is no such chain.
        """
        if chain not in self._rows:
            raise DataError(f"{self.path}: holds no chain '{chain}'")
        return tuple(self._names[number] for number in self._files[slice(*self._rows[chain]), 1])

    def read(self, chain: str, file: str) -> bytes:
        """Read a file of a chain, for `parse_alignment` and `parse_hits`.

        Raises DataError if there is no such file, or the database does not reach as far as the
        index says.
        """
        files = self.files(chain)
        if file not in files:
            known = ", ".join(files) or "no file"
            raise DataError(f"{self.path}: chain '{chain}' has no '{file}', it has {known}")
        row = self._rows[chain][0] + files.index(file)
        database, _, start, size = (int(number) for number in self._files[row])
        path = self.path.parent / self._databases[database]
        if not 0 <= start <= start + size <= self._sizes[database]:
            raise DataError(
                f"{path}: has {self._sizes[database]} bytes, but '{file}' of '{chain}' lies from "
                f"{start} to {start + size}; copy or download database and index again"
            )
        try:
            with path.open("rb") as stream:
                stream.seek(start)
                return stream.read(size)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None

    def _size(self, database: str) -> int:
        path = Path(database)
        if path.is_absolute() or ".." in path.parts:
            raise DataError(
                f"{self.path}: names the database '{database}', which is not in its folder"
            )
        try:
            return (self.path.parent / path).stat().st_size
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path}: names the database '{database}', which cannot be read "
                f"({getattr(error, 'strerror', error)})"
            ) from None
