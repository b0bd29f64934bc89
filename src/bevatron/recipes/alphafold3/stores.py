"""Stores of complexes: entries, the reference poses of their components and their alignments.

A store of complexes is a folder that holds a store of entries, ``poses.arrow`` and, in
``alignments``, a store of alignments; a chain's alignment is found by its sequence.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.processes import own_cpus
from bevatron.data.proteins.chain_index import INDEX_FIELDS, index_of, protein_sequences
from bevatron.data.proteins.featurize import ENTRY_FIELDS, describe, featurize
from bevatron.data.proteins.filters import FILTERS, check_structure, filter_chains
from bevatron.data.proteins.hit_files import NamedChain, entry_code
from bevatron.data.proteins.poses import prepare_poses
from bevatron.data.readers.proteins import open_components
from bevatron.data.readers.proteins.alphabet import sequence_classes
from bevatron.data.readers.proteins.components import INSTALLED
from bevatron.data.samples import Field
from bevatron.data.store.store import Store
from bevatron.errors import ConfigError, DataError
from bevatron.output import counted
from bevatron.recipes.proteins.dates import Released
from bevatron.recipes.proteins.stores import (
    Featurizer,
    StoreKind,
    find_structures,
    stores_of,
    text_bytes,
)
from bevatron.typing import Arrays

KIND = "complexes"
"""Kind of these stores in their settings."""

FEATURES_VERSION = 5
"""Version of what is stored of a complex; a store of another version is prepared again."""

FIELDS = (
    *ENTRY_FIELDS,
    *INDEX_FIELDS,
    Field("filtered", "int32", (len(FILTERS),), False, "chains that each of FILTERS removed"),
    Field("reason", "uint8", (), True, "why the file was left out, UTF-8; empty if it was not"),
    Field("source", "int64", (2,), False, "(file, 0): index into the manifest"),
)

POSES = "poses.arrow"


@dataclass(frozen=True)
class ComplexFeaturizer(Featurizer):
    """From the path of a structure to an entry.

    Attributes
    ----------
    components : see `bevatron.data.readers.proteins.open_components`
    assembly : name of the biological assembly; a file without any is taken as it is
    max_tokens : entries of more are left out; None for no limit
    keep_all : keep the structures and chains too that AlphaFold3 is not trained on, see
        `bevatron.data.proteins.filters`
    """

    fields = FIELDS

    components: str
    assembly: str = "1"
    max_tokens: int | None = None
    keep_all: bool = False

    def entry(self, path: str) -> Arrays:
        """Read and featurize one file."""
        structure = self.read(path)
        if structure.assemblies:
            structure = structure.assembly(self.assembly)
        removed = np.zeros(len(FILTERS), dtype=np.int32)
        if not self.keep_all:
            check_structure(structure)
            structure, removed = filter_chains(structure)
            if removed.any() and not (structure.chains.kind != "water").any():
                raise DataError(
                    f"{path}: all chains are left out as in AlphaFold3's training "
                    f"({_removed(removed.tolist())}); --keep-all keeps them"
                )
        components = open_components(self.components)
        entry = featurize(structure, components, max_tokens=self.max_tokens)
        return {**entry, **index_of(entry), "filtered": removed, "reason": text_bytes("")}


def named_chains(store: Store) -> tuple[list[NamedChain], list[bytes]]:
    """List the proteins of a store by the names of their files, and the classes of its RNA."""
    proteins, rna = [], []
    sources = iter(store.manifest["sources"])
    for (text, ends), (days, _) in zip(
        store.flat("description"), store.flat("released"), strict=True
    ):
        for row, day in enumerate(days.tolist()):
            code, words = entry_code(next(sources)), text[ends[row] : ends[row + 1]]
            for chain in describe({"description": words})["chains"] if len(words) else ():
                if chain["kind"] == "protein":
                    classes = sequence_classes("protein", chain["sequence"]).tobytes()
                    names = tuple(dict.fromkeys((chain["author"], chain["label"])))
                    proteins.append(NamedChain(code, names, classes, day))
                elif chain["kind"] == "rna":
                    rna.append(sequence_classes("rna", chain["sequence"]).tobytes())
    return proteins, rna


def named_keys(store: Store) -> dict[str, int]:
    """Return the chain keys of proteins by ``code_chain``, also by ``code_entity`` as RCSB does."""
    found: dict[str, int] = {}
    for entry, source in zip(store, store.manifest["sources"], strict=True):
        keys = np.asarray(entry["chain_key"]).tolist()
        chains = describe(entry)["chains"] if keys else []
        for name in ("author", "label", "entity"):
            for key, chain in zip(keys, chains, strict=True):
                if chain["kind"] == "protein":
                    found.setdefault(f"{entry_code(source)}_{chain[name]}", key)
    return found


def summarise(samples: Sequence[Arrays]) -> dict[str, object]:
    """Count what the entries of a shard hold."""
    usable = [sample for sample in samples if len(sample["restype"])]
    kinds = Counter(chain["kind"] for sample in usable for chain in describe(sample)["chains"])
    return {
        "files": len(samples),
        "usable": len(usable),
        "tokens": sum(len(sample["restype"]) for sample in usable),
        "atoms": sum(len(sample["ref_element"]) for sample in usable),
        "chains": dict(kinds),
        "filtered": {
            name: int(sum(sample["filtered"][place] for sample in usable))
            for place, name in enumerate(FILTERS)
        },
        "left_out": dict(Counter(code for each in usable for code in describe(each)["left_out"])),
    }


def _removed(numbers: Iterable[int]) -> str:
    """Say how many chains each of `FILTERS` removed; nothing if none did."""
    return ", ".join(f"{n} {name}" for name, n in zip(FILTERS, numbers, strict=True) if n)


def _told(summary: Mapping[str, Any]) -> list[str]:
    chains = ", ".join(f"{n} {kind}" for kind, n in sorted(summary["chains"].items()))
    tokens, atoms = (counted(summary[f"{each}s"], each) for each in ("token", "atom"))
    lines = [f"{tokens}, {atoms}; chains: {chains or 'none'}"]
    if removed := _removed(summary["filtered"].values()):
        lines.append(f"chains left out as in AlphaFold3's training: {removed}")
    if summary["left_out"]:
        codes = ", ".join(sorted(summary["left_out"]))
        lines.append(f"components that the dictionary lacks, left out: {codes}")
    return lines


COMPLEXES = StoreKind(
    name=KIND,
    system="alphafold3",
    version=FEATURES_VERSION,
    summarise=summarise,
    chains=named_chains,
    sequences=protein_sequences,
    keys=named_keys,
    told=_told,
)

open_complexes = COMPLEXES.open


def prepare_complexes(
    files: Sequence[str | Path],
    out: Path,
    *,
    components: str = INSTALLED,
    assembly: str = "1",
    max_tokens: int | None = None,
    keep_all: bool = False,
    strict: bool = False,
    lowest_plddt: float | None = None,
    released_before: str | None = None,
    released_from: str | None = None,
    **options: Any,
) -> list[str]:
    """Turn folders of structures and alignments into a store; options as of `StoreKind.prepare`.

    Parameters
    ----------
    components, assembly, max_tokens, keep_all, strict, lowest_plddt : see `ComplexFeaturizer`
    released_before, released_from : see `bevatron.recipes.proteins.dates.Released`
    """
    released = Released(released_before, released_from)
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max_tokens: expected at least 1, got {max_tokens}")
    found = find_structures(files)
    dictionary = open_components(components)  # indexed once, before the workers ask for it
    featurize = ComplexFeaturizer(
        *(str(components), assembly, max_tokens, keep_all),
        strict=strict,
        lowest_plddt=lowest_plddt,
        released=released,
    )

    def make_poses(store: Store) -> None:
        codes = {code for entry in store if len(entry["restype"]) for code in _codes(entry)}
        asked, progress = options.get("workers"), options.get("progress")
        number = own_cpus() if asked is None else asked
        prepare_poses(
            out / POSES, dictionary, codes, workers=number if number > 1 else 0, progress=progress
        )

    settings = {"dictionary": dictionary.key}
    return COMPLEXES.prepare(found, out, featurize, settings, finish=make_poses, **options)


def prepared(paths: Sequence[Path], out: Path, components: str) -> tuple[Path, ...]:
    """Return the stores among paths and one, in ``out``, of everything else that they hold."""
    return stores_of(
        paths, out, lambda files, to: prepare_complexes(files, to, components=components)
    )


def _codes(entry: Arrays) -> list[str]:
    codes: list[str] = describe(entry)["components"]
    return codes
