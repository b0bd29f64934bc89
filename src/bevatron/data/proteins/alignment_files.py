"""Files of alignments as the raw samples of a store: one sample for each distinct sequence.

All files whose first record, the query, is the same sequence are one sample, in the order in which
they are given (UniRef90, BFD, MGnify ...); a file with the content of an earlier one adds nothing.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from bevatron.data.compressed import format_suffix, read_blocks
from bevatron.data.proteins.places import ChainSequences, Place
from bevatron.data.readers.base import FileState, state_and_hash
from bevatron.data.readers.proteins.alignments import Alignment, parse_alignment, read_alignment
from bevatron.data.readers.proteins.alphabet import GAP, Polymer
from bevatron.data.readers.proteins.names import parse_names
from bevatron.errors import DataError, reason_of
from bevatron.typing import Arrays

OF_NO_CHAIN = "its first sequence is neither that of a chain of the structures nor a part of one"

_LONGEST_QUERY = 4 << 20  # bytes in which a first row ends; no protein has that many residues
_SYMBOLS = " 0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Without one of these a name has neither species nor taxon; most names of metagenomes have none.
_HAS_ORIGIN = re.compile(r"_|OX|Tax|taxid")


def species_number(mnemonic: str, taxon: int) -> int:
    """Return one number for a species: negative for a mnemonic, else NCBI's taxon, 0 for none.

    A mnemonic (at most five of A to Z and 0 to 9) is its digits in base 37 after a minus sign, so
    that no two have the same number.

    Examples
    --------
    >>> species_number("", 9606), species_number("AB", 0), species_number("", 0)
    (9606, -419, 0)
    """
    if not mnemonic:
        return taxon
    number = 0
    for letter in mnemonic:
        number = number * len(_SYMBOLS) + _SYMBOLS.index(letter)
    return -number


def species_of(names: Sequence[str]) -> npt.NDArray[np.int32]:
    """Return `species_number` of each row by its name, int32 [rows]."""
    numbers = np.zeros(len(names), dtype=np.int32)
    with_origin = [i for i, name in enumerate(names) if _HAS_ORIGIN.search(name)]
    origins = parse_names([names[i] for i in with_origin])
    found = zip(with_origin, origins.species, origins.taxa.tolist(), strict=True)
    for i, mnemonic, taxon in found:
        numbers[i] = species_number(mnemonic, taxon)
    return numbers


class AlignmentReader:
    """Alignments of distinct sequences, from any number of files each.

    Raises DataError with ``strict`` if a file cannot be read or does not begin with a query.

    Parameters
    ----------
    proteins, rnas : files as `read_alignment` takes them, better databases first
    chains
        Sequences that are wanted. Alignments of others are left out; one of a part of a chain gets
        gaps in the rest, and one that contains a chain is cut to its columns. None takes all
        alignments as they are.
    strict : a damaged file is an error; else it is left out

    Attributes
    ----------
    sources : the files, as given
    fingerprint : hash of their content
    num_samples : number of distinct sequences, in the order of their first files
    rejects : (file, reason) of files that do not begin with a query or match no chain
    queries : classes of the first sequence of each file
    partial : how many of them are part of a chain or contain one, and are used for it
    """

    def __init__(
        self,
        proteins: Sequence[str | Path],
        rnas: Sequence[str | Path] = (),
        *,
        chains: ChainSequences | None = None,
        strict: bool = True,
    ) -> None:
        self.strict = strict
        self.queries: dict[Path, bytes] = {}
        self.partial = 0
        self.rejects: list[tuple[str, str]] = []
        files: list[tuple[Path, Polymer]] = [(Path(path), "protein") for path in proteins]
        files += [(Path(path), "rna") for path in rnas]
        self.sources = [str(path) for path, _ in files]
        self._states: dict[int, FileState] = {}
        self._groups: dict[bytes, list[tuple[int, Polymer, int]]] = {}
        whole = xxhash.xxh3_128()
        known: dict[tuple[str, Polymer], bytes] = {}
        for number, (path, kind) in enumerate(files):
            try:
                self._states[number], content = state_and_hash(path)
                whole.update(f"{content} {kind}\n".encode())
                again = (content, kind) in known
                if not again:
                    known[content, kind] = _query(path, kind)
                query = known[content, kind]
            except DataError as error:
                if strict:
                    raise
                self.rejects.append((str(path), reason_of(error, path)))
                continue
            self.queries[path] = query
            places = [Place(query, 0)] if chains is None else chains.places(query)
            if chains is not None and not places:
                self.rejects.append((str(path), chains.near_miss(query) or OF_NO_CHAIN))
            for place in [] if again else places:
                whole.update(place.chain + str(place.first).encode())
                self._groups.setdefault(place.chain, []).append((number, kind, place.first))
                self.partial += len(place.chain) != len(query)
        self._order = list(self._groups.items())
        self.fingerprint = whole.hexdigest()
        self.num_samples = len(self._order)

    def read(self, start: int, stop: int) -> Iterator[Arrays]:
        """Yield ``rows``, ``deletions``, ``species``, ``files``, ``file_rows`` of each sequence.

        ``reason`` names the damaged files among them; if all are, the query is the only row.
        """
        for query, group in self._order[start:stop]:
            parts, numbers, reasons = [], [], []
            for number, kind, first in group:
                self._states[number].refuse_change()
                try:
                    found = read_alignment(self.sources[number], kind)
                    parts.append(_placed(found, query, first))
                    numbers.append(number)
                except DataError as error:
                    if self.strict:
                        raise
                    reasons.append(
                        f"{self.sources[number]}\t{reason_of(error, self.sources[number])}"
                    )
            if not parts:
                rows = np.frombuffer(query, dtype=np.int8)[None]
                parts.append(Alignment(rows, np.zeros(rows.shape, dtype=np.uint16), ("query",)))
                numbers.append(group[0][0])
            yield {
                "rows": np.concatenate([part.rows for part in parts]),
                "deletions": np.concatenate([part.deletions for part in parts]),
                "species": np.concatenate([species_of(part.names) for part in parts]),
                "files": np.array(numbers, dtype=np.int32),
                "file_rows": np.array([len(part.rows) for part in parts], dtype=np.int32),
                "reason": np.frombuffer("\n".join(reasons).encode(), dtype=np.uint8),
            }

    def describe(self, index: int) -> str:
        """Return the files of a sequence."""
        return ", ".join(self.sources[number] for number, *_ in self._order[index][1])


def _placed(found: Alignment, chain: bytes, first: int) -> Alignment:
    """Map the rows to the chain, with gaps where the query lacks its residues."""
    query = np.frombuffer(chain, dtype=np.int8)
    if np.array_equal(found.rows[0], query):
        return found
    columns = np.arange(found.rows.shape[1]) + first
    kept = (columns >= 0) & (columns < len(query))
    rows = np.full((len(found.rows), len(query)), GAP, dtype=np.int8)
    deletions = np.zeros(rows.shape, dtype=np.uint16)
    rows[:, columns[kept]] = found.rows[:, kept]
    deletions[:, columns[kept]] = found.deletions[:, kept]
    rows[0], deletions[0] = query, 0
    with_residues = np.flatnonzero((rows != GAP).any(axis=1))
    names = tuple(found.names[row] for row in with_residues.tolist())
    return Alignment(rows[with_residues], deletions[with_residues], names)


def _query(path: Path, kind: Polymer) -> bytes:
    """Return the classes of the first row, of an a3m file without reading the rest."""
    if format_suffix(path) != ".a3m":
        return bytes(read_alignment(path, kind).rows[0].data)
    start = b""
    for block in read_blocks(path):
        start += block
        if start.find(b"\n>", start.find(b">")) > 0 or len(start) > _LONGEST_QUERY:
            break
    head = start.find(b"\n>", max(start.find(b">"), 0))
    try:
        if head >= 0 or len(start) <= _LONGEST_QUERY:
            first = start[: head if head > 0 else None]
            return bytes(parse_alignment(first, str(path), "a3m", kind).rows[0].data)
    except DataError:
        pass
    return bytes(read_alignment(path, kind).rows[0].data)  # its messages name line and record
