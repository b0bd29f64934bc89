"""Compressed files, recognised by their first bytes: gzip, bzip2, xz and Zstandard."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import Any, cast

from bevatron.errors import DataError

DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""Exceptions from a stream of `open_compressed` if the file is truncated or damaged."""

MAX_BYTES = 4 << 30
"""Maximum number of bytes that `read_whole` lets a compressed file expand to."""

MAX_RATIO = 200
"""Maximum expansion of a compressed file; text expands by 3 to 50."""

_UNSUSPECTED = 64 << 20  # bytes, whatever their ratio: nearly all files of structures are smaller

_BLOCK = 1 << 20
_SUFFIXES = {".gz", ".bz2", ".xz", ".zst"}


def _open_zstd(source: Path | BytesIO) -> Any:
    import pyarrow as pa

    if isinstance(source, Path):
        return pa.CompressedInputStream(pa.OSFile(str(source)), "zstd")
    return pa.CompressedInputStream(pa.BufferReader(source.getbuffer()), "zstd")


_OPENERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": _open_zstd,
}


def open_compressed(path: Path) -> BufferedIOBase:
    """Open a file for reading as if it were not compressed; also one in an archive.

    See `bevatron.data.archives`. A Zstandard stream cannot seek. Raises OSError if the file cannot
    be opened; DataError if there is no such file, also in an archive.
    """
    return _opened(_source(path))


def _source(path: Path) -> Path | BytesIO:
    """Return the bytes of a file, which may be in an archive."""
    if path.exists():
        return path
    # An archive may itself be compressed, so its reader imports this one.
    from bevatron.data.archives import read_member

    return BytesIO(read_member(path))


def _opened(source: Path | BytesIO) -> BufferedIOBase:
    if isinstance(source, Path):
        with source.open("rb") as file:
            start = file.read(6)
    else:
        start = source.getvalue()[:6]
    for magic, opener in _OPENERS.items():
        if start.startswith(magic):
            return cast("BufferedIOBase", opener(source))
    return source.open("rb") if isinstance(source, Path) else source


def format_suffix(path: Path) -> str:
    """Return the suffix of a name in lower case, without that of a compression.

    Examples
    --------
    >>> format_suffix(Path("hits.A3M.gz"))
    '.a3m'
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_whole(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a file that may be compressed.

    Raises DataError if it cannot be read, is damaged, or holds more than ``max_bytes``.

    Parameters
    ----------
    max_bytes
        How many bytes it may hold. What is compressed more than `MAX_RATIO` times is refused
        earlier, so that a few kilobytes of zeros cannot fill the memory.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.gz"
    >>> _ = path.write_bytes(gzip.compress(b"ACDE"))
    >>> read_whole(path)
    b'ACDE'
    """
    return b"".join(read_blocks(path, max_bytes))


def largest(stored: int) -> int:
    """Return the maximum number of bytes that `stored` compressed bytes may expand to."""
    return max(MAX_RATIO * stored, _UNSUSPECTED)


def read_blocks(path: str | Path, max_bytes: int = MAX_BYTES) -> Iterator[bytes]:
    """Read a file as `read_whole` does, block by block."""
    path = Path(path)
    try:
        source = _source(path)
        stored = source.stat().st_size if isinstance(source, Path) else len(source.getbuffer())
        stream = _opened(source)
        max_bytes = min(max_bytes, largest(stored))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({reason}); check the path") from None
    size = 0
    with stream:
        try:
            while block := stream.read(_BLOCK):
                size += len(block)
                if size > max_bytes:
                    raise DataError(
                        f"{path}: holds more than {max_bytes:,} bytes when decompressed, which is "
                        "refused; decompress or split it yourself if it is what it should be"
                    )
                yield block
        except DAMAGED as error:
            raise DataError(
                f"{path}: cannot be read to the end ({error}); copy or download it again"
            ) from None
