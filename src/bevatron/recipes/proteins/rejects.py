"""What the preparation of a store of proteins left out, named to the user."""

from collections.abc import Sequence

import numpy as np

from bevatron.data.store.store import Store
from bevatron.output import counted
from bevatron.recipes.rejects import rejects_file

MOST_SHOWN = 10
"""Files that were left out, or reasons, that are named on the terminal."""


def unusable(store: Store) -> list[tuple[str, str]]:
    """List (file, reason) of the structures of a store that were left out, or chains of them."""
    return [
        (store.manifest["sources"][row], store[int(row)]["reason"].tobytes().decode())
        for row in np.flatnonzero(store.lengths("reason"))
    ]


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
