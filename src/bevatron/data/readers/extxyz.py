"""Extended XYZ, also compressed: scanned once without parsing atoms, then read by ranges.

The scan finds where every frame begins and parses comment lines only, so opening a million frames
takes neither their memory nor the time to parse them. A plain file is read by seeking. A compressed
one has to be decompressed up to the frame that is wanted; the reader keeps its place, so a process
that reads ranges in ascending order decompresses the file once.
"""

import codecs
import os
from array import array
from collections.abc import Collection, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.data.compressed import DAMAGED, open_compressed
from bevatron.data.readers.base import FileState, RawFrame, Signature, Survey, content_hash
from bevatron.data.readers.elements import ATOMIC_NUMBERS, element_symbol
from bevatron.data.readers.extxyz_frames import parse_comment, parse_frame
from bevatron.data.readers.label_values import numbers
from bevatron.errors import DataError
from bevatron.typing import IntArray

_BLOCK = 1 << 23
_RANGE = 1 << 22


class ExtxyzFile:
    """One file of extended (or plain) XYZ.

    Raises DataError if the file is not XYZ, is cut off or empty.

    Parameters
    ----------
    path : the file; gzip, bzip2 and xz are decompressed
    watched : names, in lower case, whose values the survey compares with zero
    """

    def __init__(self, path: Path, watched: frozenset[str]) -> None:
        self.name = str(path)
        self._state = FileState.of(path)
        self._handle: tuple[int, BufferedIOBase] | None = None
        scan = _Scan(self.name, watched)
        try:
            with open_compressed(path) as stream:
                scan.run(stream)
        except DAMAGED as error:
            raise DataError(f"{self.name}: cannot be read to the end ({error})") from None
        self._starts: IntArray = np.array(scan.starts, dtype=np.int64)
        self._stops: IntArray = np.array(scan.stops, dtype=np.int64)
        self.num_frames = len(self._starts)
        self.survey: Survey = scan.survey
        self.content: str = content_hash(path)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the open file; it is opened again after unpickling."""
        return {**self.__dict__, "_handle": None}

    def frames(self, start: int, stop: int, columns: Collection[str]) -> Iterator[RawFrame]:
        """Yield frames ``start`` to ``stop - 1`` with those arrays of ``columns`` they have."""
        stream = self._stream()
        wanted = frozenset(columns)
        first = start
        while first < stop:
            begin = int(self._starts[first])
            past = int(np.searchsorted(self._stops[:stop], begin + _RANGE, side="right"))
            past = max(past, first + 1)
            try:
                stream.seek(begin)
                data = stream.read(int(self._stops[past - 1]) - begin)
            except DAMAGED as error:
                raise DataError(f"{self.name}, frame {first}: cannot be read ({error})") from None
            for frame in range(first, past):
                text = data[int(self._starts[frame]) - begin : int(self._stops[frame]) - begin]
                try:
                    yield parse_frame(text, wanted)
                except DataError as error:
                    raise DataError(f"{self.name}, frame {frame}: {error}") from None
            first = past

    def _stream(self) -> BufferedIOBase:
        # Forked processes share the position in an inherited file, so each opens its own.
        if self._handle is None or self._handle[0] != os.getpid():
            self._state.refuse_change()
            self._handle = (os.getpid(), open_compressed(self._state.path))
        return self._handle[1]


class _Scan:
    """One pass that finds the frames and surveys their comment lines, block by block."""

    def __init__(self, name: str, watched: frozenset[str]) -> None:
        self.name = name
        self.starts = array("q")
        self.stops = array("q")
        self.survey = Survey()
        self._watched = watched
        self._watch: dict[Signature, list[str]] = {}
        self._symbols: set[bytes] = set()

    def run(self, stream: BufferedIOBase) -> None:
        """Scan all of a stream."""
        data, offset, line = b"", 0, 0
        while True:
            block = stream.read(_BLOCK)
            at_end = len(block) < 1
            if at_end and data and not data.endswith(b"\n"):
                data += b"\n"
            data += block
            used, lines = self._scan_block(data, offset, line)
            data, offset, line = data[used:], offset + used, line + lines
            if at_end:
                break
        if data.strip():
            raise DataError(
                f"{self.name}, frame {len(self.starts)}: cut off (the file ends after "
                f"{len(data.splitlines())} of {_promised(data)} lines)"
            )
        if not self.starts:
            raise DataError(f"{self.name}: holds no frames")
        self.survey.elements |= {
            ATOMIC_NUMBERS[symbol]
            for text in self._symbols
            if (symbol := element_symbol(text.decode("latin-1"))) in ATOMIC_NUMBERS
        }

    def _scan_block(self, data: bytes, offset: int, first_line: int) -> tuple[int, int]:
        """Parse all complete frames of ``data``; return how many bytes and lines they are."""
        buffer = np.frombuffer(data, dtype=np.uint8)
        ends_array = np.flatnonzero(buffer == 10)
        ends: list[int] = ends_array.tolist()
        marked = first_line == 0 and data.startswith(codecs.BOM_UTF8)
        position, line = len(codecs.BOM_UTF8) if marked else 0, 0
        bodies: list[tuple[int, int]] = []
        while line < len(ends):
            count = data[position : ends[line]]
            num_atoms = self._atom_count(count, first_line + line)
            if num_atoms is None:
                position, line = ends[line] + 1, line + 1
                continue
            last = line + num_atoms + 1
            if last >= len(ends):
                break
            comment = data[ends[line] + 1 : ends[line + 1]]
            species_first = self._note(comment, num_atoms)
            if num_atoms and species_first:
                bodies.append((line + 1, num_atoms))
            elif num_atoms:
                self._collect_symbols(comment, data[ends[line + 1] + 1 : ends[last]])
            self.starts.append(offset + position)
            position, line = ends[last] + 1, last + 1
            self.stops.append(offset + position)
        self._collect_first_columns(buffer, data, ends_array, bodies)
        return position, line

    def _atom_count(self, text: bytes, line: int) -> int | None:
        if text.isdigit():
            return int(text)
        stripped = text.strip()
        if not stripped:
            return None
        if stripped.isdigit():
            return int(stripped)
        shown = stripped[:40].decode("utf-8", "replace")
        raise DataError(
            f"{self.name}, frame {len(self.starts)}: line {line + 1} should be a number of atoms "
            f"but is '{shown}'"
        )

    def _note(self, comment: bytes, num_atoms: int) -> bool:
        """Survey one comment line; return whether the element is the first column."""
        frame = len(self.starts)
        try:
            header = parse_comment(comment.decode("utf-8", "replace"))
        except DataError as error:
            raise DataError(f"{self.name}, frame {frame}: {error}") from None
        names = header.columns.others if header.columns else ()
        signature = Signature(tuple(header.info), names, bool(header.pbc.any()))
        self.survey.note(frame, signature, num_atoms, header.info)
        watch = self._watch.get(signature)
        if watch is None:
            watch = [name for name in header.info if name.lower() in self._watched]
            self._watch[signature] = watch
        for name in watch:
            if name not in self.survey.nonzero and _differs_from_zero(header.info[name]):
                self.survey.nonzero.add(name)
        return header.columns is None or header.columns.species == 0

    def _collect_symbols(self, comment: bytes, body: bytes) -> None:
        columns = parse_comment(comment.decode("utf-8", "replace")).columns
        place = columns.species if columns and columns.species is not None else None
        place = columns.numbers if columns and place is None else place
        if place is not None:
            rows = (row.split() for row in body.split(b"\n"))
            self._symbols |= {row[place] for row in rows if len(row) > place}

    def _collect_first_columns(
        self,
        buffer: npt.NDArray[np.uint8],
        data: bytes,
        ends: IntArray,
        bodies: list[tuple[int, int]],
    ) -> None:
        """Note the symbols that atom lines begin with, for all lines of a block at once."""
        if not bodies:
            return
        begins, counts = np.array(bodies).T
        before = np.cumsum(counts) - counts
        lines = np.repeat(begins - before, counts) + np.arange(counts.sum())
        starts = ends[lines] + 1
        first, second, third = (buffer[np.minimum(starts + i, len(buffer) - 1)] for i in range(3))
        blank = (second == 32) | (second == 9)
        usual = (first > 32) & (blank | (third == 32) | (third == 9))
        codes = first.astype(np.int64) * 256 + np.where(blank, 32, second)
        for code in np.flatnonzero(np.bincount(codes[usual], minlength=1)):
            self._symbols.add(bytes(divmod(int(code), 256)).strip())
        for line in lines[~usual]:
            word = data[ends[line] + 1 : ends[line + 1]].split(None, 1)
            self._symbols |= set(word[:1])


def _promised(data: bytes) -> str:
    count = data.lstrip().split(b"\n", 1)[0].strip()
    return str(int(count) + 2) if count.isdigit() else "unknown"


def _differs_from_zero(text: str) -> bool:
    try:
        return bool((numbers(text) != 0).any())
    except ValueError:
        return True
