"""Copies of structures: of several files with the same content one is used."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from bevatron.data.archives import size_of
from bevatron.data.compressed import read_whole
from bevatron.data.proteins.hit_files import NamedChain, entry_code
from bevatron.data.readers.base import content_hash
from bevatron.data.readers.proteins.folders import ProteinFiles
from bevatron.errors import DataError


def without_copies(found: ProteinFiles) -> ProteinFiles:
    """Refuse structures of the bytes of another, or of its name and its content compressed.

    The one of the shortest name is used, of equally long ones the first.
    """
    # What has neither its size nor its name in common with another file is not read; empty files
    # are no copies of each other.
    size = {path: size_of(path) for path in found.structures}
    sizes = Counter(size.values())
    names = Counter(entry_code(path) for path in found.structures)
    place = {path: (len(path.name), number) for number, path in enumerate(found.structures)}
    known: dict[str, Path] = {}
    copies: dict[Path, Path] = {}

    def used(path: Path) -> Path:
        return used(copies[path]) if path in copies else path

    for path in (path for path in found.structures if size[path] > 0):
        code, contents = entry_code(path), []
        try:
            if sizes[size[path]] > 1:
                contents.append(content_hash(path))
            if names[code] > 1:
                contents.append(f"{code} {xxh3_128_hexdigest(read_whole(path))}")
        except (DataError, OSError):
            continue  # whoever reads it says why
        # Its bytes may be those of one file, and its content that of another.
        alike = {path, *(used(known[content]) for content in contents if content in known)}
        first = min(alike, key=place.__getitem__)
        copies |= dict.fromkeys(alike - {first}, first)
        known |= dict.fromkeys(contents, first)
    copies = {path: used(path) for path in found.structures if path in copies}
    reasons = (
        (str(path), f"is a copy of {first}, which is read instead")
        for path, first in copies.items()
    )
    return replace(
        found,
        structures=tuple(path for path in found.structures if path not in copies),
        copies=tuple(copies.items()),
        refused=(*found.refused, *reasons),
    )


def names_of_copies(found: ProteinFiles, chains: Sequence[NamedChain]) -> Iterator[Sequence[str]]:
    """Yield each chain of a structure with copies of other names, under the names of all."""
    codes: dict[str, set[str]] = {}
    for path, first in found.copies:
        if (code := entry_code(first)) != entry_code(path):
            codes.setdefault(code, set()).add(entry_code(path))
    for chain in chains:
        for name in chain.names if chain.entry in codes else ():
            yield [f"{code}_{name}" for code in (chain.entry, *sorted(codes[chain.entry]))]
