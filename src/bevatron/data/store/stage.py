"""Copying a store to a node's own disk, once per machine."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from bevatron.data.store.store import MANIFEST
from bevatron.errors import StoreError
from bevatron.files import atomic_folder, explained


def stage(store: Path, folder: Path) -> Path:
    """Copy a store into a node-local folder and return where it is there.

    The processes of a machine may all call this together: one copies, the others wait. The copy is
    named after the store and the content of its manifest, so a copy that is there already is used
    and one of an older store never is. It appears under its name only when all of it is on disk.

    Parameters
    ----------
    store
        The store's folder.
    folder
        On a fast local disk; made if it does not exist.

    Raises
    ------
    StoreError
        If ``store`` is none, or the disk is full or cannot be written.
    """
    try:
        manifest = (store / MANIFEST).read_bytes()
    except OSError as error:
        raise StoreError(f"{store}: not a store, {MANIFEST} cannot be read ({error})") from None
    copy = folder / f"{store.resolve().name}-{xxhash.xxh3_64_hexdigest(manifest)}"
    with explained(folder, StoreError):
        folder.mkdir(parents=True, exist_ok=True)
    with explained(copy, StoreError), _locked(copy.with_name(f".{copy.name}.lock")):
        if not copy.is_dir():
            with atomic_folder(copy, StoreError) as unfinished:
                shutil.copytree(store, unfinished, dirs_exist_ok=True)
    return copy


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process of this machine at a time into the ``with`` block; a kill unlocks."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
