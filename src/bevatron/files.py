"""Files and folders that are either wholly there or not there at all.

Every file that must survive a kill or a power cut (shards, manifests, checkpoints, weights) goes
through here: written under a temporary name beside its place, fsynced, renamed, and the folder
fsynced. A reader therefore never meets a half-written file under its final name. What the
operating system refuses (full disk, read-only folder, missing folder) becomes one sentence.
"""

import csv
import errno
import glob
import io
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import xxhash

from bevatron.errors import BevatronError, CheckpointError

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

TEMPORARY = ".tmp"
"""Suffix of the name of an unfinished file or folder."""

SCRATCH = ".scratch"
"""End of the name of a folder that its maker removes: messages name no file in it."""

ASIDE = ".old"
"""Suffix of the name of a folder that is being replaced."""

MODEL_FILE = "model.json"
"""Describes a model, in its folder; known here so that the command line finds it without torch."""

crash_hooks: list[Callable[[str, Path], None]] = []
"""Called before every step as ``hook(step, path)``; tests kill the process or raise OSError here.

Steps: ``write`` (each write to disk), ``fsync``, ``rename``, ``fsync_folder``, ``remove``.
"""


def cache_folder() -> Path:
    """Return the user's folder for what can be made or downloaded again; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def is_kept(path: Path) -> bool:
    """Whether a file outlives the command, that is, lies in no folder whose name ends in `SCRATCH`.

    Examples
    --------
    >>> is_kept(Path("runs/water/split.csv")), is_kept(Path("runs/.water.scratch/split.csv"))
    (True, False)
    """
    return not any(part.endswith(SCRATCH) for part in path.parts)


def step(name: str, path: Path) -> None:
    """Announce a step that a crash may precede to `crash_hooks`."""
    for hook in crash_hooks:
        hook(name, path)


@contextmanager
def explained(path: Path, error: type[BevatronError] = BevatronError) -> Iterator[None]:
    """Turn an OSError met while writing ``path`` into one sentence.

    Raises BevatronError of class ``error``: full disk, no permission, read-only or missing folder
    and so on.

    Parameters
    ----------
    path : what is being written, as the user knows it
    error : the class to raise
    """
    try:
        yield
    except OSError as problem:
        raise error(_sentence(path, problem)) from problem


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold a lock of a folder among the processes of this machine; it ends with the process.

    Yields
    ------
    Whether it is held: on a file system without locks for folders nothing is locked.
    """
    if sys.platform == "win32":
        yield False
        return
    place, held = os.open(folder, os.O_RDONLY), False
    try:
        with suppress(OSError):
            fcntl.flock(place, fcntl.LOCK_EX)
            held = True
        yield held
    finally:
        os.close(place)


def _sentence(path: Path, problem: OSError) -> str:
    code = problem.errno
    if code in {errno.ENOSPC, errno.EDQUOT}:
        which = "the disk is full" if code == errno.ENOSPC else "your disk quota is used up"
        return f"{path}: cannot be written, {which}; free some space or choose another folder"
    if code in {errno.EACCES, errno.EPERM, errno.EROFS}:
        which = "the file system is read-only" if code == errno.EROFS else "permission denied"
        return f"{path}: cannot be written, {which}; choose a folder that you may write to"
    if code == errno.ENOENT:
        return f"{path}: cannot be written, its folder does not exist; make it first"
    if code in {errno.ENOTDIR, errno.EEXIST}:
        return f"{path}: cannot be written, a file is where a folder should be; choose another name"
    if code == errno.EFBIG:
        return f"{path}: cannot be written, the file is larger than the file system allows"
    return f"{path}: cannot be written ({problem.strerror or problem})"


def temporary_name(path: Path) -> Path:
    """Return a new name beside ``path`` for its unfinished version, shared with no process."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")


def check_writable(path: Path | None, error: type[BevatronError] = BevatronError) -> None:
    """Try whether a file can be written, before the work whose result it is to hold.

    Raises BevatronError of class ``error``, see `explained`; None is no file.
    """
    if path is None:
        return
    if path.is_dir():
        raise error(f"{path}: cannot be written, it is a folder; give the name of a file")
    temporary = temporary_name(path)
    with explained(path, error):
        temporary.touch()
        temporary.unlink()


def make_writable(folder: Path, error: type[BevatronError] = BevatronError) -> None:
    """Make a folder, and try whether a file can be written in it, before the work.

    Raises BevatronError of class ``error``, see `explained`.
    """
    with explained(folder, error):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(folder / "try")
        temporary.touch()
        temporary.unlink()


@contextmanager
def atomic_write(path: Path, error: type[BevatronError] = BevatronError) -> Iterator[IO[bytes]]:
    """Open a file for writing that appears under its name only when all of it is on disk.

    If the body raises, the temporary file is removed and an older file of that name stays as it
    was; a kill can leave a file named ``*.tmp``, never a partial ``path``. Raises BevatronError of
    class ``error``, see `explained`.

    Parameters
    ----------
    path
        Where the file is to be; its folder must exist. An older file is replaced.
    error : the class to raise when the operating system refuses

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "weights.bin"
    >>> with atomic_write(path) as file:
    ...     _ = file.write(b"abc")
    >>> path.read_bytes()
    b'abc'
    """
    temporary = temporary_name(path)
    with explained(path, error):
        try:
            with io.BufferedWriter(_AnnouncedFile(temporary)) as file:
                yield file
                file.flush()
                step("fsync", path)
                os.fsync(file.fileno())
            step("rename", path)
            temporary.replace(path)
        except BaseException as problem:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            # What the system refuses, torch.save turns into an error of its own archive.
            if isinstance(problem, RuntimeError) and isinstance(problem.__context__, OSError):
                raise problem.__context__ from None
            raise
        fsync_folder(path.parent)


class _AnnouncedFile(io.FileIO):
    """A new file, each write to which is announced to `crash_hooks`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(path, "xb")

    def write(self, data: "ReadableBuffer", /) -> int:
        step("write", self.path)
        return super().write(data)


