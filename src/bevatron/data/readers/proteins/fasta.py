"""Records of FASTA and a3m files: headers and sequences as bytes."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from bevatron.errors import DataError

BLANKS = b" \t\r\n\v\f"
"""Characters ignored in sequences."""


@dataclass(frozen=True)
class Records:
    """The records of a file in its order.

    Attributes
    ----------
    headers : the lines that begin with ``>``, without it
    sequences : the lines that follow each, joined
    lines : number of the header's line, counted from 1
    """

    name: str
    headers: list[str]
    sequences: list[bytes]
    lines: Sequence[int]

    def where(self, index: int) -> str:
        """Return ``FILE, line 12 (record 'NAME')``, for messages."""
        title = (self.headers[index].split() or [""])[0][:40]
        return f"{self.name}, line {self.lines[index]} (record '{title}')"


def as_text(data: bytes, name: str) -> str:
    """Decode UTF-8, or Latin-1 where a name is not UTF-8; refuse UTF-16 and binary files."""
    data = _checked(data, name)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _checked(data: bytes, name: str) -> bytes:
    """Return the data without a byte order mark and with line ends of Unix."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{name}: is written in UTF-16; save it in UTF-8")
    # Tools that write databases end an entry with NUL.
    data = data.removeprefix(codecs.BOM_UTF8).rstrip(b"\0")
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise DataError(
            f"{name}, line {line}: holds a NUL byte, so it is binary or several files joined by "
            "NUL; split it into text files"
        )
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data


def split_records(data: bytes, name: str) -> Records:
    """Split a FASTA or a3m file into records; comments (``#``) before the first are skipped.

    Raises DataError if it is empty, does not begin with a record, or is UTF-16 or binary.
    """
    data = _checked(data, name)
    if not data.strip():
        raise DataError(f"{name}: is empty; expected a record that begins with '>'")
    lines = data.split(b"\n")
    first = _skip_comments(lines, name)
    heads = [number for number, line in enumerate(lines) if number >= first and line[:1] == b">"]
    if lines[-1] == b"":
        lines.pop()
    stops = [*heads[1:], len(lines)]
    sequences = [
        lines[head + 1] if stop - head == 2 else b"".join(lines[head + 1 : stop])
        for head, stop in zip(heads, stops, strict=True)
    ]
    headers = as_text(b"\n".join([lines[head] for head in heads]), name)[1:].split("\n>")
    return Records(name, headers, sequences, [head + 1 for head in heads])


def _skip_comments(lines: list[bytes], name: str) -> int:
    """Return the index of the first header."""
    for number, line in enumerate(lines):
        if line.startswith(b">"):
            return number
        if line.strip() and not line.startswith(b"#"):
            shown = line[:40].decode("utf-8", "replace").strip()
            raise DataError(
                f"{name}, line {number + 1}: '{shown}' is not a header; expected a line that "
                "begins with '>'"
            )
    raise DataError(f"{name}: holds only comments, no record that begins with '>'")
