"""Matches of a search's query to chains: equal to one, a part of one, or containing one.

Databases of alignments write X for a modified residue, where a structure may name its parent: an
unknown residue is any.
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from bevatron.data.readers.proteins.alphabet import UNKNOWN

SHORTEST_PART = 20
"""Minimum number of residues that a query and an unequal chain share."""

_END = b"\xff"  # no class of the alphabet
_UNKNOWN = set(UNKNOWN.values())


class Place(NamedTuple):
    """A chain of which a query has residues.

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

    Examples
    --------
    >>> chains = ChainSequences([bytes(range(25)), bytes(range(10))])
    >>> chains.places(bytes(range(10)))[0].first, chains.places(bytes(range(3, 25)))[0].first
    (0, 3)
    >>> chains.places(bytes(range(3, 12)))
    []
    """

    def __init__(self, chains: Iterable[bytes]) -> None:
        self._chains = list(dict.fromkeys(chains))
        self._known = set(self._chains)
        self._joined = _END.join(self._chains)
        self._starts = [0, *accumulate(len(chain) + 1 for chain in self._chains)]
        self._beginnings: dict[bytes, list[bytes]] = {}
        self._by_length: dict[int, list[bytes]] = {}
        for chain in self._chains:
            self._by_length.setdefault(len(chain), []).append(chain)
            if len(chain) >= SHORTEST_PART:
                self._beginnings.setdefault(chain[:SHORTEST_PART], []).append(chain)

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


def _alike(chain: bytes, query: bytes) -> bool:
    """Whether sequences of equal length differ only at unknown residues."""
    if chain[0] != query[0] and not {chain[0], query[0]} & _UNKNOWN:
        return False  # most are told apart by their first residue
    pairs = np.frombuffer(chain, dtype=np.int8), np.frombuffer(query, dtype=np.int8)
    a, b = (residues[pairs[0] != pairs[1]].tolist() for residues in pairs)
    return all(_UNKNOWN & set(pair) for pair in zip(a, b, strict=True)) and len(a) < len(chain)
