"""Edge lists as text: two columns of ids, optionally a third of weights; plain or gzip."""

import codecs
import gzip
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path

import numpy as np

from bevatron.data.graphs.graph import Edges, concatenate
from bevatron.data.graphs.raw import RawGraph
from bevatron.errors import DataError

BLOCK_BYTES = 2**24
"""Number of bytes of a file read at once."""

COMMENTS = (b"#", b"%", b"//")

NAMES = ({"source", "src", "from"}, {"destination", "dest", "dst", "target", "to"})
"""What headers call the first column and the second."""

NUMBERING = {"index", "idx", "id", "edge", "edge_id"}
"""What headers call a column that numbers the edges."""


def read_edge_list(path: Path) -> RawGraph:
    """Read an edge list: ``source destination [weight]``, one edge a line.

    Columns are separated by blanks, tabs or commas; lines that begin with ``#``, ``%`` or ``//``
    and empty lines are skipped, and so is a first line of names unless it gives the columns another
    order. Ids are whole numbers. Raises DataError naming file and line of anything else.
    """
    edges = concatenate(list(edge_list_pieces(path)), 2**62)
    return RawGraph(name=str(path), rows=edges.rows, cols=edges.cols, weights=edges.weights)


def edge_list_pieces(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[Edges]:
    """Read an edge list a block at a time.

    Parameters
    ----------
    path : the file; ``.gz`` is unpacked on the way
    block_bytes : approximate number of bytes held at once

    Yields
    ------
    Edges in the order of the file.
    """
    columns, line_number, header = 0, 1, b""
    with _open(path) as stream:
        for block in _blocks(stream, path, block_bytes):
            text = block.removeprefix(codecs.BOM_UTF8) if line_number == 1 else block
            lines = text.split(b"\n")
            numbers, kept = _without_comments(lines, line_number, path)
            line_number += len(lines) - 1
            if kept and not columns:
                if not header and _is_header(kept[0]):
                    header, numbers, kept = kept[0], numbers[1:], kept[1:]
                if kept:
                    columns = len(_fields(kept[0]))
                    if columns not in {2, 3}:
                        raise DataError(
                            f"{path}, line {numbers[0]}: has {columns} columns, expected a source, "
                            "a destination and perhaps a weight"
                        )
                    if header:
                        _check_header(header, columns, path)
            if kept:
                yield _parse(kept, numbers, columns, path)
    if not columns:
        raise DataError(f"{path}: holds no edges")


def _open(path: Path) -> BufferedIOBase:
    try:
        return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _blocks(stream: BufferedIOBase, path: Path, size: int) -> Iterator[bytes]:
    """Read whole lines, each block ending with a line's end."""
    rest = b""
    while True:
        try:
            data = stream.read(size)
        except (OSError, EOFError) as error:
            raise DataError(f"{path}: is damaged ({error})") from None
        if not data:
            break
        end = data.rfind(b"\n")
        if end < 0:
            rest += data
            continue
        yield rest + data[: end + 1]
        rest = data[end + 1 :]
    if rest:
        yield rest + b"\n"


def _without_comments(
    lines: list[bytes], first: int, path: Path
) -> tuple[list[int] | range, list[bytes]]:
    """Return the lines that hold something, with their numbers."""
    if first == 1 and lines[0].startswith(b"%%MatrixMarket"):
        raise DataError(
            f"{path}: is a Matrix Market file; scipy.sparse.save_npz('graph.npz', "
            "scipy.io.mmread(FILE).tocsr()) makes an npz of it, which is read"
        )
    if lines[0].startswith(b"\x1f\x8b"):
        raise DataError(f"{path}: is compressed with gzip; its name must end in .gz")
    plain = not any(mark in line for line in lines[:-1] for mark in COMMENTS)
    if plain and all(lines[:-1]):
        return range(first, first + len(lines) - 1), lines[:-1]
    numbered = [
        (number, line)
        for number, line in enumerate(lines, first)
        if (stripped := line.strip()) and not stripped.startswith(COMMENTS)
    ]
    return [number for number, _ in numbered], [line for _, line in numbered]


def _fields(line: bytes) -> list[bytes]:
    return line.replace(b",", b" ").replace(b";", b" ").split()


def _is_header(line: bytes) -> bool:
    """Whether a line holds names: none of its fields is a number."""

    def number(field: bytes) -> bool:
        try:
            float(field)
        except ValueError:
            return False
        return True

    return not any(number(field) for field in _fields(line))


def _check_header(line: bytes, columns: int, path: Path) -> None:
    """Refuse names that tell of another column before the ends of an edge, or of exchanged ends."""
    text = line.decode(errors="replace").strip("\r\n")
    separator = next((mark for mark in ",;\t" if mark in text), None)
    names = [name.strip(" \"'").lower() for name in text.split(separator)]
    misplaced = any(
        name in known and place != expected
        for place, name in enumerate(names)
        for expected, known in enumerate(NAMES)
    )
    numbered = names[0] in NUMBERING and len(names) == 3 and "weight" not in names[2]
    if misplaced or numbered or "" in names[:2] or len(names) < columns:
        raise DataError(
            f"{path}: its {columns} columns are called '{text[:60]}'; expected a source, a "
            "destination and perhaps a weight, in this order (of pandas: to_csv(index=False))"
        )


def _parse(lines: list[bytes], numbers: list[int] | range, columns: int, path: Path) -> Edges:
    fields = _fields(b"\n".join(lines))
    if len(fields) != columns * len(lines):
        _explain(lines, numbers, columns, path)
    try:
        rows = np.array(fields[1::columns]).astype(np.int64)
        cols = np.array(fields[0::columns]).astype(np.int64)
        weights = np.array(fields[2::3]).astype(np.float32) if columns == 3 else None
    except (ValueError, OverflowError):
        _explain(lines, numbers, columns, path)
        raise
    return Edges(rows, cols, weights)


def _explain(lines: list[bytes], numbers: list[int] | range, columns: int, path: Path) -> None:
    for number, line in zip(numbers, lines, strict=True):
        fields = _fields(line)
        shown = line.decode(errors="replace").strip()[:60]
        if len(fields) != columns:
            raise DataError(
                f"{path}, line {number}: expected {columns} columns as in the lines before, has "
                f"{len(fields)} ('{shown}')"
            )
        try:
            values = [int(field) for field in fields[:2]]
            float(fields[-1])
        except ValueError:
            raise DataError(
                f"{path}, line {number}: '{shown}' is not an edge; expected numbers of a source "
                "and a destination"
                + (" and a weight" if columns == 3 else "; text ids are not supported")
            ) from None
        if any(abs(value) >= 2**62 for value in values):
            raise DataError(f"{path}, line {number}: the id in '{shown}' is too large")
