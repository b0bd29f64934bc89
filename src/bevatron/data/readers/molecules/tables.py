"""Tables of SMILES and targets: CSV, TSV and Parquet, and plain lists of SMILES."""

import codecs
import gzip
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from bevatron.data.compressed import format_suffix, read_whole
from bevatron.data.readers.base import place_of_row, state_and_hash
from bevatron.data.readers.molecule_options import MoleculeOptions
from bevatron.data.readers.molecules.base import Geometry, check_labels, text_bytes
from bevatron.errors import DataError
from bevatron.output import counted
from bevatron.typing import Array

SMILES_NAMES = ("smiles", "canonical_smiles", "isomeric_smiles", "cxsmiles", "smi", "mol")
"""Column names recognised as SMILES, in upper or lower case."""

_NO_TARGETS = {"", "id", "idx", "index", "cid", "name", "row", "split", "fold", "unnamed: 0"}
_NULL = ["", "na", "n/a", "nan", "null", "none", "<na>", "#n/a", "-"]
"""Entries that mean a missing label, in upper or lower case."""

_SPLITS = {"train": 0, "training": 0, "valid": 1, "val": 1, "validation": 1, "dev": 1, "test": 2}
_SPLITS[""] = -1


class TableFile:
    """A table with a column of SMILES.

    Raises DataError if the file cannot be read, a column is missing or unclear, or a target is not
    a number; the message names it.

    Parameters
    ----------
    path : .csv, .tsv, .txt, .smi (also .gz) or .parquet
    geometry : its 3D structures, if any
    """

    def __init__(
        self, path: Path, options: MoleculeOptions, geometry: Geometry | None = None
    ) -> None:
        self.path, self.name, self.geometry = path, str(path), geometry
        self.state, self._hash = state_and_hash(path)
        if not self.state.size:
            raise DataError(f"{path}: the file is empty")
        names = _column_names(path)
        self.column = _smiles_column(path, names, options.smiles)
        self.split = _split_column(path, names, options.split)
        self.identifier = "idx" if "idx" in names else None
        if options.unlabelled:
            self.targets: tuple[str, ...] = ()
        elif options.targets:
            self.targets = options.targets
            for target in options.targets:
                if target not in names:
                    raise DataError(f"{path}: has no column '{target}', only {', '.join(names)}")
        else:
            self.targets = self._find_targets(names)
        _ = self._columns  # raises its errors now
        if format_suffix(path) not in {".parquet", ".smi"}:
            self._check_last_cell(names)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_columns"}

    @property
    def content(self) -> str:
        """Hash of the file and of its structures."""
        return self._hash if self.geometry is None else f"{self._hash} {self.geometry.content}"

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self._columns["smiles"])

    def raw(self, row: int) -> dict[str, Array]:
        """Return a row's SMILES, targets and structure."""
        text = self._columns["smiles"][row].as_py() or ""
        sample: dict[str, Array] = {"smiles": text_bytes(text)}
        if self.targets:
            sample["targets"] = self._columns["targets"][row]
        if self.geometry is not None:
            sample.update(self.geometry.of(row))
        return sample

    def identifiers(self) -> Array | None:
        """Return the column ``idx`` if it holds integers."""
        if self.identifier is None:
            return None
        try:
            found = self._read([self.identifier])[self.identifier].cast(pa.int64())
        except pa.ArrowInvalid:
            return None
        return np.asarray(found.to_numpy())

    def splits(self) -> Array | None:
        """Return the number in `ROLES` of each row; None without a split column.

        Raises DataError if a row names anything but train, valid or test.
        """
        if self.split is None:
            return None
        entries = [
            str(word or "").strip() for word in self._read([self.split])[self.split].to_pylist()
        ]
        for row, entry in enumerate(entries):
            if entry.lower() not in _SPLITS:
                where = f"{self.path}, {place_of_row(self.path, row)}"
                raise DataError(
                    f"{where}: '{self.split}' is '{entry}', expected train, valid or test"
                )
        return np.array([_SPLITS[entry.lower()] for entry in entries], dtype=np.int8)

    def everything(self) -> Any:
        """Return all columns as an Arrow table; those of a text file as text.

        A column that is not in UTF-8 is read as Latin-1: names and remarks do no harm.
        """
        self.state.refuse_change()
        if format_suffix(self.path) in {".parquet", ".smi"}:
            return self._read(_column_names(self.path))
        table = _read_table(self.path, _column_names(self.path), pa.binary())
        return pa.table({name: _as_text(table[name]) for name in table.column_names})

    def report(self) -> list[str]:
        """Report the columns used and the number of missing labels."""
        lines = [f"{self.name}: {counted(self.num_rows, 'row')}, SMILES in '{self.column}'"]
        for number, target in enumerate(self.targets):
            missing = int(np.isnan(self._columns["targets"][:, number]).sum())
            lines.append(f"{self.name}: target '{target}', rows without it: {missing:,}")
        return lines

    @cached_property
    def _columns(self) -> dict[str, Any]:
        self.state.refuse_change()
        table = self._read([self.column, *self.targets])
        columns: dict[str, Any] = {"smiles": table[self.column].cast(pa.large_string())}
        columns["smiles"] = columns["smiles"].combine_chunks()
        if isinstance(columns["smiles"], pa.ChunkedArray):
            columns["smiles"] = columns["smiles"].chunk(0)
        if not table.num_rows:
            raise DataError(f"{self.path}: holds no rows")
        if self.targets:
            values = [self._numbers(table[name], name) for name in self.targets]
            columns["targets"] = np.stack(values, axis=1).astype(np.float32)
        return columns

    def _check_last_cell(self, names: Sequence[str]) -> None:
        """Refuse a quote that is never closed: the last cell would hide the rows after it."""
        cell = _read_table(self.path, [names[-1]], pa.binary())[names[-1]][-1].as_py()
        rows = [line for line in cell.split(b"\n")[1:] if line.strip()]
        mark = _parsing(self.path).delimiter.encode()
        alike = rows and all(line.count(mark) == len(names) - 1 for line in rows)
        if alike and not read_whole(self.path).rstrip().endswith(b'"'):
            where = f"{self.path}, {place_of_row(self.path, self.num_rows - 1)}"
            raise DataError(f"{where}: a quote is opened and never closed; remove it, or close it")

    def _numbers(self, column: Any, name: str) -> Array:
        """One target as floats; NaN where there is no label."""
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            trimmed = pa.compute.utf8_trim_whitespace(column)
            lowered = pa.compute.utf8_lower(trimmed)
            absent = pa.compute.is_in(lowered, value_set=pa.array(_NULL, trimmed.type))
            trimmed = pa.compute.if_else(absent, pa.scalar(None, trimmed.type), trimmed)
            try:
                column = trimmed.cast(pa.float64())
            except pa.ArrowInvalid:
                raise DataError(_first_unreadable(self.path, name, trimmed)) from None
        try:
            values = column.cast(pa.float64(), safe=False).to_numpy()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise DataError(f"{self.path}: the column '{name}' holds no numbers") from None
        values = np.array(values, dtype=np.float64)
        check_labels(values, name, lambda row: f"{self.path}, {place_of_row(self.path, row)}")
        return values

    def _find_targets(self, names: Sequence[str]) -> tuple[str, ...]:
        others = [
            name
            for name in names
            if name not in {self.column, self.split} and not _is_no_target(name)
        ]
        table: Any = self._read(others) if others else {}
        if others and not table.num_rows:
            raise DataError(f"{self.path}: holds no rows")
        numeric = []
        for name in others:
            try:
                values = self._numbers(table[name], name)
            except DataError as error:
                if _mostly_numbers(table[name]):
                    # Skipping it silently would train on another column.
                    raise DataError(f"{error}; correct it, or set columns.targets") from None
                continue
            if not np.isnan(values).all():
                numeric.append(name)
        if len(numeric) == 1:
            return (numeric[0],)
        if not numeric:
            raise DataError(
                f"{self.path}: has no column of numbers to predict (columns: {', '.join(names)}; "
                "classes are numbers too, from 0); set columns.targets"
            )
        raise DataError(
            f"{self.path}: several columns could be targets ({', '.join(numeric)}); choose "
            "with columns.targets"
        )

    def _read(self, columns: Sequence[str]) -> Any:
        return _read_table(self.path, list(dict.fromkeys(columns)))


