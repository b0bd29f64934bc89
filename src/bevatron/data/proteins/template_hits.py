"""Selection of the hits that can be templates of a protein."""

import datetime as dt
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bevatron.data.readers.proteins.hits import TemplateHits
from bevatron.data.readers.proteins.structure import Structure
from bevatron.typing import IntArray

MAX_TEMPLATES = 20
"""Maximum number of templates of a sequence."""

EMBARGO = dt.timedelta(days=60)
"""A template was released at least this long before the chain."""

MIN_RESIDUES, MIN_SHARE, MAX_SHARE = 10, 0.1, 0.95
"""A hit is left out if it aligns fewer residues or a smaller share of the query, or if it is an
exact copy of more than the last share of the query."""

MIN_IDENTITY = 0.9
"""Share of a hit's residues that its chain must have where the hit says; else it is another chain
or another numbering."""


def usable_hits(
    query: str,
    hits: TemplateHits,
    structures: Callable[[str], Structure | None],
    *,
    until: Sequence[dt.date | None] = (None,),
    most: int = MAX_TEMPLATES,
) -> Iterator[tuple[Structure, int, IntArray]]:
    """Yield structure, chain and aligned residues of the first hits that can be templates.

    Supplement of AlphaFold2, section 1.2.3, and of AlphaFold3, section 2.4.

    Parameters
    ----------
    query : sequence of L residues, in one letter each
    hits : hits of this query, the best first
    structures : opens an entry by its code in lower case; None if there is none
    until
        Days; None for any. For each the best hits released by then are taken; an entry
        without a date was released by none.
    most : maximum number for each day

    Yields
    ------
    Structure, number of the chain, and residues of the query and of the chain, int64 [pairs, 2].
    """
    counts = [0] * len(until)
    for hit in range(len(hits)):
        if min(counts) >= most:
            return
        pairs = hits.pairs_of(hit).astype(np.int64)
        pairs = pairs[(pairs[:, 0] >= 0) & (pairs[:, 0] < len(query))]
        if len(pairs) < max(MIN_RESIDUES, MIN_SHARE * len(query)):
            continue
        structure = structures(hits.entries[hit])
        if structure is None:
            continue
        days = [n for n, day in enumerate(until) if _released_by(structure, day)]
        days = [n for n in days if counts[n] < most]
        chain = _chain(structure, hits.chains[hit])
        if not days or chain is None:
            continue
        placed = _placed(structure.sequence(chain), hits, hit, pairs)
        if placed is None or _is_copy(query, structure.sequence(chain), placed):
            continue
        for n in days:
            counts[n] += 1
        yield structure, chain, placed


def _released_by(structure: Structure, day: dt.date | None) -> bool:
    return day is None or (structure.released is not None and structure.released <= day)


def _chain(structure: Structure, name: str) -> int | None:
    """Find a protein by the author's name of its chain, else by its label, else the only one."""
    protein = np.flatnonzero(structure.chains.kind == "protein")
    for names in (structure.chains.author, structure.chains.label):
        named = protein[names[protein] == name]
        if len(named):
            return int(named[0])
    return int(protein[0]) if len(protein) == 1 and not name else None


def _placed(sequence: str, hits: TemplateHits, hit: int, pairs: IntArray) -> IntArray | None:
    """Return pairs of positions in the query and in the chain; None if they do not belong to it.

    Some databases number the residues that were observed, not the sequence: then the hit's own
    sequence is looked for in the chain's.
    """
    aligned = hits.sequences[hit]
    first = int(hits.target_ranges[hit, 0])
    if not aligned:
        return pairs if pairs[:, 1].max() < len(sequence) else None
    offsets = [0] if _agrees(sequence[first:], aligned) else []
    place = sequence.find(aligned)
    if place >= 0:
        offsets.append(place - first)
    if not offsets:
        return None
    moved = pairs + np.array([0, offsets[0]])
    return moved if moved[:, 1].max() < len(sequence) else None


def _agrees(sequence: str, aligned: str) -> bool:
    """Whether enough letters are equal; X stands for any."""
    if len(sequence) < len(aligned):
        return False
    letters = zip(sequence, aligned, strict=False)
    equal = sum(a == b or "X" in (a, b) for a, b in letters)
    return equal >= MIN_IDENTITY * len(aligned)


def _is_copy(query: str, sequence: str, pairs: IntArray) -> bool:
    """Whether the template holds nearly the whole query without a difference or a gap."""
    same = all(query[i] == sequence[j] for i, j in pairs.tolist())
    contiguous = bool((np.diff(pairs, axis=0) == 1).all())
    return same and contiguous and len(pairs) > MAX_SHARE * len(query)
