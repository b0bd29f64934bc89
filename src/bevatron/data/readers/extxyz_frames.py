"""One frame of extended XYZ: its comment line and its columns."""

import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bevatron.data.readers.base import RawFrame
from bevatron.data.readers.elements import ATOMIC_NUMBERS, element_symbol
from bevatron.data.readers.label_values import numbers
from bevatron.errors import DataError
from bevatron.typing import BoolArray, FloatArray


class Columns(NamedTuple):
    """Columns according to ``Properties``: where each begins and how wide it is.

    ``others`` are the names of all but positions and elements.
    """

    names: dict[str, tuple[int, int, str]]
    width: int
    positions: int
    species: int | None
    numbers: int | None
    others: tuple[str, ...]


class Header(NamedTuple):
    """A comment line, parsed. ``columns`` is None for plain XYZ."""

    cell: FloatArray
    pbc: BoolArray
    columns: Columns | None
    info: dict[str, str]


_PAIR = re.compile(
    r"""\s*(?:"([^"]*)"|'([^']*)'|([^\s=]+))"""
    r"""(?:\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|\{([^}]*)\}"""
    r"""|(\[(?:[^\[\]]|\[[^\[\]]*\])*\])|(\S*)))?"""
)
_NO_CELL = np.zeros((3, 3))


def parse_comment(text: str) -> Header:
    """Parse ``key=value`` pairs; values may be quoted, in braces or in brackets.

    Bare words are left out: in plain XYZ they are free text. Raises DataError if Lattice, pbc or
    Properties cannot be understood.
    """
    info: dict[str, str] = {}
    for double, single, bare, a, b, c, d, e in _PAIR.findall(text):
        value = a or b or c or d or e
        if value:
            info[double or single or bare] = value.replace('\\"', '"') if "\\" in value else value
    lattice = info.pop("Lattice", None)
    properties = info.pop("Properties", None)
    periodic = info.pop("pbc", None)
    cell = _NO_CELL if lattice is None else _cell(lattice)
    if periodic is None:
        pbc = _PBC["F F F"] if lattice is None else _PBC["T T T"]
    else:
        pbc = _pbc(periodic)
    return Header(cell, pbc, None if properties is None else parse_properties(properties), info)


def _cell(text: str) -> FloatArray:
    try:
        values = numbers(text)
    except ValueError:
        raise DataError(f"Lattice is '{text[:60]}', not numbers") from None
    if values.size != 9:
        raise DataError(f"Lattice has {values.size} numbers; expected 9")
    return values.reshape(3, 3)


_PBC = {text: np.array([axis == "T" for axis in text.split()]) for text in ("T T T", "F F F")}
_TRUTH = {"t": True, "true": True, "1": True, "f": False, "false": False, "0": False}


@lru_cache(maxsize=64)
def _pbc(text: str) -> BoolArray:
    words = re.sub(r"[\[\](),]", " ", text).lower().split()
    axes = [_TRUTH.get(word) for word in words]
    if len(axes) not in {1, 3} or None in axes:
        raise DataError(f"pbc is '{text}'; expected something like 'T T F'")
    return np.broadcast_to(np.array(axes, dtype=bool), (3,))


@lru_cache(maxsize=256)
def parse_properties(text: str) -> Columns:
    """Parse ``species:S:1:pos:R:3:...``.

    Raises DataError if it is not a list of name, type and width, or lacks positions or elements.
    """
    parts = text.split(":")
    if len(parts) % 3 or not all(width.isdigit() for width in parts[2::3]):
        raise DataError(f"Properties is '{text[:80]}'; expected name:type:width and so on")
    names: dict[str, tuple[int, int, str]] = {}
    place = 0
    for name, kind, width in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        names[name] = (place, int(width), kind.upper())
        place += int(width)
    positions = names.get("pos") or names.get("positions")
    species = next((names[n][0] for n in ("species", "symbols", "element") if n in names), None)
    atomic = next((names[n][0] for n in ("Z", "numbers", "atomic_numbers") if n in names), None)
    if positions is None or positions[1] != 3:
        raise DataError(f"Properties is '{text[:80]}', which has no positions (pos:R:3)")
    if species is None and atomic is None:
        raise DataError(f"Properties is '{text[:80]}', which has no elements (species:S:1)")
    known = {positions[0], species, atomic}
    others = tuple(name for name, (first, _, _) in names.items() if first not in known)
    return Columns(names, place, positions[0], species, atomic, others)


