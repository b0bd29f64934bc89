"""ASE databases: SQLite (.db), JSON (.json) and LMDB (.aselmdb), read row by row."""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.readers.ase_files import survey_frame
from bevatron.data.readers.base import FileState, RawFrame, Survey, content_hash
from bevatron.errors import BevatronError, DataError, require
from bevatron.typing import IntArray

DATABASE_SUFFIXES = frozenset({".db", ".json", ".aselmdb"})

SURVEYED_ROWS = 20_000
"""Maximum number of rows surveyed, evenly spaced; reading checks every row."""

_CHUNK = 256


class DatabaseFile:
    """One ASE database. Rows are ordered by their id; frame 0 is the row with the smallest.

    Raises DataError if it cannot be opened as a database or is empty; MissingPackageError for
    .aselmdb without the extra that reads it.

    Parameters
    ----------
    watched : names, in lower case, whose values the survey compares with zero
    """

    def __init__(self, path: Path, watched: frozenset[str]) -> None:
        self.name = str(path)
        self._state = FileState.of(path)
        self._handle: tuple[int, Any] | None = None
        try:
            self._ids = _row_ids(self._database())
        except BevatronError:
            raise
        except Exception as error:  # noqa: BLE001  each backend raises its own errors
            raise _unreadable(self.name, error) from None
        self.num_frames = len(self._ids)
        if self.num_frames == 0:
            raise DataError(f"{self.name}: holds no frames")
        self.survey = self._take_survey(watched)
        self.content = content_hash(path)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the open database; it is opened again after unpickling."""
        return {**self.__dict__, "_handle": None}

    def frames(self, start: int, stop: int, columns: Collection[str]) -> Iterator[RawFrame]:  # noqa: ARG002  all are read
        """Yield rows ``start`` to ``stop - 1``."""
        database = self._database()
        for first in range(start, stop, _CHUNK):
            ids = self._ids[first : min(first + _CHUNK, stop)]
            for index, row in enumerate(self._rows(database, ids), start=first):
                try:
                    yield frame_from_row(row)
                except DataError as error:
                    raise DataError(f"{self.name}, frame {index}: {error}") from None

    def _take_survey(self, watched: frozenset[str]) -> Survey:
        survey = Survey()
        count = min(self.num_frames, SURVEYED_ROWS)
        indices = np.unique(np.linspace(0, self.num_frames - 1, count).astype(np.int64))
        survey.complete = len(indices) == self.num_frames
        database = self._database()
        for first in range(0, count, _CHUNK):
            chosen = indices[first : first + _CHUNK]
            for index, row in zip(chosen, self._rows(database, self._ids[chosen]), strict=True):
                survey_frame(survey, int(index), frame_from_row(row), watched)
        return survey

    def _rows(self, database: Any, ids: IntArray) -> Iterator[Any]:
        try:
            if (
                len(ids) > 1
                and self._state.path.suffix != ".aselmdb"
                and np.ptp(ids) < 2 * len(ids)
            ):
                # One query for a range of rows, far cheaper than one for each.
                chosen = set(ids.tolist())
                rows = database.select(f"id>={ids[0]},id<={ids[-1]}", sort="id")
                yield from (row for row in rows if row.id in chosen)
            else:
                for number in ids.tolist():
                    yield database.get(id=number)
        except Exception as error:  # noqa: BLE001  each backend raises its own errors
            raise _unreadable(self.name, error) from None

    def _database(self) -> Any:
        # SQLite and LMDB handles must not cross a fork.
        if self._handle is None or self._handle[0] != os.getpid():
            self._state.refuse_change()
            self._handle = (os.getpid(), _connect(self._state.path))
        return self._handle[1]


def _unreadable(name: str, error: Exception) -> BevatronError:
    if isinstance(error, BevatronError):
        return error
    return DataError(f"{name}: cannot be read as an ASE database ({type(error).__name__}: {error})")


def _connect(path: Path) -> Any:
    import ase.db

    if path.suffix == ".aselmdb":
        require("ase_db_backends", "aselmdb")
        # When opening fails, ASE's class only prints to the console; lmdb raises the reason.
        options = {"subdir": False, "readonly": True, "lock": False}
        require("lmdb", "aselmdb").open(str(path), **options).close()
        return ase.db.connect(path, type="aselmdb", use_lock_file=False, readonly=True)
    return ase.db.connect(path, use_lock_file=False)


def _row_ids(database: Any) -> IntArray:
    if hasattr(database, "ids"):
        return np.array(sorted(database.ids), dtype=np.int64)
    rows = database.select(columns=["id"], include_data=False)
    return np.array(sorted(row.id for row in rows), dtype=np.int64)


_RESULTS = ("energy", "free_energy", "forces", "stress")


def frame_from_row(row: Any) -> RawFrame:
    """Convert a row: its data, its key-value pairs and its calculator's results."""
    data = row.data if isinstance(row.data, Mapping) else {}
    found: dict[str, Any] = {}
    # mace and others keep a whole ``atoms.info`` under this name.
    for source in (data, data.get("info"), row.key_value_pairs):
        if isinstance(source, Mapping):
            found |= {str(key): value for key, value in source.items()}
    for name in _RESULTS:
        value = row.get(name)
        if value is not None:
            found.setdefault(name, value)
    num_atoms = len(row.numbers)
    per_atom = {
        name: value
        for name, value in found.items()
        if isinstance(value, np.ndarray | list) and _rows_of(value) == num_atoms
    }
    return RawFrame(
        numbers=np.asarray(row.numbers, dtype=np.int32),
        positions=np.array(row.positions, dtype=np.float64).reshape(-1, 3),
        cell=np.array(row.cell, dtype=np.float64).reshape(3, 3),
        pbc=np.broadcast_to(np.asarray(row.pbc, dtype=bool), (3,)),
        info={name: value for name, value in found.items() if not isinstance(value, Mapping)},
        arrays={name: np.asarray(value) for name, value in per_atom.items()},
    )


def _rows_of(value: Any) -> int:
    shape = np.shape(value)
    return int(shape[0]) if len(shape) == 2 and shape[1] == 3 else -1