def _is_no_target(name: str) -> bool:
    """Whether the name of a column says that it numbers rows: id, mol_id, Compound ID."""
    plain = name.strip().lower()
    return plain in _NO_TARGETS or plain.endswith(("_id", " id"))


def _first_unreadable(path: Path, name: str, column: Any) -> str:
    for row, text in enumerate(column.to_pylist()):
        try:
            float(text or "nan")
        except ValueError:
            where = f"{path}, {place_of_row(path, row)}"
            return f"{where}: '{name}' is '{text}', expected a number (0, 1 for classes)"
    return f"{path}: the column '{name}' holds no numbers"


def _mostly_numbers(column: Any) -> bool:
    """Whether most entries of a column are finite numbers."""
    balance = 0
    for entry in column.to_pylist():
        text = str(entry if entry is not None else "").strip()
        if text.lower() in _NULL:
            continue
        try:
            balance += 1 if np.isfinite(float(text)) else -1
        except ValueError:
            balance -= 1
    return balance > 0


def _smiles_column(path: Path, names: Sequence[str], wanted: str | None) -> str:
    if wanted is not None:
        if wanted not in names:
            raise DataError(f"{path}: has no column '{wanted}', only {', '.join(names)}")
        return wanted
    lowered = {name.strip().lower(): name for name in reversed(names)}
    for known in SMILES_NAMES:
        if known in lowered:
            return lowered[known]
    if len(names) == 1 and (otherwise := _other_separator(names[0])):
        raise DataError(f"{path}: {otherwise}")
    raise DataError(
        f"{path}: no column is called 'smiles' (columns: {', '.join(names)}); set "
        "columns.smiles to the one with the SMILES"
    )


