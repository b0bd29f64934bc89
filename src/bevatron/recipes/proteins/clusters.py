"""Clusters of the similar proteins of a store."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from bevatron.data.proteins.clusters import cluster_proteins, mmseqs_version, read_clusters
from bevatron.data.readers.base import content_hash
from bevatron.data.store.progress import progress as show_progress
from bevatron.errors import DataError, StoreError
from bevatron.files import explained, locked, write_json_atomically, write_text_atomically

CLUSTERS = "clusters.txt"
"""Name inside the folder of a store; it is written last."""

MADE_OF = "clusters.json"
"""File next to it: hashes of its inputs and of itself, and the warnings."""

MOST_CLUSTERED = 100_000
"""Distinct proteins that are clustered without mmseqs2; of more, each is a cluster of its own."""


def write_clusters(
    sequences: Mapping[int, str],
    folder: Path,
    given: Path | None = None,
    named: Mapping[str, int] | None = None,
    *,
    progress: bool = False,
) -> list[str]:
    """Cluster proteins by key, a line of keys for each cluster; return warnings.

    Clusters that are there and of the same proteins, names, file and version of mmseqs2 are kept:
    of the processes of a machine one makes them, while the others wait.

    Parameters
    ----------
    sequences : sequence by chain key
    folder : folder of the store
    given : a file of clusters, see `read_clusters`, for the proteins that it names
    named : key by ``code_chain``, the code in lower case
    progress : whether to show progress
    """
    file = "" if given is None else f"{given} {content_hash(given)}"
    proteins = (f"{key} {text}" for key, text in sequences.items())
    names = (f"{name} {key}" for name, key in (named or {}).items())
    inputs = _hash("\n".join([mmseqs_version(), file, *proteins, "", *names]))
    known = _kept(folder, inputs)
    if known is None:
        with explained(folder, StoreError), locked(folder):
            known = _kept(folder, inputs)  # another process may have made them meanwhile
            if known is None:
                text, known = _clustered(sequences, given, named or {}, progress=progress)
                made = {"inputs": inputs, "clusters": _hash(text), "warnings": known}
                write_json_atomically(folder / MADE_OF, made, StoreError)
                write_text_atomically(folder / CLUSTERS, text, StoreError)
    return known


def clusters_of(folder: Path) -> dict[int, int]:
    """Return the number of its cluster by chain key, of the store in a folder.

    Raises StoreError if the file is missing or damaged.
    """
    path = folder / CLUSTERS
    try:
        return {int(key): number for key, number in read_clusters(path).items()}
    except (DataError, ValueError):
        raise StoreError(
            f"{path}: is missing or damaged; run prepare again, which rebuilds only it"
        ) from None


def _hash(text: str) -> str:
    return xxh3_128_hexdigest(text.encode())


def _kept(folder: Path, inputs: str) -> list[str] | None:
    """Return the warnings about clusters that were made of these inputs; None without them."""
    try:
        made = json.loads((folder / MADE_OF).read_text(encoding="utf-8"))
        text = (folder / CLUSTERS).read_text(encoding="utf-8")
        fits = made["inputs"] == inputs and made["clusters"] == _hash(text)
        return [*map(str, made["warnings"])] if fits else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _clustered(
    sequences: Mapping[int, str], given: Path | None, named: Mapping[str, int], *, progress: bool
) -> tuple[str, list[str]]:
    """Return lines of keys, and warnings."""
    warning = []
    members: dict[object, list[str]] = {}
    if given is not None:
        known = _given_clusters(given, named)
        for key in (key for key in sequences if key in known):
            members.setdefault(("given", known[key]), []).append(str(key))
        rest = {key: text for key, text in sequences.items() if key not in known}
        if rest:
            warning.append(
                f"{len(rest):,} of {len(sequences):,} distinct proteins are not in {given}; they "
                "are clustered among themselves"
            )
        sequences = rest
    if len(sequences) > MOST_CLUSTERED and shutil.which("mmseqs") is None:
        warning.append(
            f"warning: {len(sequences):,} distinct proteins are too many to cluster without "
            "mmseqs2; only equal sequences are a cluster until it is installed"
        )
        sequences = {}
    with show_progress("clusters", len(sequences), unit="proteins", enabled=progress) as advance:
        clusters = cluster_proteins(sequences, advance=advance)
    for key, number in clusters.items():
        members.setdefault(number, []).append(str(key))
    return "".join(" ".join(each) + "\n" for each in members.values()), warning


def _given_clusters(path: Path, named: Mapping[str, int]) -> dict[int, int]:
    """Return the number of the cluster of each key that a file names."""
    found: dict[int, int] = {}
    for name, number in read_clusters(path).items():
        code, _, chain = name.rpartition("_")
        key = named.get(f"{code.lower()}_{chain}")
        if key is not None:
            found.setdefault(key, number)
    if not found:
        raise DataError(
            f"{path}: names no protein of the structures; its members are CODE_CHAIN, such as "
            f"{next(iter(named), '4hhb_A')}"
        )
    return found
