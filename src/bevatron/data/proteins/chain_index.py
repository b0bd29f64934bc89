"""Index of a store for planning: each entry's chains, their kinds and clusters, its interfaces.

A plan weighs all chains and interfaces of a store; these are columns of their own, so that it reads
a few bytes of each entry and not its atoms.
"""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from bevatron.data.dataset import column
from bevatron.data.proteins.featurize import describe
from bevatron.data.proteins.tokens import LIGAND, TYPES
from bevatron.data.proteins.weights import complex_weights, find_interfaces
from bevatron.data.samples import Field
from bevatron.data.store.store import Store
from bevatron.typing import Array, Arrays, BoolArray, FloatArray, IntArray

INDEX_FIELDS = (
    Field("released", "int32", (), False, "days since 1970-01-01; -1 if unknown"),
    Field("chain_type", "int8", (), True, "[C] 0 protein, 1 RNA, 2 DNA, 3 ligand"),
    Field("chain_length", "int32", (), True, "[C] residues of the sequence, tokens of a ligand"),
    Field("chain_key", "uint64", (), True, "[C] equal for chains of equal sequence, see chain_key"),
    Field("interfaces", "int32", (2,), True, "[I] asym_id of two chains within 5 Å"),
)
"""Fields of a stored entry besides `ENTRY_FIELDS`."""

UNKNOWN_DAY = -1

SHORTEST_CLUSTERED = 10
"""Residues; shorter peptides are clusters of equal sequences (AlphaFold3, section 2.5.3)."""


def day_number(date: dt.date | None) -> int:
    """Return the days from 1970-01-01 to a date, `UNKNOWN_DAY` for none.

    An earlier date stands for an unknown one: the archive is younger.
    """
    return UNKNOWN_DAY if date is None else max((date - dt.date(1970, 1, 1)).days, UNKNOWN_DAY)


def released_day(words: Mapping[str, Any]) -> int:
    """Return `day_number` of the release date in a description of `featurize.describe`."""
    released = words["released"]
    return day_number(dt.date.fromisoformat(released) if released else None)


def chain_key(kind: str, content: str) -> int:
    """Hash the kind and the sequence of a polymer, or the components of a ligand."""
    return xxh3_64_intdigest(f"{kind} {content}".encode())


def index_of(entry: Arrays) -> dict[str, Array]:
    """Return the `INDEX_FIELDS` of an entry made by `featurize`."""
    words = describe(entry)
    asym_id = np.asarray(entry["asym_id"])
    lengths = np.bincount(asym_id, minlength=len(words["chains"]) + 1)[1:]
    components = np.asarray(entry["component"])
    first_atom = np.cumsum(entry["num_atoms"]) - np.asarray(entry["num_atoms"])
    residue = np.asarray(entry["ref_space_uid"])[first_atom]
    types, keys = [], []
    for number, chain in enumerate(words["chains"], start=1):
        kind = TYPES.get(chain["kind"], LIGAND)
        types.append(kind)
        if kind != LIGAND:
            lengths[number - 1] = len(chain["sequence"])
            keys.append(chain_key(chain["kind"], chain["sequence"]))
        else:
            parts = components[np.unique(residue[asym_id == number])]
            keys.append(chain_key("ligand", " ".join(map(str, parts.tolist()))))
    return {
        "released": np.array(released_day(words), dtype=np.int32),
        "chain_type": np.array(types, dtype=np.int8),
        "chain_length": lengths.astype(np.int32),
        "chain_key": np.array(keys, dtype=np.uint64),
        "interfaces": find_interfaces(entry).astype(np.int32),
    }


@dataclass(frozen=True)
class Choices:
    """All chains and interfaces of a store, from which samples are drawn by weight.

    Attributes
    ----------
    entry : int64 [n]
        The entry of each.
    chains : int32 [n, 2]
        ``asym_id``; the second is 0 for a chain.
    weight : float64 [n]
        See `complex_weights`.
    """

    entry: IntArray
    chains: npt.NDArray[np.int32]
    weight: FloatArray

    @classmethod
    def of(
        cls,
        store: Store,
        clusters: Mapping[int, int] | None = None,
        allowed: BoolArray | None = None,
    ) -> "Choices":
        """Collect and weigh the chains and interfaces of a store.

        Parameters
        ----------
        store : store of entries with `INDEX_FIELDS`
        clusters
            Cluster of each chain key; a key that is not in it is a cluster of its own, as are all
            without it.
        allowed
            Which entries to draw from, [entries]; None for all. Sizes of clusters are theirs.
        """
        kind, key = (column(store, name) for name in ("chain_type", "chain_key"))
        of_entry = np.repeat(np.arange(len(store)), store.lengths("chain_type"))
        first_chain = np.cumsum(store.lengths("chain_type")) - store.lengths("chain_type")
        pairs = column(store, "interfaces").astype(np.int64)
        of_pair = np.repeat(np.arange(len(store)), store.lengths("interfaces"))
        asym_id = (np.arange(len(of_entry)) - first_chain[of_entry] + 1).astype(np.int32)
        interfaces = first_chain[of_pair][:, None] + pairs - 1
        if allowed is not None:
            kept = allowed[of_entry]
            new = np.cumsum(kept) - 1
            interfaces, pairs = new[interfaces[allowed[of_pair]]], pairs[allowed[of_pair]]
            of_pair = of_pair[allowed[of_pair]]
            kind, key, asym_id, of_entry = kind[kept], key[kept], asym_id[kept], of_entry[kept]
        weights = complex_weights(kind, clusters_of_keys(key, clusters), interfaces)
        alone = np.stack([asym_id, np.zeros_like(asym_id)], axis=1)
        return cls(
            np.concatenate([of_entry, of_pair]),
            np.concatenate([alone, pairs.astype(np.int32)]),
            np.concatenate([weights.chains, weights.interfaces]),
        )


def clusters_of_keys(key: Array, clusters: Mapping[int, int] | None) -> IntArray:
    """Return the number of each key's cluster."""
    keys, number = np.unique(key, return_inverse=True)
    if clusters is None:
        return number.astype(np.int64)
    own = max(clusters.values(), default=-1) + 1
    of_key = [clusters.get(value, own + i) for i, value in enumerate(keys.tolist())]
    return np.array(of_key, dtype=np.int64)[number]


def protein_sequences(store: Store, shortest: int = SHORTEST_CLUSTERED) -> dict[int, str]:
    """Return the distinct proteins of a store by chain key, for `cluster_proteins`."""
    found: dict[int, str] = {}
    for entry in store:
        keys = np.asarray(entry["chain_key"]).tolist()
        for key, chain in zip(keys, describe(entry)["chains"] if keys else [], strict=True):
            if chain["kind"] == "protein" and len(chain["sequence"]) >= shortest:
                found[key] = chain["sequence"]
    return found
