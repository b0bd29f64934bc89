"""Several files of molecules as one reader."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from bevatron.data.compressed import format_suffix
from bevatron.data.readers.base import LINE_OF_ROW, place_of_row
from bevatron.data.readers.molecule_options import MoleculeOptions
from bevatron.data.readers.molecules.base import NO_BYTES, NO_POSITIONS, MoleculeFile
from bevatron.data.readers.molecules.ogb import OgbFolder, is_ogb_folder
from bevatron.data.readers.molecules.structures import NpzGeometry, SdfFile, SdfGeometry
from bevatron.data.readers.molecules.tables import TableFile
from bevatron.data.readers.paths import Paths, given_files, locate
from bevatron.errors import DataError
from bevatron.typing import Array, Arrays, IntArray

_TABLES = (*LINE_OF_ROW, ".parquet")
_SDF = (".sdf", ".sd")


class MoleculeReader:
    """Raw molecules of several files, one after another.

    Raises DataError if there are none or their targets differ.

    Parameters
    ----------
    files : files with the same targets
    """

    def __init__(self, files: Sequence[MoleculeFile]) -> None:
        if not files:
            raise DataError("no file of molecules was given")
        self.files = list(files)
        self.targets = self.files[0].targets
        for file in self.files:
            if file.targets != self.targets:
                raise DataError(
                    f"{file.name}: its targets are {_listed(file.targets)}, those of "
                    f"{self.files[0].name} are {_listed(self.targets)}; choose the same for all"
                )
        self._starts: IntArray = np.cumsum([0, *(file.num_rows for file in self.files)])

    @property
    def sources(self) -> list[str]:
        """Names of the files, as given."""
        return [file.name for file in self.files]

    @property
    def fingerprint(self) -> str:
        """Hash of what the files hold and of the names of the targets."""
        contents = "\n".join([*(file.content for file in self.files), *self.targets])
        return xxhash.xxh3_128_hexdigest(contents.encode())

    @property
    def num_samples(self) -> int:
        """Number of rows of all files."""
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> Iterator[Arrays]:
        """Yield the rows ``start`` to ``stop - 1``, in order, unusable ones too."""
        parts = self._parts
        for index in range(start, stop):
            file, row = locate(self._starts, index)
            yield {
                "smiles": NO_BYTES,
                "block": NO_BYTES,
                "binary": NO_BYTES,
                "positions": NO_POSITIONS,
                **self.files[file].raw(row),
                "split": np.array(parts[index], dtype=np.int8),
                "source": np.array([file, row], dtype=np.int64),
            }

    def describe(self, index: int) -> str:
        """Name a sample: ``train.csv, line 14``, ``train.sdf, row 12``; see `place_of_row`."""
        file, row = locate(self._starts, index)
        name = self.files[file].name
        return f"{name}, {place_of_row(name, row)}"

    def report(self) -> list[str]:
        """Lines that say what was found in each file."""
        return [line for file in self.files for line in file.report()]

    @cached_property
    def _parts(self) -> Array:
        """Index of each row's role as given in the files, see `bevatron.data.dataset.ROLES`."""
        found = [(file.num_rows, file.splits()) for file in self.files]
        return np.concatenate(
            [np.full(rows, -1, dtype=np.int8) if part is None else part for rows, part in found]
        )


def open_molecules(paths: Paths, options: MoleculeOptions | None = None) -> MoleculeReader:
    r"""Open files of molecules as one reader.

    Raises DataError if a file is missing, of an unknown kind, empty, or a column is missing or
    unclear.

    Parameters
    ----------
    paths
        Tables (.csv, .tsv, .smi, .parquet; the text ones also .gz), structures (.sdf), OGB's
        PCQM4Mv2 folder, and patterns such as ``data/*.csv``.
    options : which columns; detected by default

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name) / "two.csv"
    >>> _ = path.write_text("smiles,gap\nCCO,5.1\nc1ccccc1,\n")
    >>> reader = open_molecules(path)
    >>> reader.targets, [float(sample["targets"][0]) for sample in reader.read(0, 2)]
    (('gap',), [5.099999904632568, nan])
    >>> folder.cleanup()
    """
    options = options or MoleculeOptions()
    files = given_files(paths)
    if options.geometry is not None and len(files) > 1:
        raise DataError("geometry: belongs to one table, but several files were given")
    return MoleculeReader([_open(file, options) for file in files])


def is_molecule_file(path: Path) -> bool:
    """Whether a path looks like molecules: a table, an SDF or OGB's folder."""
    return is_ogb_folder(path) if path.is_dir() else format_suffix(path) in {*_TABLES, *_SDF}


def _open(path: Path, options: MoleculeOptions) -> MoleculeFile:
    if path.is_dir():
        if is_ogb_folder(path):
            return OgbFolder(path, options)
        raise DataError(f"{path}: a folder without raw/data.csv.gz; give a file of molecules")
    if format_suffix(path) in _SDF:
        return SdfFile(path, () if options.unlabelled else options.targets)
    if format_suffix(path) not in _TABLES:
        raise DataError(
            f"{path}: not a known kind of file; molecules are read from "
            f"{', '.join((*_TABLES, *_SDF))} and OGB's PCQM4Mv2 folder"
        )
    table = TableFile(path, options)
    if options.geometry is not None:
        place = options.geometry
        if place.suffix == ".npz":
            table.geometry = NpzGeometry(place, table.num_rows, table.identifiers())
        else:
            table.geometry = SdfGeometry(place, table.num_rows)
    return table


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
