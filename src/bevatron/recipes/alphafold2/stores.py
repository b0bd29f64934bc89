"""Stores of protein chains: residues and atoms of all chains of a file, and their alignments.

A store of chains is a folder that holds a store with an entry for each file, ``clusters.txt`` and,
in ``alignments``, a store of alignments; a chain's alignment is found by its sequence.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.proteins.chain_index import SHORTEST_CLUSTERED, chain_key, day_number
from bevatron.data.proteins.chains import CHAIN_FIELDS, chain_entry
from bevatron.data.proteins.constants import CA
from bevatron.data.proteins.hit_files import NamedChain, entry_code
from bevatron.data.readers.proteins import Structure
from bevatron.data.readers.proteins.alphabet import CLASSES
from bevatron.data.samples import Field
from bevatron.data.store.store import Store
from bevatron.errors import DataError
from bevatron.output import counted
from bevatron.recipes.proteins.dates import Released
from bevatron.recipes.proteins.stores import (
    Featurizer,
    StoreKind,
    find_structures,
    stores_of,
    text_bytes,
)
from bevatron.typing import Array, Arrays

FEATURES_VERSION = 5
"""Version of what is stored of a chain; a store of another version is prepared again."""

RESIDUE_FIELDS = tuple(field for field in CHAIN_FIELDS if field.ragged)

FIELDS = (
    *CHAIN_FIELDS,
    Field("chain_length", "int32", (), True, "[C] residues of each chain of the file, in order"),
    Field("chain_key", "uint64", (), True, "[C] equal for chains of equal sequence"),
    Field("chain_label", "uint8", (), True, "labels of the chains, a line each, UTF-8"),
    Field("most_of_one", "float32", (), True, "[C] share of the most frequent residue type"),
    Field("resolved", "int32", (), True, "[C] residues whose CA is resolved"),
    Field("released", "int32", (), False, "days since 1970-01-01; -1 if unknown"),
    Field("reason", "uint8", (), True, "why the file or chains of it were left out, UTF-8"),
    Field("source", "int64", (2,), False, "(file, 0): index into the manifest"),
)
"""The residues of all chains of a file, chain after chain, and what is known of each chain."""


class ChainFeaturizer(Featurizer):
    """From the path of a structure to its protein chains."""

    fields = FIELDS

    def entry(self, path: str) -> Arrays:
        """Read one file."""
        return chains_of(self.read(path), path)


def chains_of(structure: Structure, path: str | Path) -> Arrays:
    """Return the protein chains of a structure, with all `FIELDS` but ``source``.

    Raises DataError naming ``path`` if no CA of any protein chain is resolved.
    """
    chains, labels, reasons = [], [], []
    for chain in np.flatnonzero(structure.chains.kind == "protein").tolist():
        try:
            chains.append(chain_entry(structure, chain))
            labels.append(str(structure.chains.author[chain]))
        except DataError as error:
            reasons.append(str(error).removeprefix(f"{structure.name}, "))
    if not chains:
        raise DataError(f"{path}: {'; '.join(reasons) or 'holds no protein'}")
    joined = {
        field.name: np.concatenate([chain[field.name] for chain in chains])
        for field in RESIDUE_FIELDS
    }
    return {
        **joined,
        "resolution": chains[0]["resolution"],
        "released": np.array(day_number(structure.released), dtype=np.int32),
        **_columns(chains),
        "chain_label": text_bytes("\n".join(labels)),
        "reason": text_bytes("; ".join(reasons)),
    }


def _columns(chains: Sequence[Arrays]) -> dict[str, Array]:
    types = [np.bincount(chain["aatype"], minlength=1) for chain in chains]
    return {
        "chain_length": np.array([len(chain["aatype"]) for chain in chains], dtype=np.int32),
        "chain_key": np.array(
            [_key(chain["query"].tobytes()) for chain in chains], dtype=np.uint64
        ),
        "most_of_one": np.array([t.max() / t.sum() for t in types], dtype=np.float32),
        "resolved": np.array(
            [chain["all_atom_mask"][:, CA].sum() for chain in chains], dtype=np.int32
        ),
    }


def named_chains(store: Store) -> list[NamedChain]:
    """List the chains of a store by the names of their files."""
    found: list[NamedChain] = []
    sources = iter(store.manifest["sources"])
    names = "query", "chain_length", "chain_label", "released"
    for queries, lengths, labels, released in zip(*map(store.flat, names), strict=True):
        parts = iter(np.split(queries[0], np.cumsum(lengths[0])[:-1]))
        for row, day in enumerate(released[0].tolist()):
            code = entry_code(next(sources))
            of_row = labels[0][labels[1][row] : labels[1][row + 1]].tobytes().decode()
            for label in of_row.split("\n") if of_row else ():
                classes = np.asarray(next(parts), dtype=np.int8).tobytes()
                found.append(NamedChain(code, (label,), classes, day))
    return found


def labels_of(entry: Arrays) -> list[str]:
    """Return the names of the chains of an entry."""
    text = np.asarray(entry["chain_label"]).tobytes().decode()
    return text.split("\n") if len(entry["chain_length"]) else []


def clustered_sequences(store: Store) -> dict[int, str]:
    """Return the distinct sequences of a store by chain key; peptides are left out."""
    classes = dict.fromkeys(chain.classes for chain in named_chains(store))
    return {_key(each): _letters(each) for each in classes if len(each) >= SHORTEST_CLUSTERED}


def named_keys(store: Store) -> dict[str, int]:
    """Return the chain keys by ``code_chain``."""
    return {f"{each.entry}_{each.names[0]}": _key(each.classes) for each in named_chains(store)}


def _key(classes: bytes) -> int:
    return chain_key("protein", _letters(classes))


def _letters(classes: bytes) -> str:
    return "".join(CLASSES[number] for number in classes)


def summarise(samples: Sequence[Arrays]) -> dict[str, object]:
    """Count what the entries of a shard hold."""
    return {
        "files": len(samples),
        "usable": sum(len(sample["chain_length"]) > 0 for sample in samples),
        "chains": sum(len(sample["chain_length"]) for sample in samples),
        "residues": sum(len(sample["aatype"]) for sample in samples),
        "resolved": sum(int(sample["resolved"].sum()) for sample in samples),
    }


def _told(summary: Mapping[str, Any]) -> list[str]:
    chains, residues = (counted(summary[f"{each}s"], each) for each in ("chain", "residue"))
    return [f"{chains} of {residues}, {summary['resolved']:,} resolved"]


CHAINS = StoreKind(
    name="chains",
    system="alphafold2",
    version=FEATURES_VERSION,
    summarise=summarise,
    chains=lambda store: (named_chains(store), ()),
    sequences=clustered_sequences,
    keys=named_keys,
    told=_told,
)

open_chains = CHAINS.open


def prepare_chains(
    files: Sequence[str | Path],
    out: Path,
    *,
    strict: bool = False,
    lowest_plddt: float | None = None,
    released_before: str | None = None,
    released_from: str | None = None,
    **options: Any,
) -> list[str]:
    """Turn folders of structures and alignments into a store; options as of `StoreKind.prepare`.

    Parameters
    ----------
    strict, lowest_plddt : see `Featurizer`
    released_before, released_from : see `bevatron.recipes.proteins.dates.Released`
    """
    released = Released(released_before, released_from)
    featurize = ChainFeaturizer(strict=strict, lowest_plddt=lowest_plddt, released=released)
    found = find_structures(files)
    return CHAINS.prepare(found, out, featurize, **options)


def prepared(paths: Sequence[Path], out: Path) -> tuple[Path, ...]:
    """Return the stores among paths and one, in ``out``, of everything else that they hold."""
    return stores_of(paths, out, prepare_chains)
