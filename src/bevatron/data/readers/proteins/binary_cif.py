"""BinaryCIF (Sehnal et al. 2020) as a block of tables, like one of mmCIF text."""

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.data.readers.proteins.cif import gemmi
from bevatron.errors import DataError

_TYPES = {
    1: "<i1", 2: "<i2", 3: "<i4", 4: "<u1", 5: "<u2", 6: "<u4", 32: "<f4", 33: "<f8"
}  # fmt: skip
_ABSENT = {1: ".", 2: "?"}
_WRONG = (KeyError, IndexError, ValueError, TypeError, struct.error, AttributeError, OverflowError)

# Of MessagePack: first byte -> how the value's length or number is packed.
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_SIZED = {
    0xC4: (">B", "bytes"), 0xC5: (">H", "bytes"), 0xC6: (">I", "bytes"),
    0xD9: (">B", "text"), 0xDA: (">H", "text"), 0xDB: (">I", "text"),
    0xDC: (">H", "list"), 0xDD: (">I", "list"), 0xDE: (">H", "map"), 0xDF: (">I", "map"),
}  # fmt: skip
_DEEPEST = 32


def is_binary_cif(data: bytes) -> bool:
    """Whether bytes begin as BinaryCIF does: a map of MessagePack with data blocks."""
    return bool(data) and data[0] & 0xF0 == 0x80 and b"dataBlocks" in data[:4096]


def parse_binary_cif(data: bytes, name: str) -> "BinaryBlock":
    """Read the first data block; DataError if the file is damaged or cut off."""
    try:
        blocks = _MessagePack(data).value()["dataBlocks"]
        return BinaryBlock(blocks[0], name)
    except _WRONG as error:
        raise _damaged(name, error) from None


def _damaged(name: str, error: Exception) -> DataError:
    return DataError(
        f"{name}: is not valid BinaryCIF ({type(error).__name__}: {error}); the file is damaged or "
        "cut off, copy or download it again"
    )


class BinaryBlock:
    """A data block whose columns are decoded when they are asked for; as gemmi's, for `Table`.

    Parameters
    ----------
    block : data block of the file
    name : name of the file, for messages
    """

    def __init__(self, block: dict[str, Any], name: str) -> None:
        self.name = str(block["header"])
        self._file = name
        self._columns = {
            f"{category['name']}.{column['name']}".lower(): column
            for category in block["categories"]
            for column in category["columns"]
        }

    def find_values(self, tag: str) -> list[str]:
        """Return the values of a column as mmCIF text has them; none if it is absent."""
        column = self._columns.get(tag.lower())
        if column is None:
            return []
        try:
            return _texts(column)
        except _WRONG as error:
            raise _damaged(f"{self._file}, {tag}", error) from None


def _texts(column: dict[str, Any]) -> list[str]:
    values = decode(column["data"])
    if values.dtype.kind in "OU":
        quote = gemmi().cif.quote
        known: dict[str, str] = {}
        texts = [known.get(x) or known.setdefault(x, quote(x)) for x in values.tolist()]
    else:
        texts = [str(x) for x in values.tolist()]
    if column.get("mask"):
        mask = decode(column["mask"])
        for place in np.flatnonzero(mask).tolist():
            texts[place] = _ABSENT[int(mask[place])]
    return texts


def decode(column: dict[str, Any]) -> npt.NDArray[Any]:
    """Decode an array: its encodings in reverse."""
    values: Any = column["data"]
    for encoding in reversed(column["encoding"]):
        values = _DECODERS[encoding["kind"]](values, encoding)
    found: npt.NDArray[Any] = values
    return found


def _byte_array(values: bytes, encoding: dict[str, Any]) -> npt.NDArray[Any]:
    return np.frombuffer(values, dtype=_TYPES[encoding["type"]])


def _fixed_point(values: npt.NDArray[Any], encoding: dict[str, Any]) -> npt.NDArray[Any]:
    return _as_printed(values / encoding["factor"], encoding)


