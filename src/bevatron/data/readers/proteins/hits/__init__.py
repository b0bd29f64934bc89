"""Template hits: tables of MMseqs2 and BLAST (m8), HH-suite (hhr), hmmsearch (a3m, Stockholm)."""

from pathlib import Path

from bevatron.data.compressed import format_suffix, read_whole
from bevatron.data.readers.proteins.hits.hhr import parse_hhr
from bevatron.data.readers.proteins.hits.hmmsearch import parse_hmmsearch
from bevatron.data.readers.proteins.hits.m8 import parse_m8
from bevatron.data.readers.proteins.hits.table import TemplateHits, collect, joined
from bevatron.errors import DataError

__all__ = ["TemplateHits", "joined", "parse_hits", "read_hits"]

_FORMATS = {
    ".m8": "m8",
    ".tsv": "m8",
    ".tab": "m8",
    ".hhr": "hhr",
    ".a3m": "a3m",
    ".sto": "stockholm",
}


def read_hits(path: str | Path) -> TemplateHits:
    r"""Read template hits in the order of their file, also compressed.

    Raises DataError naming file and line or hit of what does not fit.

    Parameters
    ----------
    path
        .m8, .tsv or .tab (MMseqs2's or BLAST's columns, with ``cigar`` as the last or a line of
        column names), .hhr (HHsearch, HHblits), .a3m or .sto (hmmsearch with the query's profile,
        one match column per residue of the query). A file without hits gives none.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "hits.m8"
    >>> row = "101 4hhb_A 0.9 5 1 1 2 6 11 14 1e-9 70 3M1I1M"
    >>> _ = path.write_text(row.replace(" ", "\t") + "\n")
    >>> hits = read_hits(path)
    >>> hits.targets, hits.pairs_of(0).tolist()
    (('4hhb_A',), [[1, 10], [2, 11], [3, 12], [5, 13]])
    """
    path = Path(path)
    format_ = _FORMATS.get(format_suffix(path))
    if format_ is None:
        raise DataError(
            f"{path}: is not in a known format of template hits; the name must end in one of "
            f"{', '.join(_FORMATS)}"
        )
    return parse_hits(read_whole(path), str(path), format_)


def parse_hits(data: bytes, name: str, format_: str) -> TemplateHits:
    """Read template hits from memory.

    Parameters
    ----------
    data : content of the file, not compressed
    name : what messages call it
    format_ : ``m8``, ``hhr``, ``a3m`` or ``stockholm``
    """
    if not data.strip():
        return collect([])
    if format_ == "m8":
        return collect(parse_m8(data, name))
    if format_ == "hhr":
        return collect(parse_hhr(data, name))
    return collect(parse_hmmsearch(data, name, format_))
