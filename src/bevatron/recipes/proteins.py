"""What stores of complexes and of chains share: alignments, clusters and the list of rejects."""

import csv
import io
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bevatron.data.proteins.alignment_files import AlignmentReader
from bevatron.data.proteins.alignments import prepare_alignments
from bevatron.data.proteins.clusters import cluster_proteins
from bevatron.data.readers.proteins.folders import ProteinFiles, find_protein_files, is_rna
from bevatron.data.samples import Field
from bevatron.data.store.prepare import rank_and_world
from bevatron.data.store.store import MANIFEST, Store
from bevatron.errors import DataError, StoreError
from bevatron.files import TEMPORARY, remove_folder, write_text_atomically
from bevatron.output import say
from bevatron.typing import Array, Arrays

ALIGNMENTS, CLUSTERS = "alignments", "clusters.txt"
"""Inside the folder of a store; clusters are written last."""

MOST_CLUSTERED = 4000
"""Distinct proteins that are clustered without mmseqs2; of more, equal sequences are a cluster."""

MOST_SHOWN = 10
"""Files that were left out and are named on the terminal."""


def stores_of(
    paths: Sequence[Path], out: Path, prepare: Callable[[list[Path], Path], list[str]]
) -> tuple[Path, ...]:
    """Return the stores among paths and one, in ``out``, of everything else that they hold.

    ``prepare`` makes it and returns lines for the user, the last of which says how to train.
    """
    stores = tuple(path for path in paths if (path / MANIFEST).is_file())
    others = [path for path in paths if path not in stores]
    if not others:
        return stores
    say(*prepare(others, out)[:-1])
    return (*stores, out)


def begin(out: Path, *, overwrite: bool) -> None:
    """Begin to prepare into a folder; what may be overwritten counts as unfinished from now on."""
    if overwrite:
        (out / CLUSTERS).unlink(missing_ok=True)


def open_prepared(path: str | Path, kind: str, version: int, system: str) -> Store:
    """Open a store of proteins.

    Parameters
    ----------
    kind, version
        Of its samples and features.
    system
        Whose ``bevatron prepare`` makes such a store.

    Raises
    ------
    DataError
        If it is a store of something else, of features of another version, or one whose
        preparation was stopped.
    StoreError
        If there is no finished store.
    """
    store = Store.open(path)
    settings = store.manifest["settings"]
    if settings.get("kind") != kind:
        raise DataError(f"{path}: not a store of {kind}; make one with `bevatron prepare {system}`")
    if settings["features"] != version:
        raise DataError(
            f"{path}: has version {settings['features']} of the features, the code has version "
            f"{version}; prepare it again"
        )
    if not (store.path / CLUSTERS).exists():
        raise DataError(
            f"{path}: was not prepared to its end; start the same `bevatron prepare` again"
        )
    return store


def find_structures(files: Sequence[str | Path]) -> ProteinFiles:
    """List the files of proteins among paths and in folders.

    Raises
    ------
    DataError
        If there is no structure.
    """
    found = find_protein_files(files)
    if not found.structures:
        given = ", ".join(map(str, files)) or "nothing"
        raise DataError(f"{given}: holds no structure; expected files that end in .cif or .pdb")
    return found


def nothing(fields: Sequence[Field]) -> Arrays:
    """Return an entry without any rows."""
    return {
        field.name: np.zeros((0, *field.shape) if field.ragged else field.shape, field.dtype)
        for field in fields
    }


def write_clusters(sequences: Mapping[int, str], folder: Path) -> list[str]:
    """Cluster proteins by key, a line of keys for each cluster; return a warning, if any."""
    warning = []
    if len(sequences) > MOST_CLUSTERED and shutil.which("mmseqs") is None:
        warning.append(
            f"warning: {len(sequences):,} distinct proteins are too many to cluster without "
            "mmseqs2; only equal sequences are a cluster until it is installed"
        )
        sequences = {}
    members: dict[int, list[str]] = {}
    for key, number in cluster_proteins(sequences).items():
        members.setdefault(number, []).append(str(key))
    text = "".join(" ".join(each) + "\n" for each in members.values())
    write_text_atomically(folder / CLUSTERS, text, StoreError)
    return warning


def prepare_found_alignments(
    found: ProteinFiles,
    out: Path,
    workers: int | None,
    *,
    strict: bool,
    overwrite: bool,
    rna: bool = True,
) -> list[tuple[str, str]]:
    """Prepare the alignments, if there are any; return (file, reason) of what was left out.

    Parameters
    ----------
    overwrite
        Whether alignments of other files may be replaced; if there are none now, they are removed.
    rna
        Whether alignments of RNA are taken; else they are passed over.
    """
    if overwrite and not found.alignments and (out / ALIGNMENTS).exists():
        remove_folder(out / ALIGNMENTS)
    rnas = {path for path in found.alignments if is_rna(path)}
    proteins = [path for path in found.alignments if path not in rnas]
    if not proteins and not (rna and rnas):
        return []
    reader = AlignmentReader(proteins, sorted(rnas) if rna else (), strict=strict)
    if not reader.num_samples:
        return reader.rejects
    made = prepare_alignments(reader, out / ALIGNMENTS, workers=workers, overwrite=overwrite)
    return [*reader.rejects, *made.rejects()]


def unusable(store: Store) -> list[tuple[str, str]]:
    """List (file, reason) of the structures of a store that were left out, or chains of them."""
    return [
        (store.manifest["sources"][row], store[int(row)]["reason"].tobytes().decode())
        for row in np.flatnonzero(store.lengths("reason"))
    ]


def rejects_file(store: Store) -> Path:
    """Name the file that lists what was left out."""
    return store.path.with_name(f"{store.path.name}-rejects.csv")


def list_rejects(store: Store, rejects: Sequence[tuple[str, str]]) -> None:
    """Write that file, or remove it if there is nothing to list; rank 0 does."""
    path = rejects_file(store)
    if rank_and_world()[0]:
        return
    for unfinished in path.parent.glob(f"{path.name}.*{TEMPORARY}"):
        unfinished.unlink(missing_ok=True)
    if not rejects:
        path.unlink(missing_ok=True)
        return
    text = io.StringIO()
    csv.writer(text).writerows([("file", "reason"), *rejects])
    write_text_atomically(path, text.getvalue(), StoreError)


def lines_of_rejects(store: Store, rejects: Sequence[tuple[str, str]]) -> list[str]:
    """Name the first files that were left out, and where all are listed."""
    lines = [f"left out: {file}: {reason}" for file, reason in rejects[:MOST_SHOWN]]
    if rejects:
        lines.append(f"{len(rejects)} files were left out; {rejects_file(store)} lists them")
    return lines


def text_bytes(text: str) -> Array:
    """Return a text as a field of a store has it, uint8."""
    return np.frombuffer(text.encode(), dtype=np.uint8)
