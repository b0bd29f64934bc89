"""What the preparation of a store left out: listed in a file, and named to the user."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bevatron.data.store.prepare import rank_and_world
from bevatron.data.store.store import Store
from bevatron.errors import StoreError
from bevatron.files import TEMPORARY, write_csv_atomically
from bevatron.output import counted

MOST_SHOWN = 10
"""Files that were left out, or reasons, that are named on the terminal."""


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
    write_csv_atomically(path, [("file", "reason"), *rejects], StoreError)


def lines_of_rejects(store: Store, rejects: Sequence[tuple[str, str]]) -> list[str]:
    """Name the files that were left out; of many one for each reason, and where all are listed."""
    if len(rejects) <= MOST_SHOWN:
        lines = [f"left out: {file}: {reason}" for file, reason in rejects]
        return [*lines, f"files left out: {len(rejects)}"] if rejects else []
    files: dict[str, list[str]] = {}
    for file, reason in rejects:
        files.setdefault(reason, []).append(file)
    lines = []
    for reason, (first, *others) in list(files.items())[:MOST_SHOWN]:
        more = f" and {counted(len(others), 'other')}" if others else ""
        lines.append(f"left out: {first}{more}: {reason}")
    return [
        *lines,
        f"files left out: {len(rejects):,}",
        f"all are listed in {rejects_file(store)}",
    ]
