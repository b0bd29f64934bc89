"""Files in archives, read in place: tar, also compressed, and OpenFold's databases.

A file in an archive has a path through it, ``pdb.tar/ab/1abc.cif.gz``, by which `open_compressed`
reads it. Nothing is unpacked, and a name that leads out of the archive is refused. Of a compressed
tar the files are best read in their order: reading an earlier one begins again.
"""

import os
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from bevatron.data.compressed import DAMAGED, MAX_BYTES, format_suffix, largest, open_compressed
from bevatron.errors import DataError

_TAR, _DATABASE = {".tar", ".tgz"}, ".index"
_BLOCK = 512


@dataclass(frozen=True)
class Member:
    """A file in an archive: its name, its number, and its offset if stored uncompressed."""

    name: str
    number: int
    size: int
    offset: int | None


@dataclass(frozen=True)
class Archive:
    """Contents of an archive.

    Attributes
    ----------
    members : its files in their order, by name
    refused : (path, reason) of what is not read
    """

    path: Path
    members: dict[str, Member]
    refused: tuple[tuple[str, str], ...]

    def paths(self) -> list[Path]:
        """Return the paths of the files through the archive; hidden ones are skipped."""
        return [self.path / name for name in self.members if "/." not in f"/{name}"]


def is_archive(path: Path) -> bool:
    """Whether a file is an archive by its name: tar, or the index of an alignment database."""
    return format_suffix(path) in _TAR or path.suffix == _DATABASE


def archive_of(path: Path) -> tuple[Path, str] | None:
    """Return the archive that a path leads through, and the rest of the path; None without one.

    Examples
    --------
    >>> archive_of(Path("no/such/file")) is None
    True
    """
    if path.exists():
        return None
    for parent in path.parents:
        if parent.is_file():
            return parent, path.relative_to(parent).as_posix()
    return None


def open_archive(path: Path) -> Archive:
    """List what is in an archive; DataError if it cannot be read at all."""
    return _listed(path, *state_of(path))


def state_of(path: Path) -> tuple[int, int]:
    """Return size and modification time of a file, or of the archive that holds it.

    What is kept of a file is kept under both, so that one that was replaced is read anew.
    """
    inside = archive_of(path)
    try:
        stat = (path if inside is None else inside[0]).stat()
    except OSError:
        return -1, -1  # gone: whoever reads it says so
    return stat.st_size, stat.st_mtime_ns


def size_of(path: Path) -> int:
    """Return the size of a file as it is stored, also of one in an archive; -1 if it is gone."""
    inside = archive_of(path)
    if inside is None or not is_archive(inside[0]):
        return state_of(path)[0]
    member = open_archive(inside[0]).members.get(inside[1])
    return -1 if member is None else member.size


