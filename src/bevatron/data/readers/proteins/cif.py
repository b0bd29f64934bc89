"""mmCIF text as tables whose columns are arrays."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bevatron.errors import DataError, require
from bevatron.typing import FloatArray

_NOTHING = {"?", "."}
_QUOTES = {"'", '"', ";"}
_T = TypeVar("_T")


def gemmi() -> Any:
    """Import gemmi, which parses CIF and PDB."""
    return require("gemmi", "proteins")


def parse_cif(data: bytes, name: str) -> list[Any]:
    """Parse mmCIF text into gemmi's data blocks.

    Raises DataError if it is not CIF, is cut off within a value or row, or names a tag twice.
    """
    try:
        return list(gemmi().cif.read_string(data))
    except (ValueError, RuntimeError) as error:
        # "data:LINE:COLUMN(BYTE): what is wrong"; text after the first sentence repeats it.
        place, _, reason = str(error).partition(": ")
        numbers = place.split(" ")[0].split(":")
        line = f", line {numbers[1]}" if len(numbers) > 1 else ""
        reason = reason if line else str(error)
        raise DataError(
            f"{name}{line}: is not valid mmCIF ({reason}); the file is damaged or cut off, copy or "
            "download it again"
        ) from None


class Table:
    """One category of a data block; a category that is absent has no rows.

    Parameters
    ----------
    block : gemmi's block
    category : ``_atom_site``
    """

    def __init__(self, block: Any, category: str, name: str) -> None:
        self._block, self._category, self._name = block, category, name
        self._rows = 0

    def __contains__(self, tag: str) -> bool:
        return self.count(tag) > 0

    def count(self, tag: str) -> int:
        """Return the number of values of a column; 0 if there is none."""
        return len(self._block.find_values(f"{self._category}.{tag}"))

    def texts(self, tag: str, length: int | None = None) -> list[str]:
        """Read a column as text: without quotes, empty where the value is unknown or absent.

        Parameters
        ----------
        tag : its name in the category
        length : number of empty values to return if there is no such column
        """
        column = self._column(tag, length)
        if not column and length:
            return [""] * length
        return [*map(_Memory(_unquoted).__getitem__, column)]

    def text(self, tag: str) -> str:
        """Read the first value of a column; empty if there is none."""
        values = self._column(tag)[:1]
        return _unquoted(values[0]) if values else ""

    def floats(self, tag: str, length: int, default: float = np.nan) -> FloatArray:
        """Read a column of numbers; ``default`` where a value is unknown or absent."""
        return self._numbers(tag, np.full(length, default), _number)

    def integers(self, tag: str, length: int, default: int) -> npt.NDArray[np.int32]:
        """Read a column of whole numbers of 32 bits; ``default`` where unknown or absent."""
        return self._numbers(tag, np.full(length, default, dtype=np.int32), _whole)

    def _numbers(
        self, tag: str, values: npt.NDArray[Any], convert: Callable[[str], float]
    ) -> npt.NDArray[Any]:
        column = self._column(tag, len(values))
        if not column:
            return values
        if _NOTHING.isdisjoint(column):
            try:
                found = np.array(column, dtype=np.float64 if convert is _number else np.int64)
                if convert is _number or (np.abs(found) < 2**31).all():
                    return found.astype(values.dtype)
            except (ValueError, OverflowError):
                pass
        memory = _Memory(convert)
        for row, text in enumerate(column):
            if text in _NOTHING:
                continue
            try:
                values[row] = memory[text]
            except (ValueError, OverflowError):
                expected = "a number" if convert is _number else "a whole number of 32 bits"
                raise DataError(
                    f"{self._name}: {self._category}.{tag} of row {row + 1} is '{text[:40]}', "
                    f"expected {expected}"
                ) from None
        return values

    def _column(self, tag: str, length: int | None = None) -> list[str]:
        try:
            column = list(self._block.find_values(f"{self._category}.{tag}"))
        except UnicodeDecodeError:
            raise DataError(
                f"{self._name}: {self._category}.{tag} holds bytes that are not UTF-8; save the "
                "file as UTF-8"
            ) from None
        self._rows = self._rows or len(column)
        expected = self._rows if length is None else length
        if column and len(column) != expected:
            raise DataError(
                f"{self._name}: {self._category}.{tag} has {len(column)} values, other columns of "
                f"the category {expected}; the file is damaged"
            )
        return column


def _unquoted(value: str) -> str:
    # gemmi does not take a quote alone, which PDB files may have as a letter.
    if len(value) == 1 or value[:1] not in _QUOTES:
        return "" if value in _NOTHING else value
    text: str = gemmi().cif.as_string(value)
    return text


def _number(text: str) -> float:
    """Parse a number, which may end in its standard uncertainty: ``1.54(2)``."""
    return float(text.partition("(")[0] if text.endswith(")") else text)


def _whole(text: str) -> int:
    number = int(text)
    if abs(number) >= 2**31:  # numpy 1 takes any
        raise OverflowError
    return number


class _Memory(dict[str, _T]):
    """Values of a function, each computed once; columns repeat the same few texts."""

    def __init__(self, function: Callable[[str], _T]) -> None:
        self._function = function

    def __missing__(self, text: str) -> _T:
        value = self[text] = self._function(text)
        return value
