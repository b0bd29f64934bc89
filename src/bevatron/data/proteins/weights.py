"""Sampling weights of chains and interfaces, as in AlphaFold3 and AlphaFold2."""

from dataclasses import dataclass

import numpy as np

from bevatron.data.proteins.crop import interface_tokens
from bevatron.typing import Array, Arrays, FloatArray, IntArray

_OF_KIND = np.array([3.0, 3.0, 3.0, 1.0])  # protein, RNA, DNA, ligand
_CHAIN, _INTERFACE = 0.5, 1.0

INTERFACE_ATOMS = 5.0
"""Å between two heavy atoms, below which their chains have an interface."""


@dataclass(frozen=True)
class Weights:
    """Weights of all chains and interfaces of a data set, not normalised.

    Attributes
    ----------
    chains : float64 [C]
    interfaces : float64 [I]
    """

    chains: FloatArray
    interfaces: FloatArray


def complex_weights(kind: Array, cluster: Array, interfaces: Array) -> Weights:
    """Weigh the chains and interfaces of a data set as AlphaFold3 does (supplement, section 2.5.1).

    w = beta / cluster size * (3 n_protein + 3 n_nucleic + n_ligand); beta is 0.5 for a chain and 1
    for an interface. An interface's cluster is the unordered pair of the clusters of its chains.

    Parameters
    ----------
    kind : [C]
        Kind of each chain of the data set: 0 protein, 1 RNA, 2 DNA, 3 ligand.
    cluster : [C]
        Number of its cluster.
    interfaces : [I, 2]
        Chains.
    """
    numbers = np.unique(cluster, return_inverse=True)[1].reshape(-1)
    pairs = np.sort(numbers[interfaces].reshape(-1, 2), axis=1)
    pair = pairs[:, 0] * (int(numbers.max(initial=0)) + 1) + pairs[:, 1]
    amount = _OF_KIND[kind]
    return Weights(
        _CHAIN / _cluster_sizes(numbers) * amount,
        _INTERFACE / _cluster_sizes(pair) * amount[interfaces].reshape(-1, 2).sum(axis=1),
    )


def chain_weights(length: IntArray, cluster: Array) -> FloatArray:
    """Weigh chains as AlphaFold2 does, [C]: clamp(L, 256, 512) / 512 / sqrt(cluster size).

    (Supplement of AlphaFold2, section 1.2.5, and OpenFold for the square root.)

    Parameters
    ----------
    length : [C]
        Residues of each chain.
    cluster : [C]
        Number of its cluster.
    """
    of_length: FloatArray = np.clip(length, 256, 512) / 512.0
    return of_length / np.sqrt(_cluster_sizes(cluster))


def _cluster_sizes(cluster: Array) -> FloatArray:
    _, number, counts = np.unique(cluster, return_inverse=True, return_counts=True)
    return counts[number.reshape(-1)].astype(np.float64)


def find_interfaces(entry: Arrays) -> IntArray:
    """Find the pairs of chains of an entry with heavy atoms closer than 5 Å.

    Returns
    -------
    int64 [I, 2]
        ``asym_id``, the smaller first.
    """
    chain = np.repeat(np.asarray(entry["asym_id"]), np.asarray(entry["num_atoms"]))
    resolved = np.asarray(entry["resolved"]).astype(np.bool_)
    chain, position = chain[resolved], np.asarray(entry["position"])[resolved]
    numbers = np.unique(chain)
    members = [np.flatnonzero(chain == number) for number in numbers]
    lows = np.array([position[atoms].min(axis=0) for atoms in members])
    highs = np.array([position[atoms].max(axis=0) for atoms in members])
    pairs = []
    for first, number in enumerate(numbers):
        apart = np.maximum(lows - highs[first], lows[first] - highs).max(axis=1)
        for second in np.flatnonzero(apart < INTERFACE_ATOMS).tolist():
            if second <= first:
                continue
            atoms = np.concatenate([members[first], members[second]])
            ours = chain[atoms] == number
            near = interface_tokens(chain[atoms], position[atoms], ours, ~ours, INTERFACE_ATOMS)
            if near.any():
                pairs.append((int(number), int(numbers[second])))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