def _other_separator(header: str) -> str:
    """Describe the separator of a table whose columns are not separated as expected."""
    for mark, separator in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if mark in header:
            advice = "write it with commas (.csv) or tabs (.tsv)"
            return f"its columns seem to be separated by {separator}; {advice}"
    return ""


def _split_column(path: Path, names: Sequence[str], wanted: str | None) -> str | None:
    if wanted is None:
        return next((name for name in names if name.strip().lower() == "split"), None)
    if wanted not in names:
        raise DataError(f"{path}: has no column '{wanted}', only {', '.join(names)}")
    return wanted


def _column_names(path: Path) -> list[str]:
    suffix = format_suffix(path)
    try:
        if suffix == ".parquet":
            return list(pa.parquet.read_schema(path).names)
        if suffix == ".smi":
            return ["smiles"]
        with pa.csv.open_csv(path, parse_options=_parsing(path)) as reader:
            names = list(reader.schema.names)
    except UnicodeEncodeError:
        raise DataError(f"{path}: the name of the file is not UTF-8; rename it") from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: {_why_unreadable(path, error)}") from None
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise DataError(f"{path}: two columns are called '{double[0]}'")
    return names


def _as_text(column: Any) -> Any:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([entry.decode("latin-1") for entry in column.to_pylist()], pa.string())


def _read_table(path: Path, columns: list[str], text: Any = pa.string()) -> Any:  # noqa: B008
    suffix = format_suffix(path)
    try:
        if suffix == ".parquet":
            return pa.parquet.read_table(path, columns=columns)
        if suffix == ".smi":
            return pa.table({"smiles": _list_of_smiles(path)})
        # All columns as text, so that errors can name the row of a value that is not a number.
        convert = pa.csv.ConvertOptions(
            include_columns=columns,
            column_types=dict.fromkeys(columns, text),
            strings_can_be_null=False,
        )
        return pa.csv.read_csv(path, parse_options=_parsing(path), convert_options=convert)
    except (OSError, EOFError, UnicodeError, pa.ArrowException) as error:
        raise DataError(f"{path}: {_why_unreadable(path, error)}") from None


def _in_order(path: Path, error: Exception) -> Exception:
    """Return the error of a table read in one thread, which names the line, or else the given."""
    try:
        options = pa.csv.ReadOptions(use_threads=False)
        pa.csv.read_csv(path, options, parse_options=_parsing(path))
    except (OSError, EOFError, UnicodeError, pa.ArrowException) as found:
        return found
    return error


def _parsing(path: Path) -> Any:
    delimiter = "\t" if format_suffix(path) in {".tsv", ".tab"} else ","
    # Otherwise a table above 1 MB must not have a cell of several lines.
    return pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)


def _list_of_smiles(path: Path) -> list[str]:
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else Path.open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        return [(line.split() or [""])[0] for line in file]


def _why_unreadable(path: Path, error: Exception) -> str:
    """Explain why a table cannot be read, from its first line if possible."""
    error = _in_order(path, error) if isinstance(error, pa.ArrowInvalid) else error
    reason = (str(error).splitlines() or [type(error).__name__])[0].replace("Row #", "line ")
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else Path.open
    try:
        with opener(path, "rb") as file:
            header = file.readline(4096)
    except (OSError, EOFError):
        return f"cannot be read as a table ({reason})"
    if header.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "is written in UTF-16; save it in UTF-8"
    if "straddl" in reason:
        return "holds a cell above 1 MB; is a quote opened and never closed?"
    if isinstance(error, UnicodeError) or "utf8" in reason.lower():
        return "is not UTF-8; save it in UTF-8"
    otherwise = "" if b"," in header else _other_separator(header.decode(errors="replace"))
    return otherwise or f"cannot be read as a table ({reason})"
