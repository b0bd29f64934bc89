"""Multiple sequence alignments: a3m, Stockholm and aligned FASTA."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bevatron.data.compressed import format_suffix, read_whole
from bevatron.data.readers.proteins.alphabet import GAP, LETTERS, Polymer
from bevatron.data.readers.proteins.fasta import BLANKS, Records, split_records
from bevatron.data.readers.proteins.stockholm import parse_stockholm
from bevatron.errors import DataError
from bevatron.typing import BoolArray

MAX_DELETIONS = np.iinfo(np.uint16).max
"""Maximum counted length of an insertion."""

_FORMATS = {
    ".a3m": "a3m",
    ".sto": "stockholm",
    ".stk": "stockholm",
    ".stockholm": "stockholm",
    ".fasta": "fasta",
    ".fa": "fasta",
    ".fas": "fasta",
    ".afa": "fasta",
}
Where = Callable[[int], str]
_LOWER = bytes(range(ord("a"), ord("z") + 1))
_END, _INVALID = 254, 255


@dataclass(frozen=True)
class Alignment:
    """An alignment of sequences (rows) to the residues of its first one, the query (columns).

    Attributes
    ----------
    rows : int8 [rows, columns]
        Residues as classes of `alphabet.CLASSES`.
    deletions : uint16 [rows, columns]
        Number of residues that a sequence has between a column and the one before; what follows the
        last column is not counted. More than 65,535 are counted as 65,535.
    names : [rows]
        Whole header of each row; `names.parse_names` finds accession and species.
    """

    rows: npt.NDArray[np.int8]
    deletions: npt.NDArray[np.uint16]
    names: tuple[str, ...]


def read_alignment(path: str | Path, kind: Polymer = "protein") -> Alignment:
    r"""Read an alignment, also compressed (gzip, bzip2, xz, Zstandard).

    Raises DataError naming file, line and record of a letter or row that does not fit.

    Parameters
    ----------
    path
        .a3m (HH-suite, ColabFold: lower case is an insertion), .sto, .stk, .stockholm (jackhmmer,
        Pfam) or .fasta, .fa, .fas, .afa with rows of equal length. Columns in which the first row
        has a gap are insertions in Stockholm and FASTA.
    kind : what the letters mean

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "two.a3m"
    >>> _ = path.write_text(">query\nARN\n>other\nA-ccN\n")
    >>> alignment = read_alignment(path)
    >>> alignment.rows.tolist(), alignment.deletions.tolist()
    ([[0, 1, 2], [0, 31, 2]], [[0, 0, 0], [0, 0, 2]])
    """
    path = Path(path)
    format_ = _FORMATS.get(format_suffix(path))
    if format_ is None:
        raise DataError(
            f"{path}: is not in a known alignment format; the name must end in one of "
            f"{', '.join(_FORMATS)}"
        )
    return parse_alignment(read_whole(path), str(path), format_, kind)


def parse_alignment(
    data: bytes, name: str, format_: str = "a3m", kind: Polymer = "protein"
) -> Alignment:
    """Read an alignment from memory.

    Raises DataError as `read_alignment`.

    Parameters
    ----------
    data : content of the file, not compressed
    name : name for messages
    format_ : ``a3m``, ``stockholm`` or ``fasta``
    kind : what the letters mean
    """
    if format_ == "a3m":
        return _parse_a3m(split_records(data, name), kind)
    if format_ == "fasta":
        records = split_records(data, name)
        rows = [sequence.translate(None, BLANKS) for sequence in records.sequences]
        return _align_columns(rows, records.headers, records.where, kind)
    found = parse_stockholm(data, name)
    if not found.rows:
        raise DataError(f"{name}: holds no row of an alignment")
    return _align_columns(found.rows, found.headers, found.where, kind)


def _table(kind: Polymer) -> bytes:
    """Class of each byte of an upper-case row."""
    table = bytearray([_INVALID]) * 256
    for letter, number in LETTERS[kind].items():
        table[ord(letter)] = number
    table[ord("-")] = GAP
    table[ord(">")] = _END
    return bytes(table)


def _parse_a3m(records: Records, kind: Polymer) -> Alignment:
    # Every row ends with '>', which no sequence can hold: so all rows are translated at once, and
    # their lengths are equal if the ends lie at equal distances.
    joined = (b">".join(records.sequences) + b">").translate(None, BLANKS + b".")
    codes = np.frombuffer(joined.translate(_table(kind), _LOWER), dtype=np.uint8)
    width = int(np.argmax(codes == _END))
    rows = _as_rows(codes, len(records.headers), width)
    if rows is None:
        raise _explain_a3m(records, kind)
    deletions = _count_deletions(np.frombuffer(joined, dtype=np.uint8) >= ord("a"), *rows.shape)
    return Alignment(rows, deletions, tuple(records.headers))


def _as_rows(
    codes: npt.NDArray[np.uint8], num_rows: int, width: int
) -> npt.NDArray[np.int8] | None:
    """Cut codes with ends into rows; None if a row or letter does not fit."""
    if not width or len(codes) != num_rows * (width + 1):
        return None
    table = codes.reshape(num_rows, width + 1)
    rows = np.ascontiguousarray(table[:, :width]).view(np.int8)
    if (table[:, width] != _END).any() or rows.min() < 0:
        return None
    return rows


def _count_deletions(inserted: BoolArray, num_rows: int, width: int) -> npt.NDArray[np.uint16]:
    """Count the residues inserted before each column; every row has its columns and an end.

    Parameters
    ----------
    inserted : [n]
        Row after row: False for a column or an end, True for a residue between columns.
    """
    places = np.flatnonzero(inserted)
    columns, counts = np.unique(places - np.arange(len(places)), return_counts=True)
    deletions = np.zeros(num_rows * (width + 1), dtype=np.uint16)
    deletions[columns] = np.minimum(counts, MAX_DELETIONS)
    return np.ascontiguousarray(deletions.reshape(num_rows, width + 1)[:, :width])


def _align_columns(rows: list[bytes], names: list[str], where: Where, kind: Polymer) -> Alignment:
    """Keep the columns in which the first row has a residue, count the others as deletions."""
    joined = (b">".join(rows) + b">").upper().replace(b".", b"-")
    codes = np.frombuffer(joined.translate(_table(kind)), dtype=np.uint8)
    width = len(rows[0])
    for number, row in enumerate(rows):
        if len(row) != width:
            raise DataError(
                f"{where(number)}: has {len(row)} columns, the first row {width}; rows of an "
                "alignment have equal length"
            )
    if _as_rows(codes, len(rows), width) is None:
        raise _explain_letter(rows, where, kind)
    table = codes.reshape(len(rows), width + 1)
    kept = table[0] != GAP
    if kept.sum() < 2:
        raise DataError(f"{where(0)}: the first row is the query and has no residue")
    # The end counts as a column, so that what follows the last column stays in its row.
    inserted = np.broadcast_to(~kept, table.shape)[kept | (table != GAP)]
    columns = np.flatnonzero(kept[:-1])
    deletions = _count_deletions(inserted, len(rows), len(columns))
    kept_rows = np.ascontiguousarray(table[:, columns]).view(np.int8)
    return Alignment(kept_rows, deletions, tuple(names))


def _explain_a3m(records: Records, kind: Polymer) -> DataError:
    rows = [sequence.translate(None, BLANKS + b"." + _LOWER) for sequence in records.sequences]
    if not rows[0]:
        return DataError(
            f"{records.where(0)}: the first record is the query and has no residue in upper case "
            "(lower case is an insertion in an a3m file)"
        )
    for number, row in enumerate(rows):
        if not row.translate(None, _valid(kind)) and len(row) != len(rows[0]):
            return DataError(
                f"{records.where(number)}: has {len(row)} residues and gaps without insertions, "
                f"the query {len(rows[0])}; the file is cut off or not an a3m"
            )
    return _explain_letter(rows, records.where, kind)


def _explain_letter(rows: list[bytes], where: Where, kind: Polymer) -> DataError:
    for number, row in enumerate(rows):
        wrong = row.upper().translate(None, _valid(kind))
        if wrong:
            found = wrong[:1].decode("latin-1")
            return DataError(f"{where(number)}: '{found}' is neither a residue of {kind} nor a gap")
    return DataError(f"{where(0)}: the query has no residue")


def _valid(kind: Polymer) -> bytes:
    return "".join(LETTERS[kind]).encode() + b"-."
