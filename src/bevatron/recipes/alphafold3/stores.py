"""Stores of complexes: entries, the reference poses of their components and their alignments.

A store of complexes is a folder that holds a store of entries, ``poses.arrow`` and, in
``alignments``, a store of alignments; a chain's alignment is found by its sequence.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bevatron.data.processes import own_cpus
from bevatron.data.proteins.chain_index import INDEX_FIELDS, index_of, protein_sequences
from bevatron.data.proteins.complexes import ENTRY_FIELDS, describe, featurize
from bevatron.data.proteins.filters import FILTERS, check_structure, filter_chains
from bevatron.data.proteins.hit_files import NamedChain, entry_code
from bevatron.data.proteins.poses import prepare_poses
from bevatron.data.proteins.sample import sequence_classes
from bevatron.data.readers.proteins import open_components, read_structure
from bevatron.data.readers.proteins.components import INSTALLED
from bevatron.data.readers.proteins.folders import StructureFiles
from bevatron.data.samples import Field
from bevatron.data.store.prepare import prepare
from bevatron.data.store.store import Store
from bevatron.errors import DataError, reason_of
from bevatron.recipes.proteins import (
    begin,
    find_structures,
    lines_of_rejects,
    list_rejects,
    nothing,
    open_prepared,
    prepare_searches,
    stores_of,
    text_bytes,
    unusable,
    write_clusters,
)
from bevatron.typing import Arrays

KIND = "complexes"
"""Kind of these stores in their settings."""

FEATURES_VERSION = 4
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
class ComplexFeaturizer:
    """From the path of a structure to an entry; a file that cannot be used becomes its reason.

    Attributes
    ----------
    components : see `bevatron.data.readers.proteins.open_components`
    assembly : name of the biological assembly; a file without any is taken as it is
    max_tokens : entries of more are left out; None for no limit
    keep_all : keep the structures and chains too that AlphaFold3 is not trained on, see
        `bevatron.data.proteins.filters`
    strict : an unusable file is an error
    """

    components: str
    assembly: str = "1"
    max_tokens: int | None = None
    keep_all: bool = False
    strict: bool = False

    def __call__(self, raw: Arrays) -> Arrays:
        """Read and featurize one file."""
        path = np.asarray(raw["path"]).tobytes().decode()
        source = np.array([int(raw["number"]), 0], dtype=np.int64)
        try:
            entry = self._entry(path)
        except DataError as error:
            if self.strict:
                raise
            reason = reason_of(error, path)
            return {**nothing(FIELDS), "reason": text_bytes(reason), "source": source}
        return {**entry, "reason": text_bytes(""), "source": source}

    def _entry(self, path: str) -> Arrays:
        structure = read_structure(path)
        if structure.assemblies:
            structure = structure.assembly(self.assembly)
        removed = np.zeros(len(FILTERS), dtype=np.int32)
        if not self.keep_all:
            check_structure(structure)
            structure, removed = filter_chains(structure)
        components = open_components(self.components)
        entry = featurize(structure, components, max_tokens=self.max_tokens)
        return {**entry, **index_of(entry), "filtered": removed}


def prepare_complexes(
    files: Sequence[str | Path],
    out: Path,
    *,
    components: str = INSTALLED,
    assembly: str = "1",
    max_tokens: int | None = None,
    keep_all: bool = False,
    strict: bool = False,
    clusters: Path | None = None,
    samples_per_shard: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> list[str]:
    """Turn folders of structures and alignments into a store of complexes; a kill loses nothing.

    Raises DataError or StoreError if there is no structure, with ``strict`` if one is unusable, or
    ``out`` holds something else.

    Parameters
    ----------
    files : structures (mmCIF, PDB), alignments (a3m, Stockholm) and folders of them, at any depth
    components, assembly, max_tokens, keep_all, strict : see `ComplexFeaturizer`
    clusters : a file of clusters of proteins, see `bevatron.recipes.proteins.write_clusters`
    samples_per_shard, workers, overwrite, progress : as in `bevatron.data.store.prepare.prepare`

    Returns
    -------
    Lines for the user: what was found and what was left out.
    """
    found = find_structures(files)
    begin(out, overwrite=overwrite)
    dictionary = open_components(components)  # indexed once, before the workers ask for it
    settings = {
        "kind": KIND, "features": FEATURES_VERSION, "components": str(components),
        "dictionary": dictionary.key, "assembly": assembly, "max_tokens": max_tokens,
        "keep_all": keep_all, "unit": "file",
    }  # fmt: skip
    store = prepare(
        StructureFiles(found.structures),
        ComplexFeaturizer(str(components), assembly, max_tokens, keep_all, strict),
        out,
        FIELDS,
        settings,
        samples_per_shard=samples_per_shard,
        workers=workers,
        overwrite=overwrite,
        progress=progress,
        summarise=summarise,
    )
    codes = {code for entry in store if len(entry["restype"]) for code in _codes(entry)}
    proteins, rna = named_chains(store)
    lines, damaged = prepare_searches(
        found,
        store,
        proteins,
        strict=strict,
        workers=workers,
        overwrite=overwrite,
        progress=progress,
        rna=rna,
    )
    prepare_poses(out / POSES, dictionary, codes, workers=_workers(workers), progress=progress)
    rows = [*unusable(store), *damaged]
    list_rejects(store, rows)
    named = {} if clusters is None else named_keys(store)
    warnings = write_clusters(protein_sequences(store), store.path, clusters, named)
    return [*warnings, *summary_lines(store, lines, found.others, rows)]


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


def prepared(paths: Sequence[Path], out: Path, components: str) -> tuple[Path, ...]:
    """Return the stores among paths and one, in ``out``, of everything else that they hold."""
    return stores_of(
        paths, out, lambda files, to: prepare_complexes(files, to, components=components)
    )


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


def open_complexes(path: str | Path) -> Store:
    """Open the entries of a store of complexes.

    Raises DataError if it is a store of something else, of features of another version, or one
    whose preparation was stopped; StoreError if there is no finished store.
    """
    return open_prepared(path, KIND, FEATURES_VERSION, "alphafold3")


def summary_lines(
    store: Store, searches: Sequence[str], others: int, rejects: Sequence[tuple[str, str]]
) -> list[str]:
    """Say in a few lines what was found and what was left out."""
    summary = store.manifest["summary"]
    chains = ", ".join(f"{n} {kind}" for kind, n in sorted(summary["chains"].items()))
    lines = [
        f"{summary['usable']} of {summary['files']} structures are usable",
        f"{summary['tokens']:,} tokens, {summary['atoms']:,} atoms; chains: {chains}",
        *searches,
        f"files of other kinds, passed over: {others}",
    ]
    if removed := [f"{number} {name}" for name, number in summary["filtered"].items() if number]:
        lines.append(f"chains left out as in AlphaFold3's training: {', '.join(removed)}")
    if summary["left_out"]:
        codes = ", ".join(sorted(summary["left_out"]))
        lines.append(f"components that the dictionary lacks, left out: {codes}")
    lines += lines_of_rejects(store, rejects)
    lines.append(f"train with: bevatron train alphafold3 --data {store.path} --output RUN")
    return lines


def _workers(asked: int | None) -> int:
    """Return how many processes make poses: none where one CPU is all there is."""
    number = own_cpus() if asked is None else asked
    return number if number > 1 else 0


def _codes(entry: Arrays) -> list[str]:
    codes: list[str] = describe(entry)["components"]
    return codes
