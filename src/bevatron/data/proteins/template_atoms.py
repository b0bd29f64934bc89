"""Templates of a protein's sequence: the backbone of the structures that a search has hit."""

import datetime as dt
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.data.proteins.templates import Templates
from bevatron.data.readers.proteins.alphabet import GAP, LETTERS, UNKNOWN
from bevatron.data.readers.proteins.hits import TemplateHits
from bevatron.data.readers.proteins.structure import Structure
from bevatron.typing import IntArray

MAX_TEMPLATES = 20
"""Templates that are kept of a sequence."""

MIN_RESIDUES, MIN_SHARE, MAX_SHARE = 10, 0.1, 0.95
"""A hit is left out if it aligns fewer residues or a smaller share of the query, or if it is an
exact copy of more than the last share of the query."""

MIN_IDENTITY = 0.9
"""Share of a hit's residues that its chain must have where the hit says; else it is another chain
or another numbering."""

_BACKBONE = {"N": 0, "CA": 1, "C": 2, "CB": 3}


def find_templates(
    query: str,
    hits: TemplateHits,
    structures: Callable[[str], Structure | None],
    *,
    before: dt.date | None = None,
    most: int = MAX_TEMPLATES,
) -> Templates:
    """Take the atoms of the first hits that can be templates (AlphaFold3, section 2.4, table 5).

    Parameters
    ----------
    query
        Sequence of L residues, in one letter each.
    hits
        Of this query, the best first.
    structures
        Opens an entry by its code in lower case; None if there is none.
    before
        Only entries released before this day; None for any. An entry without a date is left out.
    most
        How many to keep.
    """
    found = [
        _template(structure, chain, pairs, len(query))
        for structure, chain, pairs in usable_hits(
            query, hits, structures, before=before, most=most
        )
    ]
    # A first one without residues gives the shapes where there are no templates.
    rows = [_empty(len(query)), *found]
    return Templates(**{name: np.stack([row[name] for row in rows])[1:] for name in rows[0]})


def usable_hits(
    query: str,
    hits: TemplateHits,
    structures: Callable[[str], Structure | None],
    *,
    before: dt.date | None = None,
    most: int = MAX_TEMPLATES,
) -> Iterator[tuple[Structure, int, IntArray]]:
    """Yield structure, chain and aligned residues of the first hits that can be templates.

    Parameters as for `find_templates`; the residues are pairs (of the query, of the chain),
    int64 [pairs, 2].
    """
    count = 0
    for hit in range(len(hits)):
        if count == most:
            return
        pairs = hits.pairs_of(hit).astype(np.int64)
        pairs = pairs[pairs[:, 0] < len(query)]
        if len(pairs) < max(MIN_RESIDUES, MIN_SHARE * len(query)):
            continue
        structure = structures(hits.entries[hit])
        if structure is None or not _released_before(structure, before):
            continue
        chain = _chain(structure, hits.chains[hit])
        if chain is None:
            continue
        placed = _placed(structure.sequence(chain), hits, hit, pairs)
        if placed is None or _is_copy(query, structure.sequence(chain), placed):
            continue
        count += 1
        yield structure, chain, placed


def _released_before(structure: Structure, day: dt.date | None) -> bool:
    return day is None or (structure.released is not None and structure.released < day)


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


def _empty(length: int) -> dict[str, Any]:
    return {
        "restype": np.full(length, GAP, dtype=np.int8),
        "pseudo_beta": np.zeros((length, 3), dtype=np.float32),
        "pseudo_beta_mask": np.zeros(length, dtype=np.bool_),
        "backbone": np.zeros((length, 3, 3), dtype=np.float32),
        "backbone_mask": np.zeros(length, dtype=np.bool_),
    }


def _template(structure: Structure, chain: int, pairs: IntArray, length: int) -> dict[str, Any]:
    """Put the atoms of a chain at the positions of the query."""
    position, known = _backbone(structure, chain)
    letters = structure.sequence(chain)
    classes = np.array(
        [LETTERS["protein"].get(letter, UNKNOWN["protein"]) for letter in letters], dtype=np.int8
    )
    glycine = classes == LETTERS["protein"]["G"]
    beta = np.where(glycine, _BACKBONE["CA"], _BACKBONE["CB"])
    rows = np.arange(len(letters))
    query, target = pairs.T
    template = _empty(length)
    template["restype"][query] = classes[target]
    template["pseudo_beta"][query] = position[rows, beta][target]
    template["pseudo_beta_mask"][query] = known[rows, beta][target]
    whole = known[target, :3].all(axis=1)
    template["backbone"][query[whole]] = position[target[whole], :3]
    template["backbone_mask"][query] = whole
    return template


def _backbone(
    structure: Structure, chain: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Find N, CA, C and CB of each residue, [residues, 4, 3], and whether they were observed."""
    first, past = structure.chains.residue_ptr[chain : chain + 2].tolist()
    atoms = structure.atoms
    rows = slice(*structure.residues.atom_ptr[[first, past]].tolist())
    position = np.zeros((past - first, len(_BACKBONE), 3), dtype=np.float32)
    known = np.zeros(position.shape[:2], dtype=np.bool_)
    for name, column in _BACKBONE.items():
        named = np.flatnonzero(atoms.name[rows] == name)
        residue = atoms.residue[rows][named] - first
        position[residue, column] = atoms.position[rows][named]
        known[residue, column] = True
    return position, known
