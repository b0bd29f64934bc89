"""The alignments and templates of the chains of a store."""

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.archives import archive_of
from bevatron.data.proteins.alignment_files import OF_NO_CHAIN, AlignmentReader
from bevatron.data.proteins.alignments import Alignments, prepare_alignments
from bevatron.data.proteins.chain_index import day_number
from bevatron.data.proteins.hit_files import NamedChain, entry_code, template_queries
from bevatron.data.proteins.places import ChainSequences
from bevatron.data.proteins.template_store import StoredTemplates, prepare_templates
from bevatron.data.readers.proteins import read_duplicate_chains
from bevatron.data.readers.proteins.folders import ProteinFiles, is_rna
from bevatron.data.readers.proteins.openfold import read_obsolete
from bevatron.data.store.store import Store
from bevatron.errors import DataError, reason_of
from bevatron.files import remove_folder
from bevatron.output import counted
from bevatron.recipes.proteins.copies import names_of_copies

ALIGNMENTS, TEMPLATES = "alignments", "templates"
"""Folders inside that of a store."""


def prepare_searches(
    found: ProteinFiles,
    store: Store,
    chains: Sequence[NamedChain],
    *,
    strict: bool,
    workers: int | None,
    overwrite: bool,
    progress: bool | None = None,
    rna: Sequence[bytes] = (),
    dates: Mapping[str, dt.date],
) -> tuple[list[str], list[tuple[str, str]]]:
    """Prepare the alignments and the templates of the chains of a store, if there are any.

    Parameters
    ----------
    store : store of the structures
    chains : the proteins in that store
    strict : an unusable file is an error
    workers, overwrite, progress
        As in `bevatron.data.store.prepare.prepare`; ``overwrite`` also removes alignments and
        templates if there are none any more.
    rna : classes of the RNA in the store
    dates : release dates of structures whose files may name none

    Returns
    -------
    Lines for the user, and (file, reason) of what was left out.
    """
    names = {chain.classes: f"'{chain.entry}_{chain.names[0]}'" for chain in reversed(chains)}
    sequences = ChainSequences([*(chain.classes for chain in chains), *rna], names)
    options: dict[str, Any] = {"workers": workers, "overwrite": overwrite, "progress": progress}
    reader, rejects = _read_alignments(found, sequences, rna=bool(rna), strict=strict)
    lines = [f"alignment files: {len(found.alignments)}"]
    if reader is not None:
        lines[0] += f", sequences: {reader.num_samples}, parts of chains: {reader.partial}"
    if reader is not None and reader.num_samples:
        rejects += prepare_alignments(reader, store.path / ALIGNMENTS, **options).rejects()
    else:
        lines[0] += _without(store.path / ALIGNMENTS, overwrite=overwrite)
    duplicates = [
        group for groups in tables(found.duplicates, read_duplicate_chains, rejects, strict=strict)
        for group in groups
    ]  # fmt: skip
    duplicates += names_of_copies(found, chains)
    known = {} if reader is None else reader.queries
    queries, of_none = template_queries(
        found.hits, chains, sequences, known, duplicates, strict=strict
    )
    rejects += [*found.refused, *of_none]
    folder = store.path / TEMPLATES
    if not queries:
        kept = _without(folder, overwrite=overwrite)
        return [*lines, f"template hit files: {len(found.hits)}{kept}"], rejects
    structures = {entry_code(path): first for path, first in reversed(found.copies)}
    structures |= {entry_code(path): path for path in reversed(found.structures)}
    for renamed in tables(found.obsolete, read_obsolete, rejects, strict=strict):
        structures |= {
            old: structures[new] for old, new in renamed.items()
            if old not in structures and new in structures
        }  # fmt: skip
    made = prepare_templates(
        queries,
        structures,
        folder,
        dates={code: day_number(date) for code, date in dates.items()}
        | {chain.entry: chain.released for chain in chains},
        fingerprint=str(store.manifest["fingerprint"]),
        strict=strict,
        **options,
    )
    counts = made.counts()
    lines.append(
        f"template hit files: {len(found.hits)}, templates: {int(counts.sum())}, sequences with "
        f"templates: {np.count_nonzero(counts)}"
    )
    return lines, [*rejects, *made.rejects()]


def _without(folder: Path, *, overwrite: bool) -> str:
    """Remove what an earlier preparation left, or return what the user is told of it."""
    if not folder.exists():
        return ""
    if overwrite:
        remove_folder(folder)
        return ""
    return f"; the {folder.name} that the store has are kept, --overwrite removes them"


def tables(
    paths: Sequence[Path],
    read: Callable[[Path], Any],
    rejects: list[tuple[str, str]],
    *,
    strict: bool,
) -> Iterator[Any]:
    """Read files about all chains; one that is damaged is left out."""
    for path in paths:
        try:
            yield read(path)
        except DataError as error:
            if strict:
                raise
            rejects.append((str(path), reason_of(error, path)))


def _read_alignments(
    found: ProteinFiles, sequences: ChainSequences, *, rna: bool, strict: bool
) -> tuple[AlignmentReader | None, list[tuple[str, str]]]:
    """Find out whose alignments the files hold; those of RNA are passed over if there is none."""
    rnas = {path for path in found.alignments if is_rna(path)}
    proteins = [path for path in found.alignments if path not in rnas]
    if not proteins and not (rna and rnas):
        return None, []
    reader = AlignmentReader(proteins, sorted(rnas) if rna else (), chains=sequences, strict=strict)
    return reader, _summed_up(reader.rejects)


def _summed_up(rejects: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Count, per archive, alignments that belong to no chain: it may hold a whole database."""
    listed: list[tuple[str, str]] = []
    counts: dict[str, int] = {}
    for file, reason in rejects:
        inside = archive_of(Path(file)) if reason == OF_NO_CHAIN else None
        if inside is None:
            listed.append((file, reason))
        else:
            counts[str(inside[0])] = counts.get(str(inside[0]), 0) + 1
    return listed + [
        (archive, f"{counted(number, 'alignment')} in it of no chain of the structures")
        for archive, number in counts.items()
    ]


def opened_searches(path: Path) -> tuple[Alignments | None, StoredTemplates | None]:
    """Open the alignments and the templates of a store, where it has them."""
    alignments, templates = path / ALIGNMENTS, path / TEMPLATES
    return (
        Alignments.open(alignments) if alignments.exists() else None,
        StoredTemplates.open(templates) if templates.exists() else None,
    )
