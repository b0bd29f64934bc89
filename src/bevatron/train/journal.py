"""metrics.jsonl: one line per step and per epoch, cut back to the checkpoint on resume.

All that depends on the clock stands under the key ``time``; without it, the file of an interrupted
and resumed run equals that of an uninterrupted one.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.errors import CheckpointError
from bevatron.files import explained
from bevatron.typing import FloatArray


class Journal:
    """Appends records to a JSONL file.

    Parameters
    ----------
    path
        The file.
    keep_bytes
        What to keep of an existing file; the rest is cut off.

    Raises
    ------
    CheckpointError
        If the file cannot be written (also later, by a full disk) or is shorter than what the
        checkpoint has seen.
    """

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self.path = path
        with explained(path, CheckpointError):
            size = path.stat().st_size if path.exists() else 0
            if size < keep_bytes:
                raise CheckpointError(
                    f"{path}: holds {size} bytes but {keep_bytes} when the checkpoint was written; "
                    f"put the file back or begin a new run in another folder"
                )
            self._file = path.open("ab")
            self._file.truncate(keep_bytes)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; numbers that are not finite become null."""
        line = json.dumps(_finite(record), separators=(",", ":"), allow_nan=False)
        with explained(self.path, CheckpointError):
            self._file.write(line.encode() + b"\n")
            self._file.flush()

    def sync(self) -> int:
        """Wait until all is on disk and return the file's length."""
        with explained(self.path, CheckpointError):
            self._file.flush()
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Read the records of a metrics.jsonl; a last line cut short by a kill is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def epochs_of(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the record of every epoch, in order; of one that stands twice the last."""
    return list({r["epoch"]: r for r in records if r.get("kind") == "epoch"}.values())


def column(records: Iterable[Mapping[str, Any]], *keys: str) -> FloatArray:
    """Return one figure of every record, [n]; NaN where it is missing.

    Examples
    --------
    >>> column([{"valid": {"mae": 0.5}}, {"valid": {}}, {"valid": {"mae": None}}], "valid", "mae")
    array([0.5, nan, nan])
    """
    found = []
    for record in records:
        value: Any = record
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        found.append(np.nan if value is None else float(value))
    return np.array(found, dtype=np.float64)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
