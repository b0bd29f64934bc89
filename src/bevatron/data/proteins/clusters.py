"""Clusters of similar protein sequences: by mmseqs2, built in, or from a file."""

import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bevatron.data.compressed import read_whole
from bevatron.data.readers.proteins.alphabet import sequence_classes
from bevatron.errors import DataError
from bevatron.typing import FloatArray, IntArray

IDENTITY = 0.4
"""Sequence identity above which two proteins share a cluster."""

COVERAGE = 0.8
"""Fraction of the longer sequence that an alignment must cover."""

_WORD = 3
_BAND = 8
_SHIFT = 32
_PLACES, _MIDDLE = (1 << _SHIFT) - 1, 1 << (_SHIFT - 1)
_AT_ONCE = 16
_SCORE = 1 << 20
_NO_CLASS = 21


def cluster_proteins(
    sequences: Mapping[int, str],
    identity: float = IDENTITY,
    *,
    mmseqs: str = "mmseqs",
    advance: Callable[[int], None] = lambda _count: None,
) -> dict[int, int]:
    """Cluster proteins by mmseqs2 where it is installed, else by `similar_to_earlier`.

    Raises DataError if mmseqs2 fails.

    Parameters
    ----------
    sequences : by key
    identity : share of equal residues of the alignment
    mmseqs : the program
    advance : called with the number of sequences that are done

    Returns
    -------
    dict
        Number of its cluster by key, in the order of the clusters' first members.
    """
    keys = list(sequences)
    program = shutil.which(mmseqs)
    if program is not None and keys:
        found_there = _by_mmseqs(program, sequences, identity)
        advance(len(keys))
        return found_there
    found = similar_to_earlier([sequences[key] for key in keys], identity, advance=advance)
    number = _in_order(found.tolist())
    return dict(zip(keys, number, strict=True))


def mmseqs_version() -> str:
    """Return the version of mmseqs2, which decides on its clusters; empty if it is not installed.

    Raises DataError if mmseqs2 fails.
    """
    program = shutil.which("mmseqs")
    return "" if program is None else _run([program, "version"], "say its version").strip()


def read_clusters(path: str | Path) -> dict[str, int]:
    """Read a file of clusters: one line each with its members, or mmseqs2's pairs.

    A line with a tab is a representative and a member (``mmseqs easy-cluster``); any other line
    holds all members of one cluster between blanks (RCSB, OpenFold). Raises DataError if a member
    is in two clusters.

    Returns
    -------
    dict
        Number of its cluster by member.
    """
    found: dict[str, int] = {}
    representatives: dict[str, int] = {}
    for row, line in enumerate(read_whole(path).decode("utf-8", "replace").splitlines()):
        first, tab, member = line.strip().partition("\t")
        number = representatives.setdefault(first, len(representatives)) if tab else row
        for name in [member.strip()] if tab else line.split():
            if found.setdefault(name, number) != number:
                raise DataError(
                    f"{path}, line {row + 1}: '{name}' is in an earlier cluster too; each sequence "
                    "belongs to one"
                )
    return found


def _in_order(labels: Sequence[int]) -> list[int]:
    order: dict[int, int] = {}
    return [order.setdefault(label, len(order)) for label in labels]


