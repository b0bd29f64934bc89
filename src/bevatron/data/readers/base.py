"""Protocols and types shared by the readers.

A `FileReader` knows one format and nothing about labels: it yields frames with all their info and
arrays, and surveys which names occur. `structures.StructureReader` turns frames into samples.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from bevatron.data.archives import archive_of, read_member
from bevatron.data.compressed import format_suffix
from bevatron.errors import DataError
from bevatron.typing import Arrays, BoolArray, FloatArray

LINE_OF_ROW = {".csv": 2, ".tsv": 2, ".tab": 2, ".txt": 2, ".smi": 1}
"""Suffix of a table of text -> the line of its first row, the first being 1."""

LARGEST_LABEL = float(np.finfo(np.float32).max)
"""Labels become float32: those of molecules in their store, those of structures in most runs."""


class SampleReader(Protocol):
    """Raw samples in a fixed order; picklable, because every worker process opens it again."""

    @property
    def sources(self) -> list[str]:
        """Names of the files, as given."""

    @property
    def fingerprint(self) -> str:
        """Hash of the files' content and of the options."""

    @property
    def num_samples(self) -> int:
        """Number of samples in all files."""

    def read(self, start: int, stop: int) -> Iterator[Arrays]:
        """Yield samples ``start`` to ``stop - 1``, in order."""

    def describe(self, index: int) -> str:
        """Return the origin of a sample: ``train.xyz, frame 12``."""


class Reader(SampleReader, Protocol):
    """A reader that also reports on its files."""

    def report(self) -> list[str]:
        """Return what was found in each file, line by line."""


class Signature(NamedTuple):
    """The names of the info and arrays of a frame; most frames of a file share them."""

    info: tuple[str, ...]
    arrays: tuple[str, ...]
    periodic: bool


@dataclass(slots=True)
class RawFrame:
    """One frame as stored in its file.

    Attributes
    ----------
    numbers : [N] atomic numbers
    positions : [N, 3] Å
    cell : [3, 3] Å, rows are lattice vectors, zeros without a cell
    pbc : [3]
    info : values per frame, by name; text where the format has only text
    arrays : values per atom, [N, ...], by name
    """

    numbers: npt.NDArray[np.int32]
    positions: FloatArray
    cell: FloatArray
    pbc: BoolArray
    info: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]]

    @property
    def signature(self) -> Signature:
        """The names of info and arrays."""
        return Signature(tuple(self.info), tuple(self.arrays), bool(self.pbc.any()))


TALLIED = ("head", "group")
"""Names under which files often put structures into classes."""

MOST_TEXTS = 100


@dataclass
class Survey:
    """Statistics of one pass over a file.

    Attributes
    ----------
    counts, first : number of frames with a signature, and the first of them
    nonzero : watched names whose value is not zero in some frame
    elements : atomic numbers that occur
    texts : for the names in `TALLIED`, how many frames have which text, of the first `MOST_TEXTS`
    num_frames, num_several : number of frames, and of those with more than one atom
    complete : whether every frame was read (a very large database is sampled)
    """

    counts: dict[Signature, int] = field(default_factory=dict)
    first: dict[Signature, int] = field(default_factory=dict)
    nonzero: set[str] = field(default_factory=set)
    elements: set[int] = field(default_factory=set)
    texts: dict[str, Counter[str]] = field(default_factory=dict)
    num_frames: int = 0
    num_several: int = 0
    complete: bool = True

    def note(
        self, index: int, signature: Signature, num_atoms: int, info: Mapping[str, Any]
    ) -> None:
        """Count one frame."""
        for name in TALLIED:
            if name in info:
                texts, text = self.texts.setdefault(name, Counter()), str(info[name])
                if text in texts or len(texts) < MOST_TEXTS:
                    texts[text] += 1
        if signature in self.counts:
            self.counts[signature] += 1
        else:
            self.counts[signature] = 1
            self.first[signature] = index
        self.num_frames += 1
        self.num_several += num_atoms > 1


class FileReader(Protocol):
    """One file of structures."""

    name: str
    num_frames: int
    survey: Survey
    content: str

    def frames(self, start: int, stop: int, columns: Collection[str]) -> Iterator[RawFrame]:
        """Yield frames ``start`` to ``stop - 1``, with at least those arrays of ``columns``."""


@dataclass(frozen=True)
class FileState:
    """Size and modification time of a file, or of the archive it is in, to detect a change."""

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """Return the current state of a file."""
        inside = archive_of(path)
        stat = (path if inside is None else inside[0]).stat()
        return cls(path, stat.st_size, stat.st_mtime_ns)

    def refuse_change(self) -> None:
        """Raise DataError if the file is gone or has changed."""
        try:
            now = FileState.of(self.path)
        except OSError as error:
            raise DataError(f"{self.path}: can no longer be read ({error.strerror})") from None
        if now != self:
            raise DataError(f"{self.path}: changed while it was being read; start again")


def state_and_hash(path: Path) -> tuple[FileState, str]:
    """Return the state and `content_hash` of a file; DataError if it cannot be read."""
    try:
        return FileState.of(path), content_hash(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None


_WHOLE = 4 << 30
_BLOCK = 1 << 22
_NUM_SAMPLES = 256


def content_hash(path: Path) -> str:
    """Hash the bytes of a file; above 4 GiB, 256 blocks spread over it, first and last included."""
    if archive_of(path) is not None:
        return xxhash.xxh3_128_hexdigest(read_member(path))
    size = path.stat().st_size
    digest = xxhash.xxh3_128(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE:
            while block := file.read(_BLOCK):
                digest.update(block)
        else:
            for offset in np.linspace(0, size - _BLOCK, _NUM_SAMPLES).astype(np.int64):
                file.seek(int(offset))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def place_of_row(file: str | Path, row: int) -> str:
    """Name a row of a file, counted from 0, as a user finds it: in a text by its line, from 1.

    Empty lines of tables are not rows and not counted, as in the messages of pyarrow.

    Examples
    --------
    >>> place_of_row("train.csv.gz", 0), place_of_row("train.parquet", 0)
    ('line 2', 'row 0')
    """
    first = LINE_OF_ROW.get(format_suffix(Path(file)))
    return f"row {row}" if first is None else f"line {row + first}"