_PLAIN = Columns({"species": (0, 1, "S"), "pos": (1, 3, "R")}, 4, 1, 0, None, ())


def parse_frame(text: bytes, wanted: frozenset[str]) -> RawFrame:
    """Parse one whole frame, from its count of atoms to its last line.

    Raises DataError if a line has too few or too many columns, or a word that is not what its
    column holds.
    """
    while (parts := text.split(b"\n", 2))[0].strip() == b"":
        text = text.split(b"\n", 1)[1]
    num_atoms = int(parts[0])
    header = parse_comment(parts[1].decode("utf-8", "replace"))
    body = parts[2] if len(parts) > 2 else b""
    words = body.decode("latin-1").split()
    columns = header.columns
    if columns is None:
        # Plain XYZ: four columns; further ones are ignored.
        width = max(len(body.split(b"\n", 1)[0].split()), 4)
        columns = _PLAIN._replace(width=width)
    all_numbers = not any(kind == "S" for _, _, kind in columns.names.values())
    if len(words) != num_atoms * columns.width or all_numbers:
        _check_rows(body, num_atoms, columns.width)
    arrays = {
        name: _array(body, words, columns, columns.names[name])
        for name in wanted
        if name in columns.names
    }
    return RawFrame(
        numbers=_atomic_numbers(words, columns),
        positions=_array(body, words, columns, (columns.positions, 3, "R")),
        cell=header.cell,
        pbc=header.pbc,
        info=header.info,
        arrays=arrays,
    )


def _check_rows(body: bytes, num_atoms: int, width: int) -> None:
    for atom, row in enumerate(body.split(b"\n")[:num_atoms]):
        if len(row.split()) != width:
            raise DataError(
                f"the line of atom {atom} has {len(row.split())} columns; expected {width}"
            )


def _array(
    body: bytes, words: list[str], columns: Columns, place: tuple[int, int, str]
) -> FloatArray:
    first, count, _ = place
    try:
        values = [list(map(float, words[first + i :: columns.width])) for i in range(count)]
    except ValueError:
        values = [
            [_number(atom, word, body, columns) for atom, word in enumerate(column)]
            for column in (words[first + i :: columns.width] for i in range(count))
        ]
    return np.ascontiguousarray(np.array(values).T)


def _number(atom: int, word: str, body: bytes, columns: Columns) -> float:
    try:
        return float(word.replace("D", "E").replace("d", "e"))
    except ValueError:
        # A short line pushes all words after it into other columns: name that line instead.
        _check_rows(body, atom + 1, columns.width)
        raise DataError(f"atom {atom}: '{word}' is not a number") from None


def _atomic_numbers(words: list[str], columns: Columns) -> npt.NDArray[np.int32]:
    place = columns.species if columns.species is not None else columns.numbers
    symbols = words[place :: columns.width]
    try:
        return np.array([ATOMIC_NUMBERS[symbol] for symbol in symbols], dtype=np.int32)
    except KeyError:
        return np.array(
            [_atomic_number(atom, symbol) for atom, symbol in enumerate(symbols)], dtype=np.int32
        )


def _atomic_number(atom: int, symbol: str) -> int:
    number = ATOMIC_NUMBERS.get(element_symbol(symbol))
    if number is None:
        raise DataError(f"atom {atom} is '{symbol}', which is not an element")
    return number