def _by_mmseqs(program: str, sequences: Mapping[int, str], identity: float) -> dict[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        fasta = Path(folder) / "sequences.fasta"
        fasta.write_text("".join(f">{key}\n{text}\n" for key, text in sequences.items()))
        command = [program, "easy-cluster", str(fasta), f"{folder}/out", f"{folder}/work"]
        command += ["--min-seq-id", str(identity), "-c", str(COVERAGE), "--cluster-mode", "1"]
        _run(command, f"cluster {len(sequences)} proteins")
        named = read_clusters(f"{folder}/out_cluster.tsv")
    keys = list(sequences)
    return dict(zip(keys, _in_order([named[str(key)] for key in keys]), strict=True))


def _run(command: Sequence[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise DataError(f"{command[0]}: could not {what}: {last[0]}")
    return done.stdout


def similar_to_earlier(
    sequences: Sequence[str],
    identity: float = IDENTITY,
    *,
    advance: Callable[[int], None] = lambda _count: None,
) -> IntArray:
    """Cluster proteins greedily: the longest first, each to the first similar representative.

    Two are compared if one is no shorter than `COVERAGE` of the other and they share some words of
    three residues on a band of diagonals; they are similar by `alignment_identities`. For tens of
    thousands of sequences; mmseqs2 is for millions.

    Parameters
    ----------
    identity : share of equal residues of the alignment
    advance : called with 1 after each sequence

    Returns
    -------
    int64 [n]
        Index of the representative of each sequence.
    """
    codes = [sequence_classes("protein", each).astype(np.int64) for each in sequences]
    order = np.argsort([-len(code) for code in codes], kind="stable")
    representative = np.arange(len(codes))
    index = _WordIndex()
    for place in order.tolist():
        found = _first_similar(index.candidates(codes[place]), codes, place, identity)
        if found is None:
            index.add(place, codes[place])
        else:
            representative[place] = found
        advance(1)
    return representative


def _first_similar(
    candidates: Sequence[int], codes: Sequence[IntArray], place: int, identity: float
) -> int | None:
    """Return the first similar one; mostly the first of all is, so the others wait."""
    for start, stop in (
        (0, 1),
        *((at, at + _AT_ONCE) for at in range(1, len(candidates), _AT_ONCE)),
    ):
        some = candidates[start:stop]
        if some:
            shares = alignment_identities([codes[other] for other in some], codes[place])
            similar = np.flatnonzero(shares >= identity)
            if len(similar):
                return some[int(similar[0])]
    return None


def _words(codes: IntArray) -> tuple[IntArray, IntArray]:
    """Words of a sequence and where they begin; those with an unknown residue are left out."""
    if len(codes) < _WORD:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(codes, _WORD)
    known = np.flatnonzero((windows < 20).all(axis=1))
    return windows[known] @ (20 ** np.arange(_WORD)), known


class _WordIndex:
    """Index of the k-mers of the representatives."""

    def __init__(self) -> None:
        # Number of the representative and place of the word in it, as one integer each.
        self._of_word: dict[int, array[int]] = {}
        self._length: dict[int, int] = {}

    def add(self, number: int, codes: IntArray) -> None:
        """Index a representative."""
        self._length[number] = len(codes)
        for word, place in zip(*(part.tolist() for part in _words(codes)), strict=True):
            self._of_word.setdefault(word, array("q")).append(number << _SHIFT | place)

    def candidates(self, codes: IntArray) -> list[int]:
        """Find representatives that share words on a band of diagonals, most of them first."""
        words, places = _words(codes)
        parts = [np.frombuffer(self._of_word.get(word, b""), np.int64) for word in words.tolist()]
        if not sum(map(len, parts)):
            return []
        joined = np.concatenate(parts)
        diagonal = (joined & _PLACES) - np.repeat(places, [len(part) for part in parts])
        # Bands overlap by half; one is a number that no other representative's band has.
        band = (joined & ~_PLACES) + _MIDDLE + diagonal // _BAND
        bands, counts = np.unique(np.concatenate([band, band + 1]), return_counts=True)
        numbers, first = np.unique(bands >> _SHIFT, return_index=True)
        most = np.maximum.reduceat(counts, first)
        # Above 200 residues few unrelated pairs share that many, below up to a tenth of them; a
        # higher threshold loses short relatives.
        enough = [
            (-count, number)
            for number, count in zip(numbers.tolist(), most.tolist(), strict=True)
            if count >= 2 + len(codes) // 100 + len(codes) // 150
            and len(codes) >= COVERAGE * self._length[number]
        ]
        return [number for _, number in sorted(enough)]


def alignment_identities(longer: Sequence[IntArray], shorter: IntArray) -> FloatArray:
    """Return the share of equal residues in the global alignment of each sequence with another.

    Equal pairs over the length of the longer sequence, in the best alignment: a match scores 1, a
    mismatch -1/4, a residue opposite a gap -1/2; gaps at ends are free.

    Parameters
    ----------
    longer : codes of k sequences, none shorter than the other
    shorter : codes of the other

    Returns
    -------
    float64 [k]
    """
    lengths = np.array([len(codes) for codes in longer])
    residues = np.full((len(longer), int(lengths.max())), _NO_CLASS)
    for row, codes in enumerate(longer):
        residues[row, : len(codes)] = codes
    # One integer has the score in quarters and, below it, the equal pairs on the way to it: the
    # largest is the best score, of equal ones that of most pairs.
    pairs = np.where(np.arange(_NO_CLASS + 1)[:, None] == shorter, 4 * _SCORE + 1, -_SCORE)
    gap = 2 * _SCORE
    lift = gap * np.arange(len(shorter) + 1)
    best = np.zeros((len(longer), len(lift)), dtype=np.int64)
    top = np.zeros(len(longer), dtype=np.int64)
    for row in range(residues.shape[1]):
        moved = best[:, :-1] + pairs[residues[:, row]]
        best -= gap
        best[:, 0] = 0
        np.maximum(best[:, 1:], moved, out=best[:, 1:])
        # A gap in the longer sequence: the best to the left, less its length.
        best += lift
        np.maximum.accumulate(best, axis=1, out=best)
        best -= lift
        np.maximum(top, best[:, -1], out=top, where=row < lengths)
        for ended in np.flatnonzero(lengths == row + 1).tolist():
            top[ended] = max(top[ended], best[ended].max())
    shares: FloatArray = (top & (_SCORE - 1)) / lengths
    return shares
