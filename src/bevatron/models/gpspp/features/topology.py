r"""Features of the bond graph alone, for many molecules of one size at a time.

All start from adjacency matrices A [B, n, n] and degrees D:

* shortest paths: bonds between two atoms, by Floyd and Warshall's relaxation over all molecules at
  once; large molecules one by one by a search;
* random walks: $\mathrm{diag}(P^k)$, $k = 1..16$, $P = D^{-1} A$. P is similar to the symmetric
  $S = D^{-1/2} A D^{-1/2}$, so $\mathrm{diag}(P^{a+b})$ is the row sum of $S^a \circ S^b$: eight
  powers give sixteen diagonals;
* Laplacian: the seven lowest eigenpairs of $L = D - A$ after the first, vectors of length 1.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.data.samples.molecules import MAX_DISTANCE, NUM_LAPLACIAN, NUM_WALKS, UNREACHABLE
from bevatron.typing import Array, BoolArray, FloatArray, IntArray

_DENSE_LIMIT = 64
"""Atoms up to which n^3 additions are faster than a search per molecule."""

_FAR = 16000

_DEGENERATE = 1e-8
"""Closer eigenvalues count as degenerate; those of the longest chains are 1e-5 apart."""

_LARGE, _HALF = 0.61, 0.5
"""Fraction of the largest entry above which an entry is large. Entries of symmetric molecules are
in simple ratios, so a simple fraction would let rounding decide. Version 1 of the features uses
1/2."""


def shortest_paths(adjacency: Array) -> npt.NDArray[np.uint8]:
    """Count the bonds between all pairs of atoms.

    Parameters
    ----------
    adjacency : [B, n, n] bool

    Returns
    -------
    uint8 [B, n, n]; `UNREACHABLE` without a path, longer ones are `MAX_DISTANCE`.

    Examples
    --------
    >>> chain = np.array([[[0, 1, 0], [1, 0, 1], [0, 1, 0]]], dtype=bool)
    >>> shortest_paths(chain)[0, 0].tolist()
    [0, 1, 2]
    """
    num = adjacency.shape[1]
    if num > _DENSE_LIMIT:
        found: npt.NDArray[Any] = np.stack([_searched(matrix) for matrix in adjacency])
    else:
        found = np.where(adjacency, 1, _FAR).astype(np.int16)
        found[:, np.arange(num), np.arange(num)] = 0
        for middle in range(num):
            via = found[:, :, middle, None] + found[:, None, middle, :]
            np.minimum(found, via, out=found)
    unreachable = found >= _FAR
    return np.where(unreachable, UNREACHABLE, np.minimum(found, MAX_DISTANCE)).astype(np.uint8)


def _searched(adjacency: Array) -> IntArray:
    """Search from all atoms of one molecule at once, one bond further per round."""
    num = len(adjacency)
    links = adjacency.astype(bool)
    degree = links.sum(axis=1)
    # Neighbours of each atom, padded with the atom itself, which changes nothing.
    neighbours = np.repeat(np.arange(num)[:, None], max(int(degree.max(initial=0)), 1), axis=1)
    atom, other = np.nonzero(links)
    start = np.cumsum(degree) - degree
    neighbours[atom, np.arange(len(atom)) - start[atom]] = other
    distances = np.full((num, num), _FAR, dtype=np.int64)
    frontier = np.eye(num, dtype=bool)
    length = 0
    while frontier.any():
        distances[frontier] = length
        length += 1
        frontier = frontier[:, neighbours].any(axis=2) & (distances == _FAR)
    return distances


def random_walks(adjacency: Array) -> FloatArray:
    """Return probabilities of random walks of 1 to 16 steps.

    Parameters
    ----------
    adjacency : [B, n, n] bool

    Returns
    -------
    float64 [B, n, 16]; zero for an atom without bonds.
    """
    links = adjacency.astype(np.float64)
    degree = links.sum(axis=2)
    inverse = np.where(degree > 0, 1.0 / np.sqrt(np.maximum(degree, 1.0)), 0.0)
    symmetric = links * inverse[:, :, None] * inverse[:, None, :]
    powers = [np.broadcast_to(np.eye(adjacency.shape[1]), symmetric.shape), symmetric]
    for _ in range(NUM_WALKS // 2 - 1):
        powers.append(powers[-1] @ symmetric)
    back = [
        np.einsum("bij,bij->bi", powers[k // 2], powers[k - k // 2])
        for k in range(1, NUM_WALKS + 1)
    ]
    return np.stack(back, axis=2)


def laplacian(adjacency: Array, order: IntArray | None = None) -> tuple[FloatArray, FloatArray]:
    """Lowest eigenpairs of D - A, without the first.

    Vectors have length 1. The given order of the atoms settles the remaining freedom: the first
    large entry of a vector is positive, and the basis of a degenerate eigenvalue consists of the
    projections of the first atoms that are large in it. Molecules of fewer than eight atoms or
    without bonds are padded with zeros.

    Parameters
    ----------
    adjacency : [B, n, n] bool
    order : [B, n]
        See `canonical_order`; it makes the result independent of how atoms are numbered. None = the
        given order and LAPACK's basis of degenerate eigenvalues, as in version 1 of the features.

    Returns
    -------
    values : [B, 7]
    vectors : [B, n, 7]
    """
    size, num = adjacency.shape[:2]
    links = adjacency.astype(np.float64)
    if order is not None:
        links = np.take_along_axis(links, order[:, :, None], axis=1)
        links = np.take_along_axis(links, order[:, None, :], axis=2)
    matrix = -links
    matrix[:, np.arange(num), np.arange(num)] = links.sum(axis=2)
    found, vectors = np.linalg.eigh(matrix)
    kept = min(num - 1, NUM_LAPLACIAN)
    if order is None:
        chosen = _signed(vectors[:, :, 1 : kept + 1], _HALF)
    else:
        chosen = _signed(_with_fixed_bases(found, vectors, kept), _LARGE)
        chosen = np.take_along_axis(chosen, np.argsort(order, axis=1)[:, :, None], axis=1)
    values = np.zeros((size, NUM_LAPLACIAN))
    result = np.zeros((size, num, NUM_LAPLACIAN))
    values[:, :kept] = np.maximum(found[:, 1 : kept + 1], 0.0)
    result[:, :, :kept] = chosen
    bonded: BoolArray = np.asarray(links.any(axis=(1, 2)))
    return values * bonded[:, None], result * bonded[:, None, None]


def _with_fixed_bases(values: FloatArray, vectors: FloatArray, kept: int) -> FloatArray:
    """Replace the vectors of degenerate eigenvalues, and drop the very first."""
    result = np.array(vectors[:, :, 1 : kept + 1])
    same = np.diff(values, axis=1) < _DEGENERATE
    for molecule in np.flatnonzero(same[:, :kept].any(axis=1)):
        ends = (np.flatnonzero(~same[molecule]) + 1).tolist()
        for first, stop in pairwise([0, *ends, values.shape[1]]):
            if stop - first > 1 and first <= kept:
                basis = _basis(vectors[molecule, :, first:stop], constant=first == 0)
                begin = max(first, 1)
                wanted = min(stop, kept + 1) - begin
                result[molecule, :, begin - 1 : begin - 1 + wanted] = basis[:, :wanted]
    return result


def _basis(space: FloatArray, *, constant: bool) -> FloatArray:
    """Choose a basis of a space that depends only on the space and the order of the atoms.

    This is the Gram-Schmidt basis of the projections of the atoms, each time of the first one that
    is large in the remainder; ``constant``: of the null space, without the constant vector.
    """
    num, dimension = space.shape
    rest = space @ space.T
    if constant:
        rest = rest - 1.0 / num
        dimension -= 1
    basis = np.zeros((num, dimension))
    for column in range(dimension):
        lengths = np.diag(rest)
        atom = int((lengths > _LARGE**2 * lengths.max()).argmax())
        vector = rest[:, atom] / np.sqrt(lengths[atom])
        basis[:, column] = vector
        rest = rest - np.outer(vector, vector)
    return basis


def _signed(vectors: FloatArray, share: float) -> FloatArray:
    """Make the first entry above a fraction of the largest positive."""
    if not vectors.size:
        return vectors
    size = np.abs(vectors)
    largest: FloatArray = np.max(size, axis=1, keepdims=True)
    large: BoolArray = np.asarray(size > share * largest, dtype=np.bool_)
    first: IntArray = np.asarray(large.argmax(axis=1))
    first = first[:, None, :]
    sign: FloatArray = np.sign(np.take_along_axis(vectors, first, axis=1))
    return vectors * sign


def outermost_shells(distances: npt.NDArray[np.uint8], bonded: Array) -> tuple[IntArray, BoolArray]:
    """Find the largest radius at which RDKit has an environment of each atom.

    RDKit collects bonds shell by shell, the shell of a bond being one more than the distance of its
    nearer atom, and has no environment once no bond remains to visit. A bond of the last shell that
    ends where another, unvisited bond of that shell ends counts as remaining, which gives one more
    radius. If three bonds could be visited in either order, the result is unclear.

    Parameters
    ----------
    distances : [B, n, n] of `shortest_paths`
    bonded : [B, n, n] bool

    Returns
    -------
    largest : int64 [B, n], largest radius with an environment
    unclear : bool [B, n], whether it may be one more
    """
    graph, first, second = np.nonzero(np.triu(bonded))
    ends = np.stack([first, second])
    away = np.stack([distances[graph, :, first], distances[graph, :, second]]).astype(np.int64)
    shell = np.where(away.min(0) == UNREACHABLE, 0, away.min(0) + 1)  # [bonds, n]
    last = np.zeros(distances.shape[:2], dtype=np.int64)
    np.maximum.at(last, graph, shell)
    bond, centre = np.nonzero((shell == last[graph]) & (shell > 0))
    where, level = graph[bond], away[0, bond, centre] == away[1, bond, centre]
    far = np.where(away[0, bond, centre] > away[1, bond, centre], *ends[:, bond])
    met = np.zeros(distances.shape, dtype=np.int64)
    np.add.at(met, (where[~level], centre[~level], far[~level]), 1)
    touched = np.zeros(distances.shape, dtype=np.int64)
    for side in ends[:, bond]:
        np.add.at(touched, (where, centre, side), 1)
    unclear = np.zeros(last.shape, dtype=bool)
    for side in ends[:, bond[level]]:
        crowded = touched[where[level], centre[level], side] > 1
        unclear[where[level][crowded], centre[level][crowded]] = True
    more: BoolArray = np.asarray((met > 1).any(axis=2))
    return last + more, unclear & ~more


def environments(distances: npt.NDArray[np.uint8], largest: IntArray, radius: int) -> IntArray:
    """Count the atoms within ``radius`` bonds; 0 for an atom without such an environment.

    Parameters
    ----------
    distances : [B, n, n] of `shortest_paths`
    largest : [B, n] of `outermost_shells`
    radius : in bonds

    Returns
    -------
    int64 [B, n]
    """
    within: IntArray = (distances <= radius).sum(axis=2, dtype=np.int64)
    return np.where(largest >= radius, within, 0)
