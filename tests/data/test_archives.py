"""Files in archives are read as if they lay in a folder, and none leads out of it."""

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from bevatron.data import archives
from bevatron.data.compressed import read_whole
from bevatron.data.readers.base import content_hash
from bevatron.data.readers.proteins.folders import find_protein_files, is_protein_file
from bevatron.errors import DataError

FILES = {"b/2abc.cif": b"second", "a/1abc.cif.gz": gzip.compress(b"first"), "x.a3m": b">q\nA\n"}


def tarred(tricks=()):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in FILES.items():
            entry = tarfile.TarInfo(f"./{name}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        for name, kind in tricks:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            tar.addfile(entry)
    return out.getvalue()


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".tar", bytes), (".tar.gz", gzip.compress), (".tar.zst", zstd)]
)
def test_files_of_a_tar_are_read_in_any_order(tmp_path, suffix, compress):
    path = tmp_path / f"all{suffix}"
    path.write_bytes(compress(tarred()))
    found = find_protein_files([tmp_path])
    assert found.structures == (path / "b/2abc.cif", path / "a/1abc.cif.gz")
    assert found.alignments == (path / "x.a3m",)
    assert is_protein_file(path)
    for name, data in [*FILES.items(), *reversed(FILES.items())]:
        expected = gzip.decompress(data) if name.endswith("gz") else data
        assert read_whole(path / name) == expected
    plain = tmp_path / "plain.a3m"
    plain.write_bytes(FILES["x.a3m"])
    assert content_hash(path / "x.a3m") == content_hash(path / "x.a3m") != content_hash(plain)
    with pytest.raises(DataError, match=r"does not hold all of 'none\.cif'"):
        read_whole(path / "none.cif")


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstd)],
)
def test_compressed_files_of_a_tar_are_read(tmp_path, suffix, compress):
    packed = compress(b"data_1ABC\n")
    entry = tarfile.TarInfo(f"1abc.cif{suffix}")
    entry.size = len(packed)
    path = tmp_path / "all.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(entry, io.BytesIO(packed))
    assert read_whole(path / entry.name) == b"data_1ABC\n"


def test_threads_read_a_compressed_tar_one_at_a_time(tmp_path, monkeypatch):
    path = tmp_path / "all.tar.gz"
    path.write_bytes(gzip.compress(tarred()))
    inside, most = [], []
    advance = archives._Stream._advance

    def slowly(stream, number):
        inside.append(number)
        most.append(len(inside))
        time.sleep(0.02)
        inside.remove(number)
        return advance(stream, number)

    monkeypatch.setattr(archives._Stream, "_advance", slowly)
    stream = archives._Stream(path)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(stream.read, [2, 0, 1]))
    assert found == [FILES["x.a3m"], FILES["b/2abc.cif"], FILES["a/1abc.cif.gz"]]
    assert max(most) == 1


def test_a_file_that_cannot_be_read_is_not_taken_for_the_one_before_it(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("a.cif", "b.cif"):
            entry = tarfile.TarInfo(name)
            entry.size = 50_000
            tar.addfile(entry, io.BytesIO(random.Random(name).randbytes(entry.size)))
    path = tmp_path / "all.tar.gz"
    path.write_bytes(gzip.compress(out.getvalue())[:70_000])
    read_whole(path / "a.cif")
    for _ in range(2):
        with pytest.raises(DataError, match=r"all\.tar\.gz: does not hold all of .b\.cif"):
            read_whole(path / "b.cif")


def test_names_that_lead_out_and_links_are_refused(tmp_path):
    path = tmp_path / "all.tar"
    tricks = {"../up.cif": tarfile.REGTYPE, "/root.cif": tarfile.REGTYPE, "a/../../b.cif": b"0"}
    tricks |= {"soft.cif": tarfile.SYMTYPE, "hard.cif": tarfile.LNKTYPE, "dev.cif": tarfile.CHRTYPE}
    path.write_bytes(tarred(tricks.items()))
    found = find_protein_files([path])
    assert len(found.structures) == 2
    assert len(found.refused) == len(tricks)
    assert all(reason.endswith("; refused") for _, reason in found.refused)
    assert {name.split(".tar/", 1)[1].rpartition("/")[2] for name, _ in found.refused} == {
        name.rpartition("/")[2] for name in tricks
    }


@pytest.mark.parametrize(("suffix", "compress"), [(".tar", bytes), (".tar.gz", gzip.compress)])
def test_of_a_tar_that_is_cut_off_the_rest_is_read(tmp_path, suffix, compress):
    path = tmp_path / f"all{suffix}"
    whole = compress(tarred())
    path.write_bytes(whole[: 1300 if suffix == ".tar" else len(whole) // 2])
    found = find_protein_files([path])
    assert [name for name, _ in found.refused] == [str(path)]
    assert len(found.structures) < 2


def test_a_database_of_alignments_is_read_by_chain(tmp_path):
    (tmp_path / "all.db").write_bytes(b">q\nA\n>q\nC\n")
    index = {"1abc_A": {"db": "all.db", "files": [["x.a3m", 0, 5], ["y.a3m", 5, 5]]}}
    path = tmp_path / "alignment_db.index"
    path.write_text(json.dumps(index))
    found = find_protein_files([tmp_path])
    assert found.alignments == (path / "1abc_A/x.a3m", path / "1abc_A/y.a3m")
    assert found.others == 0
    assert read_whole(path / "1abc_A/y.a3m") == b">q\nC\n"
    path.write_text("{")
    assert [name for name, _ in find_protein_files([tmp_path]).refused] == [str(path)]


def test_a_compressed_tar_is_passed_over_once_however_often_a_file_is_read(tmp_path, monkeypatch):
    path = tmp_path / "all.tar.gz"
    path.write_bytes(gzip.compress(tarred()))
    files = find_protein_files([path])
    opened, open_ = [], archives.open_compressed

    def counted(path):
        opened.append(path)
        return open_(path)

    monkeypatch.setattr(archives, "open_compressed", counted)
    for each in (*files.structures, *files.alignments):
        assert content_hash(each)
        assert read_whole(each)
        assert read_whole(each)
    assert len(opened) == 1
