"""A store of entries of AlphaFold3: made from files of structures, with what a plan needs of each.

A plan weighs all chains and interfaces of the store; their kinds, lengths and keys are columns of
their own, so that it reads a few bytes of each entry.
"""

import datetime as dt
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from bevatron.data.proteins.complexes import ENTRY_FIELDS, describe, featurize
from bevatron.data.proteins.tokens import LIGAND, TYPES
from bevatron.data.proteins.weights import complex_weights, find_interfaces
from bevatron.data.readers.base import FileState, state_and_hash
from bevatron.data.readers.proteins.components import Components
from bevatron.data.readers.proteins.structures import read_structure
from bevatron.data.samples import Field
from bevatron.data.store.prepare import prepare
from bevatron.data.store.store import Store
from bevatron.errors import DataError
from bevatron.typing import Array, Arrays, FloatArray, IntArray

STORED_ENTRY_FIELDS = (
    *ENTRY_FIELDS,
    Field("source", "int64", (2,), False, "(file, 0)"),
    Field("released", "int32", (), False, "days since 1970-01-01; -1 if unknown"),
    Field("chain_kind", "int8", (), True, "[C] 0 protein, 1 RNA, 2 DNA, 3 ligand"),
    Field("chain_length", "int32", (), True, "[C] residues of the sequence, tokens of a ligand"),
    Field("chain_key", "uint64", (), True, "[C] equal for chains of equal sequence, see chain_key"),
    Field("interfaces", "int32", (2,), True, "[I] asym_id of two chains within 5 Å"),
    Field("reason", "uint8", (), True, "why the file was left out, then all else is empty"),
)
"""Fields of an entry in a store."""

UNKNOWN_DAY = -1


def chain_key(kind: str, content: str) -> int:
    """Hash the kind and the sequence of a polymer, or the components of a ligand."""
    return xxh3_64_intdigest(f"{kind} {content}".encode())


def with_index(entry: Arrays, source: int = 0) -> dict[str, Array]:
    """Return an entry with the other `STORED_ENTRY_FIELDS`.

    Parameters
    ----------
    entry
        What `featurize` made.
    source
        Number of its file.
    """
    words = describe(entry)
    asym_id = np.asarray(entry["asym_id"])
    lengths = np.bincount(asym_id, minlength=len(words["chains"]) + 1)[1:]
    components = np.asarray(entry["component"])
    first_atom = np.cumsum(entry["num_atoms"]) - np.asarray(entry["num_atoms"])
    residue = np.asarray(entry["ref_space_uid"])[first_atom]
    kinds, keys = [], []
    for number, chain in enumerate(words["chains"], start=1):
        kind = TYPES.get(chain["kind"], LIGAND)
        kinds.append(kind)
        if kind != LIGAND:
            lengths[number - 1] = len(chain["sequence"])
            keys.append(chain_key(chain["kind"], chain["sequence"]))
        else:
            parts = components[np.unique(residue[asym_id == number])]
            keys.append(chain_key("ligand", " ".join(map(str, parts.tolist()))))
    released = words["released"]
    day = (dt.date.fromisoformat(released) - dt.date(1970, 1, 1)).days if released else UNKNOWN_DAY
    return {
        **entry,
        "source": np.array([source, 0], dtype=np.int64),
        "released": np.array(day, dtype=np.int32),
        "chain_kind": np.array(kinds, dtype=np.int8),
        "chain_length": lengths.astype(np.int32),
        "chain_key": np.array(keys, dtype=np.uint64),
        "interfaces": find_interfaces(entry).astype(np.int32),
        "reason": np.empty(0, dtype=np.uint8),
    }


def left_out(reason: str, source: int) -> dict[str, Array]:
    """Return what is stored in place of an entry that cannot be used."""
    empty: dict[str, Array] = {
        spec.name: np.zeros((0, *spec.shape) if spec.ragged else spec.shape, dtype=spec.dtype)
        for spec in STORED_ENTRY_FIELDS
    }
    return {
        **empty,
        "permutation_ptr": np.zeros(1, dtype=np.int64),
        "source": np.array([source, 0], dtype=np.int64),
        "released": np.array(UNKNOWN_DAY, dtype=np.int32),
        "reason": np.frombuffer(reason.encode(), dtype=np.uint8),
    }