@lru_cache(maxsize=64)
def _listed(path: Path, size: int, changed: int) -> Archive:
    if path.suffix == _DATABASE:
        database = _database(path, size, changed)
        names = [f"{chain}/{file}" for chain in database.chains for file in database.files(chain)]
        found = {name: Member(name, number, 0, None) for number, name in enumerate(names)}
        return Archive(path, found, ())
    members: dict[str, Member] = {}
    refused: list[tuple[str, str]] = []
    lies = not _is_compressed(path)
    end, name = 0, ""
    try:
        for number, each in enumerate(_entries(path)):
            end = each.offset_data + (each.size if each.isreg() else 0)
            name = str(PurePosixPath(each.name))
            reason = _trick(each, size)
            if reason:
                refused.append((f"{path}/{name}", reason))
            elif each.isreg():
                members[name] = Member(name, number, each.size, each.offset_data if lies else None)
            if each.size > (size if lies else largest(size)):
                break  # tarfile would look for what follows it block by block
        # A tar ends in two empty blocks, which tarfile does not miss.
        if lies and size < -(-end // _BLOCK) * _BLOCK + 2 * _BLOCK:
            raise tarfile.ReadError("it has no end")
    except (tarfile.TarError, *DAMAGED) as error:
        reason = f"cannot be read to the end ({error}); copy or download it again"
        refused.append((str(path), reason))
        if not lies or end > size:
            members.pop(name, None)  # it is cut off
    return Archive(path, members, tuple(refused))


def _entries(path: Path) -> Iterator[tarfile.TarInfo]:
    with open_compressed(path) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        while (each := tar.next()) is not None:
            yield each
            tar.members.clear()  # type: ignore[attr-defined]  # else all are held


def _trick(entry: tarfile.TarInfo, stored: int) -> str:
    """Return why an entry of an archive of ``stored`` bytes is refused; empty if it is not."""
    path = PurePosixPath(entry.name)
    if path.is_absolute() or ".." in path.parts or "\\" in entry.name:
        return "its name leads out of the archive; refused"
    if entry.issparse() or not (entry.isreg() or entry.isdir()):
        return "is a link or a device, not a file; refused"
    if entry.size > min(MAX_BYTES, largest(stored)):
        return f"holds {entry.size:,} bytes; refused"
    return ""


def read_member(path: Path) -> bytes:
    """Read a file in an archive, still compressed if it is, by its path through the archive.

    Raises DataError if there is no such file, or it cannot be read.
    """
    found = archive_of(path)
    if found is None or not is_archive(found[0]):
        raise DataError(f"{path}: cannot be read (no such file); check the path")
    archive, name = found
    if archive.suffix == _DATABASE:
        chain, _, file = name.partition("/")
        return bytes(_database(archive, *state_of(archive)).read(chain, file))
    member = open_archive(archive).members.get(name)
    if member is None:
        raise DataError(f"{archive}: does not hold all of '{name}'")
    try:
        if member.offset is not None:
            with archive.open("rb") as stream:
                stream.seek(member.offset)
                data = stream.read(member.size)
        else:
            data = _stream(archive, *state_of(archive), os.getpid()).read(member.number)
    except (tarfile.TarError, *DAMAGED) as error:
        raise DataError(f"{path}: cannot be read ({error}); copy or download it again") from None
    if len(data) != member.size:
        raise DataError(f"{path}: is cut off; copy or download the archive again")
    return data


def _is_compressed(path: Path) -> bool:
    """Whether a tar is compressed: a plain one begins with a header, which names its kind."""
    with path.open("rb") as file:
        return file.read(_BLOCK)[257:262] != b"ustar"


@lru_cache(maxsize=4)
def _stream(path: Path, size: int, changed: int, process: int) -> "_Stream":  # noqa: ARG001
    # The arguments that are not used tell states of the file apart, and forks, which would share
    # its place.
    return _Stream(path)


class _Stream:
    """A compressed tar, read from beginning to end as often as necessary."""

    def __init__(self, path: Path) -> None:
        self._path, self._next = path, 0
        self._tar: Any = None
        self._last = b""
        self._lock = threading.Lock()

    def read(self, number: int) -> bytes:
        """Read an entry by its number; the last one is cached, and one thread reads at a time."""
        with self._lock:
            if self._tar is not None and number == self._next - 1:
                return self._last
            try:
                return self._advance(number)
            except Exception:
                self._tar = None  # what is at hand is not what was asked for
                raise

    def _advance(self, number: int) -> bytes:
        if self._tar is None or number < self._next:
            stream = open_compressed(self._path)  # open as long as this is
            self._tar = tarfile.open(fileobj=stream, mode="r|")  # noqa: SIM115
            self._next = 0
        entry = None
        while self._next <= number:
            entry = self._tar.next()
            self._tar.members.clear()
            self._next += 1
            if entry is None:
                raise tarfile.ReadError("it ends before this file")
        content = self._tar.extractfile(entry)
        self._last = b"" if content is None else bytes(content.read())
        return self._last


@lru_cache(maxsize=4)
def _database(path: Path, size: int, changed: int) -> Any:  # noqa: ARG001  of which state
    # A reader of one format, which itself reads compressed files.
    from bevatron.data.readers.proteins.openfold import AlignmentDatabase

    return AlignmentDatabase(path)
