"""What stores of complexes and of chains share: alignments, clusters and the list of rejects."""

import csv
import io
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bevatron.data.proteins.alignment_files import AlignmentReader
from bevatron.data.proteins.alignments import prepare_alignments
from bevatron.data.proteins.clusters import cluster_proteins
from bevatron.data.readers.proteins.folders import ProteinFiles, is_rna
from bevatron.data.store.store import Store
from bevatron.errors import StoreError
from bevatron.files import write_text_atomically
from bevatron.typing import Array

ALIGNMENTS, CLUSTERS = "alignments", "clusters.txt"
"""Inside the folder of a store."""

MOST_CLUSTERED = 4000
"""Distinct proteins that are clustered without mmseqs2; of more, equal sequences are a cluster."""

MOST_SHOWN = 10
"""Files that were left out and are named on the terminal."""


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
    found: ProteinFiles, out: Path, workers: int | None, *, strict: bool, rna: bool = True
) -> list[tuple[str, str]]:
    """Prepare the alignments, if there are any; return (file, reason) of what was left out.

    Parameters
    ----------
    rna
        Whether alignments of RNA are taken; else they are passed over.
    """
    rnas = {path for path in found.alignments if is_rna(path)}
    proteins = [path for path in found.alignments if path not in rnas]
    if not proteins and not (rna and rnas):
        return []
    reader = AlignmentReader(proteins, sorted(rnas) if rna else (), strict=strict)
    if not reader.num_samples:
        return reader.rejects
    made = prepare_alignments(reader, out / ALIGNMENTS, workers=workers)
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
    """Write that file, or remove it if there is nothing to list."""
    path = rejects_file(store)
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
