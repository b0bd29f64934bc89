"""Readers: files of structures as raw samples."""

from pathlib import Path

from bevatron.data.compressed import format_suffix
from bevatron.data.readers.base import FileReader, Reader
from bevatron.data.readers.labels import LabelOptions, watched_names
from bevatron.data.readers.paths import Paths, given_files
from bevatron.data.readers.structures import StructureReader
from bevatron.errors import DataError

__all__ = ["LabelOptions", "Reader", "StructureReader", "open_reader"]

_IN_FOLDERS = (".extxyz", ".xyz", ".traj", ".db", ".aselmdb")


def open_reader(paths: Paths, options: LabelOptions | None = None) -> StructureReader:
    r"""Open files of structures as one reader.

    Raises DataError if a file is missing, unreadable, given twice or holds what must not be trained
    on; TrustError if a file is a pickle and ``options.trust`` is not set.

    Parameters
    ----------
    paths
        Files, folders (their .extxyz, .xyz, .traj, .db and .aselmdb files, sorted) and patterns
        such as ``data/*.extxyz.gz``. Extended XYZ may be compressed (.gz, .bz2, .xz).
    options : how labels are found; by themselves if left out

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name) / "two.xyz"
    >>> frame = "2\nenergy={} Properties=species:S:1:pos:R:3\nH 0 0 0\nH 0 0 {}\n"
    >>> _ = path.write_text(frame.format(-31.7, 0.74) + frame.format(-31.6, 0.8))
    >>> reader = open_reader(path)
    >>> [float(sample["energy"]) for sample in reader.read(0, reader.num_samples)]
    [-31.7, -31.6]
    >>> folder.cleanup()
    """
    options = options or LabelOptions()
    files = given_files(paths, _IN_FOLDERS)
    if not files:
        raise DataError("no file of structures was given")
    return StructureReader([_open_file(file, options) for file in files], options)


def _open_file(path: Path, options: LabelOptions) -> FileReader:
    from bevatron.data.readers.ase_files import AseFile, is_pickle
    from bevatron.data.readers.databases import DATABASE_SUFFIXES, DatabaseFile
    from bevatron.data.readers.extxyz import ExtxyzFile

    watched = watched_names(options)
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty")
        if is_pickle(path):
            return AseFile(path, watched, options.trust)
        if format_suffix(path) in {".xyz", ".extxyz"}:
            return ExtxyzFile(path, watched)
        if path.suffix in DATABASE_SUFFIXES:
            return DatabaseFile(path, watched)
        return AseFile(path, watched, options.trust)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