def write_bytes_atomically(
    path: Path, data: bytes, error: type[BevatronError] = BevatronError
) -> None:
    """Write a whole file with `atomic_write`."""
    with atomic_write(path, error) as file:
        file.write(data)


def write_text_atomically(
    path: Path, text: str, error: type[BevatronError] = BevatronError
) -> None:
    """Write a whole UTF-8 file with `atomic_write`; what is no text is escaped as in JSON."""
    write_bytes_atomically(path, text.encode(errors="backslashreplace"), error)


def write_json_atomically(
    path: Path, values: Any, error: type[BevatronError] = BevatronError
) -> None:
    """Write plain values as indented JSON with `atomic_write`; NaN and infinity are refused."""
    text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
    write_text_atomically(path, text + "\n", error)


def write_csv_atomically(
    path: Path, rows: Iterable[Iterable[object]], error: type[BevatronError] = BevatronError
) -> None:
    """Write rows as CSV with `atomic_write`, quoted only where necessary."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text_atomically(path, text.getvalue(), error)


def write_all(file: io.FileIO, data: "ReadableBuffer") -> None:
    """Write to a file without a buffer, which may take less at a time.

    What a full disk refuses is then not tried once more when the file is closed.
    """
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def checksum(data: bytes) -> str:
    """Return the xxh3_64 of a file's bytes in hexadecimal, as stores, checkpoints and models have.

    Examples
    --------
    >>> checksum(b"abc")
    '78af5f94892f3950'
    """
    return xxhash.xxh3_64_hexdigest(data)


def fsync_file(path: Path) -> None:
    """Wait until the content of a file, written by somebody else, is on disk."""
    step("fsync", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk (a rename is not durable before that)."""
    step("fsync_folder", path)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    except OSError as problem:
        # Some network file systems cannot sync folders; they order renames on their own.
        if problem.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:
            raise
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Wait until all files below a folder and all their names are on disk."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in sorted(names):
            fsync_file(Path(root) / name)
        fsync_folder(Path(root))


@contextmanager
def atomic_folder(path: Path, error: type[BevatronError] = BevatronError) -> Iterator[Path]:
    """Yield a new folder to write, which replaces ``path`` once all of it is on disk.

    If the body raises, the new folder is removed and an older ``path`` stays as it was. After a
    kill call `recover_folder` before reading.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "best"
    >>> with atomic_folder(path) as folder:
    ...     _ = (folder / "a.txt").write_text("a")
    >>> [file.name for file in path.iterdir()]
    ['a.txt']
    """
    temporary = temporary_name(path)
    with explained(path, error):
        try:
            temporary.mkdir()
            yield temporary
            replace_folder(temporary, path)
        except BaseException as problem:
            # A failed rename may have left the old folder aside.
            recover_folder(path)
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(problem, BevatronError) and str(temporary) in str(problem):
                # Of a file in it: the user knows the folder by its own name.
                raise type(problem)(str(problem).replace(str(temporary), str(path))) from problem
            raise


def replace_folder(temporary: Path, final: Path) -> None:
    """Sync a finished folder and rename it; an older ``final`` steps aside and is then removed.

    A kill between the two renames leaves ``final`` missing and ``final.old`` complete;
    `recover_folder` puts it back.
    """
    fsync_tree(temporary)
    aside = final.with_name(final.name + ASIDE)
    if final.exists():
        if aside.exists():
            remove_folder(aside)
        step("rename", final)
        final.rename(aside)
    step("rename", final)
    temporary.rename(final)
    fsync_folder(final.parent)
    if aside.exists():
        remove_folder(aside)


def recover_folder(final: Path) -> None:
    """Finish what a kill in `replace_folder` left: put the old folder back or remove it."""
    aside = final.with_name(final.name + ASIDE)
    if not aside.exists():
        return
    if final.exists():
        remove_folder(aside)
    else:
        aside.rename(final)
        fsync_folder(final.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder; it loses its name first, so that a kill never leaves half of it readable."""
    step("remove", path)
    if path.name.endswith(TEMPORARY):
        shutil.rmtree(path)
        return
    doomed = temporary_name(path)
    path.rename(doomed)
    step("remove", doomed)
    shutil.rmtree(doomed)


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Remove unfinished files and folders that a kill left directly in ``folder``.

    Only names that `temporary_name` gives: a ``notes.tmp`` is the user's. ``name``: only those of
    the file or folder of this name.
    """
    for path in folder.glob(f"{glob.escape(name) or '*'}.{'[0-9a-f]' * 8}{TEMPORARY}"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def read_description(file: Path) -> dict[str, Any]:
    """Read a model.json, of which only ``kind`` is certain to be there.

    Raises CheckpointError if it cannot be read or holds something else.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file}: is damaged, it is not JSON; copy it again") from None
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        raise CheckpointError(
            f"{file}: is damaged or something else, it names no kind of model; copy it again"
        )
    return values
