"""Stockholm alignments as rows of text: jackhmmer, hmmsearch, hmmalign, Pfam and Rfam."""

from dataclasses import dataclass, field

from bevatron.data.readers.proteins.fasta import as_text
from bevatron.errors import DataError


@dataclass
class Stockholm:
    """One Stockholm alignment, its blocks joined.

    Attributes
    ----------
    names : name of each row, ``A0A0K0ME10/1-51``
    descriptions : text of ``#=GS NAME DE`` by name
    rows : row by row; all of the same length
    """

    name: str
    names: list[str] = field(default_factory=list)
    descriptions: dict[str, str] = field(default_factory=dict)
    rows: list[bytes] = field(default_factory=list)

    @property
    def headers(self) -> list[str]:
        """Name and description of each row, as a FASTA file has them."""
        return [f"{title} {self.descriptions.get(title, '')}".rstrip() for title in self.names]

    def where(self, index: int) -> str:
        """Return ``FILE, row 'NAME'``, for messages."""
        return f"{self.name}, row '{self.names[index]}'"


def parse_stockholm(data: bytes, name: str) -> Stockholm:
    """Read one alignment, in one block or several.

    Raises DataError if it is not a Stockholm file, is cut off, its blocks or rows do not fit
    together, or it holds a second alignment.
    """
    lines = as_text(data, name).split("\n")
    if not lines[0].startswith("# STOCKHOLM"):
        what = f"'{lines[0][:40]}'" if data.strip() else "an empty file"
        raise DataError(
            f"{name}: is not a Stockholm file; expected '# STOCKHOLM 1.0', found {what}"
        )
    found = Stockholm(name)
    blocks: list[list[str]] = [[]]
    for number, line in enumerate(lines[1:], start=2):
        if line.startswith("#=GS"):
            fields = line.split(None, 3)
            if len(fields) == 4 and fields[2] == "DE":
                found.descriptions[fields[1]] = fields[3].rstrip()
        elif line.startswith("//"):
            if any(line.strip() for line in lines[number:]):
                raise DataError(
                    f"{name}, line {number + 1}: a second alignment begins; give one per file"
                )
            found.rows = [row.encode("latin-1", "replace") for row in _joined(blocks)]
            _check_lengths(found)
            return found
        elif not line or line.isspace():
            if blocks[-1]:
                blocks.append([])
        elif not line.startswith("#"):
            _add_row(found, blocks, line, f"{name}, line {number}")
    raise DataError(f"{name}: is cut off, its last line is not '//'; copy or download it again")


def _add_row(found: Stockholm, blocks: list[list[str]], line: str, where: str) -> None:
    title, _, row = line.rstrip().partition(" ")
    row = row.lstrip()
    if not row:
        raise DataError(f"{where}: expected a name and a row of the alignment, found '{title}'")
    place = len(blocks[-1])
    if len(blocks) == 1:
        found.names.append(title)
    elif place >= len(found.names) or found.names[place] != title:
        expected = f"'{found.names[place]}'" if place < len(found.names) else "no further row"
        raise DataError(
            f"{where}: the rows of this block are not those of the first; expected {expected}, "
            f"found '{title}'"
        )
    blocks[-1].append(row)


def _joined(blocks: list[list[str]]) -> list[str]:
    blocks = [block for block in blocks if block]
    rows = len(blocks[0]) if blocks else 0
    return ["".join([block[i] for block in blocks if i < len(block)]) for i in range(rows)]


def _check_lengths(found: Stockholm) -> None:
    for number, row in enumerate(found.rows):
        if len(row) != len(found.rows[0]):
            raise DataError(
                f"{found.where(number)}: has {len(row)} columns, the first row "
                f"{len(found.rows[0])}; the file is damaged"
            )
