"""Crops of AlphaFold-Multimer, AlphaFold3 and AlphaFold2: the tokens of an entry that are used.

Tokens are never split. An entry that fits is never cropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bevatron.typing import Array, Arrays, BoolArray, FloatArray, IntArray

CONTIGUOUS, SPATIAL, INTERFACE = 0, 1, 2
"""The three crops of AlphaFold3."""

INTERFACE_DISTANCE = 15.0
"""Å between centres of tokens of two chains, below which they are at an interface."""

MOST_CHAINS = 20
"""Maximum number of chains that are cropped; of more, those nearest to a random place."""


@dataclass(frozen=True)
class CropSizes:
    """Limits of a crop.

    Attributes
    ----------
    tokens, atoms : largest numbers
    shares : probabilities of a contiguous, a spatial crop and one at an interface
    """

    tokens: int = 384
    atoms: int = 9216
    shares: tuple[float, float, float] = (0.2, 0.4, 0.4)


def crop_entry(
    entry: Arrays, sizes: CropSizes, rng: np.random.Generator, chains: Sequence[int] = ()
) -> IntArray:
    """Draw a crop of AlphaFold3 (supplement, sections 2.5.4 and 2.7).

    An assembly of more than `MOST_CHAINS` chains is cropped within those nearest to a random token
    at an interface. Without an interface the crop is a spatial one, and without an observed atom a
    contiguous one.

    Parameters
    ----------
    entry
        Features of an entry: ``asym_id``, ``num_atoms``, ``centre_atom``, ``position`` and
        ``resolved`` are read.
    sizes : largest numbers, shares of the kinds
    chains
        ``asym_id`` of the chain or the two chains that were drawn: the centre of a spatial crop is
        one of theirs. None for any.

    Returns
    -------
    int64 [n]
        Tokens, ascending.
    """
    asym_id, num_atoms = np.asarray(entry["asym_id"]), np.asarray(entry["num_atoms"])
    if len(asym_id) <= sizes.tokens and int(num_atoms.sum()) <= sizes.atoms:
        return np.arange(len(asym_id))
    kind = int(rng.choice(3, p=np.asarray(sizes.shares) / sum(sizes.shares)))
    tokens = np.arange(len(asym_id))
    centre_atom = np.asarray(entry["centre_atom"])
    order: IntArray | None = None
    if kind != CONTIGUOUS or asym_id[-1] > MOST_CHAINS:
        centres = np.asarray(entry["position"])[centre_atom].astype(np.float32)
        resolved = np.asarray(entry["resolved"])[centre_atom].astype(np.bool_)
        if asym_id[-1] > MOST_CHAINS:
            tokens = near_chains(asym_id, centres, resolved, rng, chains)
        some = asym_id[tokens], centres[tokens], resolved[tokens]
        if kind != CONTIGUOUS:
            order = spatial_order(*some, rng, chains, kind == INTERFACE)
    if order is None:
        order = contiguous_order(asym_id[tokens], sizes.tokens, rng)
    return _fit(tokens[order], num_atoms, sizes)


def near_chains(
    asym_id: Array,
    centres: Array,
    resolved: BoolArray,
    rng: np.random.Generator,
    chains: Sequence[int] = (),
) -> IntArray:
    """Draw the chains of a large assembly: those nearest to a random token at an interface.

    Parameters are those of `spatial_order`; all chains are taken where no centre was observed.

    Returns
    -------
    int64 [n]
        Tokens, ascending.
    """
    distance = _distances(asym_id, centres, resolved, rng, chains, at_interface=True)
    if distance is None:
        return np.arange(len(asym_id))
    starts = np.flatnonzero(np.diff(asym_id, prepend=asym_id[0] - 1))
    nearest = np.argsort(np.minimum.reduceat(distance, starts), kind="stable")[:MOST_CHAINS]
    return np.flatnonzero(np.isin(asym_id, asym_id[starts[nearest]]))


def _fit(order: IntArray, num_atoms: Array, sizes: CropSizes) -> IntArray:
    """Take tokens in this order while they fit, at least one."""
    order = order[: sizes.tokens]
    number = int(np.searchsorted(np.cumsum(num_atoms[order]), sizes.atoms, side="right"))
    return np.sort(order[: max(number, 1)])


def contiguous_order(asym_id: Array, max_tokens: int, rng: np.random.Generator) -> IntArray:
    """Draw one piece of each chain, chains in random order.

    Algorithm 1 of AlphaFold-Multimer: the length of a chain's piece is uniform between what later
    chains cannot fill and what is left.

    Parameters
    ----------
    asym_id : [N]
        Chain of each token; the tokens of a chain follow each other.
    max_tokens : largest number of tokens in all pieces

    Returns
    -------
    int64 [n]
        Tokens, chain after chain as drawn.
    """
    starts = np.flatnonzero(np.diff(asym_id, prepend=asym_id[0] - 1))
    lengths = np.diff(starts, append=len(asym_id))
    pieces = []
    taken, later = 0, len(asym_id)
    for chain in rng.permutation(len(starts)).tolist():
        length = int(lengths[chain])
        later -= length
        most = min(max_tokens - taken, length)
        least = min(length, max(0, max_tokens - taken - later))
        size = int(rng.integers(least, most + 1))
        begin = int(starts[chain] + rng.integers(0, length - size + 1))
        pieces.append(np.arange(begin, begin + size))
        taken += size
    return np.concatenate(pieces)


def spatial_order(
    asym_id: Array,
    centres: Array,
    resolved: BoolArray,
    rng: np.random.Generator,
    chains: Sequence[int] = (),
    at_interface: bool = False,
) -> IntArray | None:
    """Order tokens by distance to a random one (algorithm 2 of AlphaFold-Multimer).

    Parameters
    ----------
    asym_id : [N]
        Chain of each token.
    centres : [N, 3]
        Å, where resolved.
    resolved : [N]
        Whether the centre was observed; other tokens come last.
    chains : chains of interest, which the random token must belong to; None for any
    at_interface
        Whether it must be closer than `INTERFACE_DISTANCE` to one of another chain (of
        ``chains``, if these are two); where none is, it need not.

    Returns
    -------
    int64 [N]
        All tokens, nearest first; None if no centre was observed.
    """
    distance = _distances(asym_id, centres, resolved, rng, chains, at_interface)
    return None if distance is None else np.argsort(distance, kind="stable")


def _distances(
    asym_id: Array,
    centres: Array,
    resolved: BoolArray,
    rng: np.random.Generator,
    chains: Sequence[int],
    at_interface: bool,
) -> Array | None:
    """Return the squared distances of all tokens to a random one; parameters: `spatial_order`."""
    candidates = resolved & (np.isin(asym_id, chains) if len(chains) else True)
    if not candidates.any():
        candidates = resolved
    if not candidates.any():
        return None
    if at_interface:
        others = candidates if len(chains) > 1 else resolved
        near = interface_tokens(asym_id, centres, candidates, others)
        candidates = near if near.any() else candidates
    middle = centres[rng.choice(np.flatnonzero(candidates))]
    distance = np.square(centres - middle).sum(axis=1)
    return np.where(resolved, distance, np.inf)


def interface_tokens(
    asym_id: Array,
    centres: Array,
    candidates: BoolArray,
    others: BoolArray,
    distance: float = INTERFACE_DISTANCE,
) -> BoolArray:
    """Find the candidates whose centre is near one of another chain.

    Parameters
    ----------
    asym_id : [N]
    centres : [N, 3]
        Å.
    candidates, others : [N]
        Tokens between which distances are taken.
    distance : Å

    Returns
    -------
    bool [N]
    """
    found = np.zeros(len(asym_id), dtype=np.bool_)
    for chain in np.unique(asym_id[candidates]).tolist():
        inside = np.flatnonzero(candidates & (asym_id == chain))
        found[inside] = near_atoms(centres[inside], centres[others & (asym_id != chain)], distance)
    return found


def near_atoms(points: Array, others: Array, distance: float) -> BoolArray:
    """Find the points within a distance of any of the others, bool [points]."""
    found = np.zeros(len(points), dtype=np.bool_)
    if not len(points) or not len(others):
        return found
    # Only points in the box around the other set can be near it.
    low, high = points.min(axis=0) - distance, points.max(axis=0) + distance
    others = others[((others >= low) & (others <= high)).all(axis=1)]
    if len(others):
        low, high = others.min(axis=0) - distance, others.max(axis=0) + distance
        inside = np.flatnonzero(((points >= low) & (points <= high)).all(axis=1))
        found[inside] = _nearest(points[inside], others) < distance
    return found


def _nearest(points: Array, others: Array) -> FloatArray:
    nearest = np.empty(len(points))
    theirs = others.astype(np.float32)
    for start in range(0, len(points), 256):
        ours = points[start : start + 256].astype(np.float32)
        squares = np.square(ours[:, None, 0] - theirs[:, 0])
        for axis in (1, 2):
            squares += np.square(ours[:, None, axis] - theirs[:, axis])
        nearest[start : start + 256] = np.sqrt(squares.min(axis=1))
    return nearest


def crop_chain(
    length: int, size: int, rng: np.random.Generator, *, clamped: bool = True
) -> tuple[int, int]:
    """Draw the crop of a chain of AlphaFold2 (supplement, section 1.2.8).

    Parameters
    ----------
    length : residues of the chain
    size : residues of the crop
    clamped
        Whether the sample's FAPE is clamped: the start is then uniform in 0 .. length - size, else
        uniform in 0 .. length - size - x with x uniform in 0 .. length - size.

    Returns
    -------
    start, stop
        All residues if there are no more than ``size``.
    """
    spare = max(length - size, 0)
    last = spare if clamped else spare - int(rng.integers(0, spare + 1))
    start = int(rng.integers(0, last + 1))
    return start, min(start + size, length)
