"""Clusters of similar protein sequences: by mmseqs2, built in, or from a file."""

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bevatron.data.compressed import read_whole
from bevatron.data.readers.proteins.alphabet import LETTERS, UNKNOWN
from bevatron.errors import DataError
from bevatron.typing import IntArray

IDENTITY = 0.4
"""Sequence identity above which two proteins share a cluster."""

COVERAGE = 0.8
"""Fraction of the longer sequence that an alignment must cover."""

_WORD = 3
_BAND = 8
_MISMATCH, _GAP_COST = 0.25, 0.5


def cluster_proteins(
    sequences: Mapping[int, str], identity: float = IDENTITY, *, mmseqs: str = "mmseqs"
) -> dict[int, int]:
    """Cluster proteins by mmseqs2 where it is installed, else by `similar_to_earlier`.

    Raises DataError if mmseqs2 fails.

    Parameters
    ----------
    sequences : by key
    identity : share of equal residues of the alignment
    mmseqs : the program

    Returns
    -------
    dict
        Number of its cluster by key, in the order of the clusters' first members.
    """
    keys = list(sequences)
    program = shutil.which(mmseqs)
    if program is not None and keys:
        return _by_mmseqs(program, sequences, identity)
    found = similar_to_earlier([sequences[key] for key in keys], identity)
    number = _in_order(found.tolist())
    return dict(zip(keys, number, strict=True))


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
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
            raise DataError(f"{program}: could not cluster {len(sequences)} proteins: {last[0]}")
        named = read_clusters(f"{folder}/out_cluster.tsv")
    keys = list(sequences)
    return dict(zip(keys, _in_order([named[str(key)] for key in keys]), strict=True))


def similar_to_earlier(sequences: Sequence[str], identity: float = IDENTITY) -> IntArray:
    """Cluster proteins greedily: the longest first, each to the first similar representative.

    Two are compared if one is no shorter than `COVERAGE` of the other and they share some words of
    three residues on a band of diagonals; they are similar by `alignment_identity`. For thousands
    of sequences; mmseqs2 is for millions.

    Returns
    -------
    int64 [n]
        Index of the representative of each sequence.
    """
    codes = [_codes(sequence) for sequence in sequences]
    order = np.argsort([-len(code) for code in codes], kind="stable")
    representative = np.arange(len(codes))
    index = _WordIndex()
    for place in order.tolist():
        for other in index.candidates(codes[place]):
            if alignment_identity(codes[other], codes[place]) >= identity:
                representative[place] = other
                break
        else:
            index.add(place, codes[place])
    return representative


def _codes(sequence: str) -> npt.NDArray[np.int64]:
    letters, unknown = LETTERS["protein"], UNKNOWN["protein"]
    return np.array([letters.get(letter, unknown) for letter in sequence], dtype=np.int64)


def _words(codes: npt.NDArray[np.int64]) -> tuple[IntArray, IntArray]:
    """Words of a sequence and where they begin; those with an unknown residue are left out."""
    if len(codes) < _WORD:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(codes, _WORD)
    known = np.flatnonzero((windows < 20).all(axis=1))
    return windows[known] @ (20 ** np.arange(_WORD)), known


class _WordIndex:
    """Index of the k-mers of the representatives."""

    def __init__(self) -> None:
        self._of_word: dict[int, list[tuple[int, int]]] = {}
        self._length: dict[int, int] = {}

    def add(self, number: int, codes: npt.NDArray[np.int64]) -> None:
        """Index a representative."""
        self._length[number] = len(codes)
        for word, place in zip(*(part.tolist() for part in _words(codes)), strict=True):
            self._of_word.setdefault(word, []).append((number, place))

    def candidates(self, codes: npt.NDArray[np.int64]) -> list[int]:
        """Find representatives that share words on a band of diagonals, most of them first."""
        bands: dict[tuple[int, int], int] = {}
        for word, place in zip(*(part.tolist() for part in _words(codes)), strict=True):
            for number, other in self._of_word.get(word, ()):
                for band in ((other - place) // _BAND, (other - place) // _BAND + 1):
                    bands[number, band] = bands.get((number, band), 0) + 1
        best: dict[int, int] = {}
        for (number, _), count in bands.items():
            best[number] = max(best.get(number, 0), count)
        # Unrelated sequences share that many in one of some hundred pairs.
        enough = [
            number
            for number, count in best.items()
            if count >= 2 + len(codes) // 100 and len(codes) >= COVERAGE * self._length[number]
        ]
        return sorted(enough, key=lambda number: (-best[number], number))


def alignment_identity(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> float:
    """Return the share of equal residues in a global alignment of two sequences.

    Equal pairs over the length of the longer sequence, in the alignment of most equal pairs less a
    quarter of the unequal ones and half of the residues beside gaps; gaps at ends are free.
    """
    if len(first) < len(second):
        first, second = second, first
    columns = np.arange(len(second) + 1)
    best = np.zeros(len(second) + 1)
    equal = np.zeros(len(second) + 1, dtype=np.int64)
    top, equal_at_top = 0.0, 0
    for residue in first.tolist():
        same = second == residue
        moved = best[:-1] + np.where(same, 1.0, -_MISMATCH)
        down = best[1:] - _GAP_COST
        step = np.concatenate([[0.0], np.maximum(moved, down)])
        count = np.concatenate([[0], np.where(moved >= down, equal[:-1] + same, equal[1:])])
        # A gap in the first sequence: the best to the left, less its length.
        lifted = step + _GAP_COST * columns
        source = _running_argmax(lifted)
        best, equal = lifted[source] - _GAP_COST * columns, count[source]
        if best[-1] > top:
            top, equal_at_top = float(best[-1]), int(equal[-1])
    place = int(best.argmax())
    if best[place] > top:
        equal_at_top = int(equal[place])
    return equal_at_top / len(first)


def _running_argmax(values: npt.NDArray[np.float64]) -> IntArray:
    """Return the index of the largest value up to each index."""
    largest = np.maximum.accumulate(values)
    places = np.where(values == largest, np.arange(len(values)), 0)
    return np.maximum.accumulate(places)
