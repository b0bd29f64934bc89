"""Files that are given by name, pattern or folder."""

import glob
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from bevatron.data.compressed import format_suffix
from bevatron.errors import DataError
from bevatron.typing import IntArray

Paths = str | Path | Sequence[str | Path]


def given_files(paths: Paths, in_folders: Collection[str] = ()) -> list[Path]:
    """List the files of paths and patterns; of a folder those with one of these suffixes, sorted.

    Without suffixes a folder counts as a file. Raises DataError if there is no such file, or one is
    given twice.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    files = [file for path in given for file in _expand(path, in_folders)]
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            raise DataError(f"{file}: given twice")
        seen.add(file.resolve())
    return files


def _expand(path: str | Path, in_folders: Collection[str]) -> list[Path]:
    place = Path(path).expanduser()
    if in_folders and place.is_dir():
        found = sorted(p for p in place.iterdir() if p.is_file() and format_suffix(p) in in_folders)
        if not found:
            raise DataError(f"{path}: the folder holds no file of structures")
        return found
    if place.exists():
        return [place]
    names = glob.glob(str(place), recursive=True)  # noqa: PTH207
    matches = sorted(match for match in map(Path, names) if match.exists())  # no links to nothing
    if matches:
        return [match for match in matches if not in_folders or match.is_file()]
    if glob.has_magic(str(path)):
        raise DataError(f"{path}: no file matches the pattern")
    raise DataError(f"{path}: the file does not exist")


def locate(starts: IntArray, index: int) -> tuple[int, int]:
    """Return the file of a sample, and its number in it, from the first samples of all files."""
    if not 0 <= index < starts[-1]:
        raise IndexError(f"sample {index} of {starts[-1]}")
    file = int(np.searchsorted(starts, index, side="right")) - 1
    return file, index - int(starts[file])
