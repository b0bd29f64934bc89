"""Compressed files are opened by their first bytes and read up to a limit."""

import bz2
import gzip
import lzma

import pyarrow as pa
import pytest

from bevatron.data.compressed import open_compressed, read_whole
from bevatron.errors import DataError

COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    "": bytes,
}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_is_opened_by_its_first_bytes_whatever_its_name(tmp_path, suffix):
    data = b">query\nACDE\n" * 5000
    for name in (f"a.a3m{suffix}", "b.a3m", "c.a3m.gz"):
        path = tmp_path / name
        path.write_bytes(COMPRESS[suffix](data))
        assert read_whole(path) == data
        with open_compressed(path) as stream:
            assert stream.read(6) == b">query"


def test_members_of_a_file_are_joined(tmp_path):
    path = tmp_path / "two.gz"
    path.write_bytes(gzip.compress(b"one ") + gzip.compress(b"two"))
    assert read_whole(path) == b"one two"


def test_an_empty_file_is_empty(tmp_path):
    (tmp_path / "e.gz").write_bytes(b"")
    assert read_whole(tmp_path / "e.gz") == b""


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path, suffix):
    path = tmp_path / f"bomb{suffix}"
    path.write_bytes(COMPRESS[suffix](bytes(50 << 20)))
    with pytest.raises(DataError, match=r"bomb.*more than 10,000 bytes when decompressed"):
        read_whole(path, max_bytes=10_000)
    assert len(read_whole(path, max_bytes=50 << 20)) == 50 << 20


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_file_that_is_cut_off_is_named(tmp_path, suffix):
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(COMPRESS[suffix](bytes(range(256)) * 1000)[:-12])
    with pytest.raises(DataError, match=r"cut.*cannot be read to the end"):
        read_whole(path)


def test_what_is_no_file_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "none.gz"):
        with pytest.raises(DataError, match=rf"{path}: cannot be read"):
            read_whole(path)
