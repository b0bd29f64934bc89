"""Copying a store to a node-local disk, once per machine."""

import shutil
from pathlib import Path

import xxhash

from bevatron.data.store.store import MANIFEST
from bevatron.errors import StoreError
from bevatron.files import atomic_folder, explained, locked, remove_leftovers


def stage(store: Path, folder: Path) -> Path:
    """Copy a store into a node-local folder and return the path of the copy.

    All processes of a machine may call this at once: one copies, the others wait. The copy is named
    after the store and a hash of its manifest, so an existing copy is reused and one of an older
    store never is. It appears under its name only when complete, and what a kill left of it is
    removed. Raises StoreError if ``store`` is not a store, or the disk is full or not writable.

    Parameters
    ----------
    folder : folder on a fast local disk; created if missing
    """
    try:
        manifest = (store / MANIFEST).read_bytes()
    except OSError as error:
        raise StoreError(f"{store}: not a store, {MANIFEST} cannot be read ({error})") from None
    copy = folder / f"{store.resolve().name}-{xxhash.xxh3_64_hexdigest(manifest)}"
    with explained(folder, StoreError):
        folder.mkdir(parents=True, exist_ok=True)
    with explained(copy, StoreError), locked(folder) as held:
        if not copy.is_dir():
            if held:  # else another process may be at work on them
                remove_leftovers(folder, copy.name)
            with atomic_folder(copy, StoreError) as unfinished:
                shutil.copytree(store, unfinished, dirs_exist_ok=True)
    return copy
