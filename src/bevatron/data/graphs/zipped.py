"""Arrays of an npz file without unpickling, whole or a piece at a time."""

import mmap
import zipfile
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.lib import format as npy

from bevatron.errors import DataError
from bevatron.typing import Array


class NpzFile:
    """An npz file, opened once; DataError if it cannot be read or is not an npz file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except zipfile.BadZipFile:
            raise DataError(f"{path}: is not an npz file, or it is damaged") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
        self.names = [
            name.removesuffix(".npy") for name in self._zip.namelist() if name.endswith(".npy")
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and type of an array, without reading it."""
        with self._open(name) as stream:
            shape, _, dtype = self._header(stream, name)
        return shape, dtype

    def read(self, name: str) -> Array:
        """Read an array; one that is stored without compression is mapped, not copied.

        Raises DataError if there is none of that name, it holds objects, or the file is damaged.
        """
        mapped = self._mapped(name)
        if mapped is not None:
            return mapped
        with self._open(name) as stream:
            shape, fortran, dtype = self._header(stream, name)
        flat = np.empty(int(np.prod(shape, dtype=np.int64)), dtype=dtype)
        filled = 0
        for part in self._parts(name, 2**22, 0, len(flat)):
            flat[filled : filled + len(part)] = part
            filled += len(part)
        return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)

    def optional(self, name: str) -> Array | None:
        """Read an array, None if there is none of that name."""
        return self.read(name) if name in self else None

    def rows(
        self, name: str, size: int | None, start: int = 0, stop: int | None = None
    ) -> Iterator[Array]:
        """Read ``size`` rows of an array at a time, from row ``start`` to ``stop``; None = all.

        Columns of an array [2, m] are reached by `flat` instead.
        """
        if size is None:
            yield self.read(name)[start:stop]
            return
        mapped = self._mapped(name)
        if mapped is not None:
            end = len(mapped) if stop is None else min(stop, len(mapped))
            for begin in range(start, end, size):
                yield mapped[begin : min(begin + size, end)]
            return
        shape, _ = self.header(name)
        width = int(np.prod(shape[1:], dtype=np.int64))
        end = shape[0] if stop is None else min(stop, shape[0])
        for part in self.flat(name, size * width, start * width, end * width):
            yield part.reshape(-1, *shape[1:])

    def flat(
        self, name: str, size: int | None, start: int = 0, stop: int | None = None
    ) -> Iterator[Array]:
        """Read ``size`` numbers of an array in C order at a time, from index ``start`` on."""
        if size is None:
            yield self.read(name).reshape(-1)[start:stop]
            return
        mapped = self._mapped(name)
        if mapped is not None:
            flat = mapped.reshape(-1)
            end = len(flat) if stop is None else stop
            for begin in range(start, end, size):
                yield flat[begin : min(begin + size, end)]
            return
        with self._open(name) as stream:
            shape, fortran, _ = self._header(stream, name)
        if fortran and len(shape) > 1:
            raise DataError(
                f"{self.path}: '{name}' is stored by columns and compressed, which cannot be read "
                "in pieces; save it in C order"
            )
        total = int(np.prod(shape, dtype=np.int64))
        yield from self._parts(name, size, start, total if stop is None else min(stop, total))

    def _parts(self, name: str, size: int, start: int, stop: int) -> Iterator[Array]:
        """Decompress numbers ``start`` to ``stop`` in the order of the file."""
        with self._open(name) as stream:
            _, _, dtype = self._header(stream, name)
            stream.seek(stream.tell() + start * dtype.itemsize)
            for begin in range(start, stop, size):
                wanted = min(size, stop - begin) * dtype.itemsize
                data = self._exactly(stream, wanted, name)
                if len(data) < wanted:
                    raise DataError(f"{self.path}: the array '{name}' ends too early")
                yield np.frombuffer(data, dtype=dtype)

    def _open(self, name: str) -> BufferedIOBase:
        if name not in self:
            known = ", ".join(self.names)
            raise DataError(f"{self.path}: holds no array '{name}' (it holds {known})")
        try:
            return self._zip.open(f"{name}.npy")  # type: ignore[return-value]
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise DataError(f"{self.path}: the array '{name}' is damaged ({error})") from None

    def _header(
        self, stream: BufferedIOBase, name: str
    ) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        try:
            version = npy.read_magic(stream)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, fortran, dtype = read(stream)
        except (ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DataError(f"{self.path}: the array '{name}' is damaged ({error})") from None
        if dtype.hasobject:
            raise DataError(
                f"{self.path}: the array '{name}' holds Python objects, which would have to be "
                "unpickled and could run any code; save plain numbers"
            )
        return shape, fortran, dtype

    def _mapped(self, name: str) -> Array | None:
        """Map an uncompressed array."""
        if name not in self:
            return None
        info = self._zip.getinfo(f"{name}.npy")
        if info.compress_type != zipfile.ZIP_STORED:
            return None
        with self._open(name) as stream:
            shape, fortran, dtype = self._header(stream, name)
            header = stream.tell()
        with self.path.open("rb") as file:
            # The local header's extra field may differ from that of the directory.
            file.seek(info.header_offset + 26)
            name_length, extra = np.frombuffer(file.read(4), dtype="<u2").tolist()
            offset = info.header_offset + 30 + name_length + extra + header
            count = int(np.prod(shape, dtype=np.int64))
            if not count:
                return np.empty(shape, dtype=dtype)
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if offset + count * dtype.itemsize > len(view):
            raise DataError(f"{self.path}: the array '{name}' ends too early")
        flat = np.frombuffer(view, dtype=dtype, count=count, offset=offset)
        return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)

    def _exactly(self, stream: BufferedIOBase, count: int, name: str) -> bytes:
        """Read the given number of bytes, fewer only at the end."""
        found = bytearray()
        try:
            while len(found) < count and (data := stream.read(count - len(found))):
                found += data
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise DataError(f"{self.path}: the array '{name}' is damaged ({error})") from None
        return bytes(found)