def _interval(values: npt.NDArray[Any], encoding: dict[str, Any]) -> npt.NDArray[Any]:
    low, high = encoding["min"], encoding["max"]
    step = (high - low) / (encoding["numSteps"] - 1)
    return _as_printed(low + values * step, encoding)


def _as_printed(values: npt.NDArray[Any], encoding: dict[str, Any]) -> npt.NDArray[Any]:
    """Round to the encoded type, whose shortest text is the number in the file."""
    return values.astype(_TYPES[encoding.get("srcType", 33)])


def _run_length(values: npt.NDArray[Any], encoding: dict[str, Any]) -> npt.NDArray[Any]:
    if int(values[1::2].sum()) != encoding["srcSize"]:
        raise ValueError("runs have another length than their column")
    return np.repeat(values[::2], values[1::2])


def _delta(values: npt.NDArray[Any], encoding: dict[str, Any]) -> npt.NDArray[Any]:
    return np.cumsum(values, dtype=np.int64) + int(encoding["origin"])


def _packed(values: npt.NDArray[Any], encoding: dict[str, Any]) -> npt.NDArray[Any]:
    """Join numbers that were split because they do not fit into one or two bytes."""
    bits = 8 * encoding["byteCount"]
    limits = [2**bits - 1] if encoding["isUnsigned"] else [2 ** (bits - 1) - 1, -(2 ** (bits - 1))]
    ends = np.flatnonzero(~np.isin(values, limits))
    sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    starts = np.concatenate([[0], ends[:-1] + 1])
    if len(ends) != encoding["srcSize"]:
        raise ValueError("packed numbers have another count than their column")
    found: npt.NDArray[Any] = sums[ends + 1] - sums[starts]
    return found


def _strings(values: bytes, encoding: dict[str, Any]) -> npt.NDArray[Any]:
    offsets = decode({"data": encoding["offsets"], "encoding": encoding["offsetEncoding"]}).tolist()
    text = encoding["stringData"]
    parts = [text[a:b] for a, b in pairwise(offsets)]
    places = decode({"data": values, "encoding": encoding["dataEncoding"]})
    table = np.array([*parts, ""], dtype=object)  # the last is -1, no value
    found: npt.NDArray[Any] = table[places]
    return found


_DECODERS: dict[str, Callable[[Any, dict[str, Any]], npt.NDArray[Any]]] = {
    "ByteArray": _byte_array,
    "FixedPoint": _fixed_point,
    "IntervalQuantization": _interval,
    "RunLength": _run_length,
    "Delta": _delta,
    "IntegerPacking": _packed,
    "StringArray": _strings,
}


class _MessagePack:
    """The part of MessagePack that BinaryCIF uses."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def value(self, depth: int = 0) -> Any:
        """Read the next value."""
        if depth > _DEEPEST:
            raise ValueError("is nested too deeply")
        first = self._take(1)[0]
        if first < 0x80 or first >= 0xE0:
            return first if first < 0x80 else first - 256
        if first < 0x90:
            return self._several("map", first & 0x0F, depth)
        if first < 0xA0:
            return self._several("list", first & 0x0F, depth)
        if first < 0xC0:
            return self._several("text", first & 0x1F, depth)
        if first in _NUMBERS:
            return self._number(_NUMBERS[first])
        if first in _SIZED:
            form, kind = _SIZED[first]
            return self._several(kind, int(self._number(form)), depth)
        return {0xC0: None, 0xC2: False, 0xC3: True}[first]

    def _take(self, size: int) -> bytes:
        part = self._data[self._place : self._place + size]
        if len(part) != size:
            raise ValueError("is cut off")
        self._place += size
        return part

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _several(self, kind: str, size: int, depth: int) -> Any:
        if kind == "bytes":
            return self._take(size)
        if kind == "text":
            return self._take(size).decode()
        if kind == "list":
            return [self.value(depth + 1) for _ in range(size)]
        return {self.value(depth + 1): self.value(depth + 1) for _ in range(size)}
