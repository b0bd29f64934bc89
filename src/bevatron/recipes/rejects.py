"""The file that lists what the preparation of a store left out."""

from collections.abc import Sequence
from pathlib import Path

from bevatron.data.store.prepare import rank_and_world
from bevatron.data.store.store import Store
from bevatron.errors import StoreError
from bevatron.files import TEMPORARY, write_csv_atomically


def rejects_file(store: Store) -> Path:
    """Name the file."""
    return store.path.with_name(f"{store.path.name}-rejects.csv")


def list_rejects(store: Store, header: Sequence[str], rejects: Sequence[Sequence[str]]) -> None:
    """Write the file, or remove it if there is nothing to list; rank 0 does."""
    path = rejects_file(store)
    if rank_and_world()[0]:
        return
    for unfinished in path.parent.glob(f"{path.name}.*{TEMPORARY}"):
        unfinished.unlink(missing_ok=True)
    if not rejects:
        path.unlink(missing_ok=True)
        return
    write_csv_atomically(path, [header, *rejects], StoreError)