class EntryReader:
    """Entries from files of structures, one assembly of each.

    Parameters
    ----------
    files
        As `read_structure` takes them.
    components
        The dictionary.
    max_tokens
        An entry of more tokens is an error; None for any number.
    strict
        A file that cannot be used is an error; else it is left out, and its entry says why.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        components: Components,
        *,
        max_tokens: int | None = None,
        strict: bool = True,
    ) -> None:
        self.sources = [str(path) for path in files]
        self.num_samples = len(self.sources)
        self._components, self._max_tokens, self._strict = components, max_tokens, strict
        self._states: list[FileState] = []
        whole = xxh3_64(f"{components.key} {max_tokens} {strict}\n".encode())
        for path in files:
            state, content = state_and_hash(Path(path))
            self._states.append(state)
            whole.update(f"{content}\n".encode())
        self.fingerprint = whole.hexdigest()

    def read(self, start: int, stop: int) -> Iterator[Arrays]:
        """Yield entries with `STORED_ENTRY_FIELDS`."""
        for number in range(start, stop):
            self._states[number].refuse_change()
            try:
                structure = read_structure(self.sources[number]).assembly("1")
                entry = featurize(structure, self._components, max_tokens=self._max_tokens)
            except DataError as error:
                if self._strict:
                    raise
                yield left_out(str(error), number)
            else:
                yield with_index(entry, number)

    def describe(self, index: int) -> str:
        """Return the file."""
        return self.sources[index]


def prepare_entries(reader: EntryReader, out: str | Path, *, workers: int | None = None) -> Store:
    """Write entries as a store, or continue an earlier call; see `prepare`."""
    return prepare(reader, None, out, STORED_ENTRY_FIELDS, {"unit": "assembly"}, workers=workers)


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
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> "Choices":
        """Collect and weigh the chains and interfaces of a store.

        Parameters
        ----------
        store
            Written by `prepare_entries`.
        clusters
            Cluster of each chain key; a key that is not in it is a cluster of its own, as are all
            without it.
        allowed
            Which entries to draw from, [entries]; None for all. Sizes of clusters are theirs.
        """
        kind, key = (_column(store, name) for name in ("chain_kind", "chain_key"))
        of_entry = np.repeat(np.arange(len(store)), store.lengths("chain_kind"))
        first_chain = np.cumsum(store.lengths("chain_kind")) - store.lengths("chain_kind")
        pairs = _column(store, "interfaces").astype(np.int64)
        of_pair = np.repeat(np.arange(len(store)), store.lengths("interfaces"))
        asym_id = (np.arange(len(of_entry)) - first_chain[of_entry] + 1).astype(np.int32)
        interfaces = first_chain[of_pair][:, None] + pairs - 1
        if allowed is not None:
            kept = allowed[of_entry]
            new = np.cumsum(kept) - 1
            interfaces, pairs = new[interfaces[allowed[of_pair]]], pairs[allowed[of_pair]]
            of_pair = of_pair[allowed[of_pair]]
            kind, key, asym_id, of_entry = kind[kept], key[kept], asym_id[kept], of_entry[kept]
        weights = complex_weights(kind, _clusters(key, clusters), interfaces)
        alone = np.stack([asym_id, np.zeros_like(asym_id)], axis=1)
        return cls(
            np.concatenate([of_entry, of_pair]),
            np.concatenate([alone, pairs.astype(np.int32)]),
            np.concatenate([weights.chains, weights.interfaces]),
        )

    def draw(self, seed: int, first: int, count: int) -> tuple[IntArray, npt.NDArray[np.int32]]:
        """Draw samples ``first`` to ``first + count - 1`` of an endless sequence.

        A sample depends on the seed and its number alone, so a run can go on anywhere.

        Returns
        -------
        entry, chains
            int64 [count] and int32 [count, 2], as in `Choices`.

        Raises
        ------
        DataError
            If there is nothing to draw.
        """
        if not len(self.entry):
            raise DataError("there is no chain to draw; check which entries are left out and why")
        # A Philox block is four words; each sample takes the first word of a block of its own.
        words = np.random.Philox(np.random.SeedSequence(seed)).advance(first).random_raw(4 * count)
        uniform = (words[::4] >> np.uint64(11)) * 2.0**-53
        total = np.cumsum(self.weight)
        place = np.searchsorted(total, uniform * total[-1], side="right")
        place = np.minimum(place, len(total) - 1)
        return self.entry[place], self.chains[place]


def _column(store: Store, name: str) -> Array:
    return np.concatenate([flat for flat, _ in store.flat(name)])


def _clusters(key: Array, clusters: Mapping[int, int] | None) -> IntArray:
    """Return the number of each key's cluster."""
    keys, number = np.unique(key, return_inverse=True)
    if clusters is None:
        return number.astype(np.int64)
    own = max(clusters.values(), default=-1) + 1
    of_key = [clusters.get(value, own + i) for i, value in enumerate(keys.tolist())]
    return np.array(of_key, dtype=np.int64)[number]


def protein_sequences(store: Store, shortest: int = 10) -> dict[int, str]:
    """Return the distinct proteins of a store by chain key, those of AlphaFold3's clusters.

    Shorter peptides are clusters of equal sequences (supplement of AlphaFold3, section 2.5.3).
    """
    found: dict[int, str] = {}
    for entry in store:
        if not len(entry["chain_kind"]):
            continue
        keys = np.asarray(entry["chain_key"]).tolist()
        for key, chain in zip(keys, describe(entry)["chains"], strict=True):
            if chain["kind"] == "protein" and len(chain["sequence"]) >= shortest:
                found[key] = re.sub(r"\s", "", chain["sequence"])
    return found
