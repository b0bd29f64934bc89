"""Matches of a search's query to chains: equal to one, a part of one, or containing one.

Databases of alignments write X for a modified residue, where a structure may name its parent: an
unknown residue is any.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from bevatron.data.readers.proteins.alphabet import CLASSES, UNKNOWN

SHORTEST_PART = 20
"""Minimum number of residues that a query and an unequal chain share."""

_NEAR = 0.8  # of the longer sequence: equal before the first and after the last difference

_END = b"\xff"  # no class of the alphabet
_UNKNOWN = set(UNKNOWN.values())


class Place(NamedTuple):
    """A chain that shares residues with a query.

    Attributes
    ----------
    chain : its classes of the alphabet, int8
    first
        Residue of the chain that the query's first residue is; negative where the query begins
        before the chain.
    """

    chain: bytes
    first: int


class ChainSequences:
    """The distinct sequences of chains, among which queries of searches are found.

    Parameters
    ----------
    chains : classes of the alphabet of each
    names : what they are called where a query is nearly one

    Examples
    --------
    >>> chains = ChainSequences([bytes(range(25)), bytes(range(10))])
    >>> chains.places(bytes(range(10)))[0].first, chains.places(bytes(range(3, 25)))[0].first
    (0, 3)
    >>> chains.places(bytes(range(3, 12)))
    []
    """

    def __init__(self, chains: Iterable[bytes], names: Mapping[bytes, str] | None = None) -> None:
        self._names = names or {}
        self._chains = list(dict.fromkeys(chains))
        self._known = set(self._chains)
        self._joined = _END.join(self._chains)
        self._starts = [0, *accumulate(len(chain) + 1 for chain in self._chains)]
        self._beginnings: dict[bytes, list[bytes]] = {}
        self._endings: dict[bytes, list[bytes]] = {}
        self._by_length: dict[int, list[bytes]] = {}
        for chain in self._chains:
            self._by_length.setdefault(len(chain), []).append(chain)
            if len(chain) >= SHORTEST_PART:
                self._beginnings.setdefault(chain[:SHORTEST_PART], []).append(chain)
                self._endings.setdefault(chain[-SHORTEST_PART:], []).append(chain)

    def places(self, query: bytes) -> list[Place]:
        """Return the chain equal to a query, else those equal except for unknown residues.

        Else those that hold it or that it holds.
        """
        if query in self._known:
            return [Place(query, 0)]
        if alike := [
            chain for chain in self._by_length.get(len(query), ()) if _alike(chain, query)
        ]:
            return [Place(chain, 0) for chain in alike]
        if len(query) < SHORTEST_PART:
            return []
        return [*self._around(query), *self._within(query)]

    def near_miss(self, query: bytes) -> str:
        """Say how a query differs from the chain that it nearly is; empty if it is far from all."""
        begun = self._beginnings.get(query[:SHORTEST_PART], ())
        ended = self._endings.get(query[-SHORTEST_PART:], ())
        likeness = {
            chain: (_shared(chain, query) + _shared(chain[::-1], query[::-1])) / max(lengths)
            for chain in dict.fromkeys((*begun, *ended))
            if min(lengths := (len(chain), len(query))) >= _NEAR * max(lengths)
        }
        nearest = max(likeness, key=likeness.__getitem__, default=b"")
        if likeness.get(nearest, 0.0) < _NEAR:
            return ""
        return difference(query, nearest, self._names.get(nearest, "the nearest chain"))

    def _around(self, query: bytes) -> list[Place]:
        """Find the chains that contain a query, each with its first match."""
        found = []
        number, place = 0, self._joined.find(query)
        while place >= 0:
            while self._starts[number + 1] <= place:
                number += 1
            found.append(Place(self._chains[number], place - self._starts[number]))
            place = self._joined.find(query, self._starts[number + 1])
        return found

    def _within(self, query: bytes) -> list[Place]:
        """Find the chains that a query contains."""
        found: dict[bytes, int] = {}
        for place in range(len(query) - SHORTEST_PART + 1):
            for chain in self._beginnings.get(query[place : place + SHORTEST_PART], ()):
                if query.startswith(chain, place):
                    found.setdefault(chain, place)
        return [Place(chain, -place) for chain, place in found.items()]


def difference(query: bytes, chain: bytes, name: str) -> str:
    """Say how the first sequence of an alignment differs from that of a chain.

    Examples
    --------
    >>> print(difference(bytes([0, 2]), bytes([0, 3, 2]), "4hhb_A"))
    its first sequence has 2 residues, that of 4hhb_A 3; residue 2 is the first to differ (N, not D)
    """
    shared = _shared(query, chain)
    if shared == len(query) == len(chain) and query != chain:  # an unknown residue is what differs
        shared = next(
            i for i, pair in enumerate(zip(query, chain, strict=True)) if len({*pair}) > 1
        )
    lengths = f"its first sequence has {len(query)} residues, that of {name} {len(chain)}"
    if shared == min(len(query), len(chain)):
        return f"{lengths}; up to residue {shared} they are equal"
    pair = f"{CLASSES[query[shared]]}, not {CLASSES[chain[shared]]}"
    return f"{lengths}; residue {shared + 1} is the first to differ ({pair})"


def _shared(a: bytes, b: bytes) -> int:
    """Count the residues before the first that differ; an unknown one is any."""
    most, place = min(len(a), len(b)), 0
    while place < most:
        # As numbers, whose highest bit that differs tells the place, they are compared at once.
        unlike = int.from_bytes(a[place:most]) ^ int.from_bytes(b[place:most])
        if not unlike:
            return most
        place = most - (unlike.bit_length() + 7) // 8
        if not _UNKNOWN & {a[place], b[place]}:
            return place
        place += 1
    return most


def _alike(chain: bytes, query: bytes) -> bool:
    """Whether sequences of equal length differ only at unknown residues."""
    if chain[0] != query[0] and not {chain[0], query[0]} & _UNKNOWN:
        return False  # most are told apart by their first residue
    pairs = np.frombuffer(chain, dtype=np.int8), np.frombuffer(query, dtype=np.int8)
    a, b = (residues[pairs[0] != pairs[1]].tolist() for residues in pairs)
    return all(_UNKNOWN & set(pair) for pair in zip(a, b, strict=True)) and len(a) < len(chain)
