"""Folders of structures, alignments and template hits, in any arrangement.

Names and nesting do not matter: a file's suffix says what it is. An alignment belongs to every
chain whose sequence is its query's; template hits belong to the alignments of their folder.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from bevatron.data.archives import is_archive, open_archive
from bevatron.data.compressed import format_suffix, read_blocks
from bevatron.data.readers.base import content_hash
from bevatron.errors import DataError
from bevatron.typing import Arrays

_STRUCTURES = {".cif", ".mmcif", ".bcif", ".pdb", ".ent"}
_ALIGNMENTS = {".a3m", ".sto", ".stk", ".stockholm", ".afa"}
_HITS, _TABLES = {".hhr", ".m8"}, {".tsv", ".tab"}
_HITS_IN_NAME = "hmm_output", "hmmsearch"


_DUPLICATES, _OBSOLETE = re.compile(r"duplicate_(pdb_)?chains(\.txt)?"), "obsolete.dat"
_DATES = re.compile(r"(mmcif|chain_data)_cache\.json")
_KINDS = "structures", "alignments", "hits", "duplicates", "obsolete", "dates"


@dataclass(frozen=True)
class ProteinFiles:
    """Files found, each list sorted by path.

    Attributes
    ----------
    structures : mmCIF and PDB files
    alignments : a3m, Stockholm and aligned FASTA (.afa) files
    hits : hhr, m8 and hmmsearch's output
    duplicates, obsolete
        OpenFold's groups of chains with equal sequences, and the archive's list of obsolete
        entries.
    dates : OpenFold's caches of release dates
    refused : (path, reason) of members of archives that are not read, and of damaged archives
    others : number of other files
    copies : (path, path of the structure that is used instead) of duplicates
    """

    structures: tuple[Path, ...]
    alignments: tuple[Path, ...]
    hits: tuple[Path, ...]
    duplicates: tuple[Path, ...]
    obsolete: tuple[Path, ...]
    dates: tuple[Path, ...]
    refused: tuple[tuple[str, str], ...]
    others: int
    copies: tuple[tuple[Path, Path], ...]


def find_protein_files(paths: Sequence[str | Path]) -> ProteinFiles:
    """List the files of proteins among paths and, at any depth, in folders and archives.

    Archives are tar files and OpenFold's alignment databases, by their index; what is in them has
    paths through them. Links to folders are followed, a hidden file or folder is passed over.
    Raises DataError if a path does not exist.
    """
    found: dict[str, dict[Path, tuple[str, int]]] = {name: {} for name in _KINDS}
    refused: list[tuple[str, str]] = []
    others = 0

    def unlisted(error: OSError) -> None:
        reason = f"is a folder that cannot be read ({error.strerror}); check its permissions"
        refused.append((str(error.filename), reason))

    for given in paths:
        root = Path(given).expanduser()
        if not root.exists():
            raise DataError(f"{given}: no such file or folder; check the path")
        for path in _files(root, unlisted):
            inside, whole = [path], path
            if is_archive(path):
                try:
                    archive = open_archive(path)
                except DataError as error:
                    refused.append((str(path), str(error).removeprefix(f"{path}: ")))
                    continue
                inside, refused = archive.paths(), [*refused, *archive.refused]
            for number, each in enumerate(inside):
                kind = _kind(each)
                if kind is None:
                    others += not _is_database(each)
                else:
                    found[kind].setdefault(each, (str(whole), number))
    # Files of an archive stay in its order, in which they are read fastest.
    ordered = {name: tuple(sorted(each, key=each.__getitem__)) for name, each in found.items()}
    once = tuple(dict.fromkeys(refused))
    return ProteinFiles(**ordered, refused=once, others=others, copies=())


def is_protein_file(path: Path) -> bool:
    """Whether a path is a structure, an alignment or template hits, or holds some."""
    for each in _files(path):
        inside = open_archive(each).paths() if is_archive(each) else [each]
        if any(_kind(one) in _KINDS[:3] for one in inside):
            return True
    return False


def _files(root: Path, unlisted: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Yield the files of a folder at any depth, or the file itself.

    A folder with several names is listed once, by the one without a link if there is one, and a
    link to the root or to a folder around it is not followed. A broken link counts as a file, so
    that it is reported, as does what may not be looked at; ``unlisted`` is told of folders that
    may not be listed.
    """
    if not root.is_dir():
        yield root
        return
    starts, listed = [root], set(root.resolve().parents)
    for start in starts:  # which grows by the links that are found
        for place, folders, names in os.walk(start, onerror=unlisted):
            here = Path(place)
            if here.resolve() in listed:
                folders.clear()
                continue
            listed.add(here.resolve())
            folders[:] = [name for name in folders if not name.startswith(".")]
            starts += [here / name for name in sorted(folders) if (here / name).is_symlink()]
            for path in (here / name for name in names if not name.startswith(".")):
                if not _is_special(path):
                    yield path


def _is_special(path: Path) -> bool:
    """Whether a path is a pipe, a socket or a device."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _is_database(path: Path) -> bool:
    """Whether a file is one of OpenFold's databases, which is read by the index beside it."""
    return path.suffix == ".db" and any(path.parent.glob("*.index"))


def _kind(path: Path) -> str | None:
    suffix = format_suffix(path)
    if _DUPLICATES.fullmatch(path.name):
        return "duplicates"
    if path.name == _OBSOLETE:
        return "obsolete"
    if _DATES.fullmatch(path.name):
        return "dates"
    if suffix in _STRUCTURES:
        return "structures"
    if suffix in _TABLES and "hits" in path.name:
        return "hits"
    if suffix in _HITS or any(part in path.name for part in _HITS_IN_NAME):
        return "hits"
    return "alignments" if suffix in _ALIGNMENTS else None


def is_rna(alignment: Path) -> bool:
    """Whether the query of an alignment is RNA: its letters are those of RNA, U among them.

    One that cannot be read is not; reading it will say why.
    """
    letters: set[str] = set()
    try:
        start = next(read_blocks(alignment), b"")
    except DataError:
        return False
    for line in start.decode("ascii", "replace").splitlines():
        if line.startswith((">", "#", "//")) or not line.strip():
            if letters:
                break
            continue
        letters |= set(line.split()[-1].upper())
        if format_suffix(alignment) != ".a3m":
            break  # of a Stockholm file the first row: what follows are other names
    return "U" in letters and letters <= set("ACGUN-.")


class StructureFiles:
    """Raw samples for `bevatron.data.store.prepare.prepare`: the path of each structure.

    Parameters
    ----------
    paths : files of structures, in this order
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)

    @property
    def sources(self) -> list[str]:
        """Names of the files."""
        return [str(path) for path in self.paths]

    @property
    def fingerprint(self) -> str:
        """Hash of the names and contents of all files."""
        contents = [f"{path} {_content(path)}" for path in self.paths]
        return xxhash.xxh3_128_hexdigest("\n".join(contents).encode())

    @property
    def num_samples(self) -> int:
        """Number of files."""
        return len(self.paths)

    def read(self, start: int, stop: int) -> Iterator[Arrays]:
        """Yield ``path``, the bytes of the path, uint8, and ``number``, its index."""
        for number in range(start, stop):
            name: npt.NDArray[np.uint8] = np.frombuffer(str(self.paths[number]).encode(), np.uint8)
            yield {"path": name, "number": np.array(number)}

    def describe(self, index: int) -> str:
        """Name a sample: its file."""
        return str(self.paths[index])


def _content(path: Path) -> str:
    """Hash the content of a file; empty for one that cannot be read, reported later."""
    try:
        return content_hash(path)
    except OSError:
        return "unreadable"
