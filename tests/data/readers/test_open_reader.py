"""Many files are one reader with one order, one report and one fingerprint."""

import multiprocessing
import shutil
from dataclasses import replace

import pytest

from bevatron.data.readers import LabelOptions, open_reader
from bevatron.errors import DataError


def write(path, *energies):
    path.write_text(
        "".join(
            f"2\nProperties=species:S:1:pos:R:3 energy={e}\nH 0 0 0\nH 0 0 0.7\n" for e in energies
        )
    )
    return path


def energies(reader, start=0, stop=None):
    samples = reader.read(start, reader.num_samples if stop is None else stop)
    return [float(sample["energy"]) for sample in samples]


def test_files_follow_each_other_in_the_order_given(tmp_path):
    a, b, c = (
        write(tmp_path / f"{n}.xyz", *e) for n, e in (("a", [-1]), ("b", [-2, -3]), ("c", [-4]))
    )
    reader = open_reader([str(c), a, b])
    assert reader.sources == [str(c), str(a), str(b)]
    assert energies(reader) == [-4, -1, -2, -3]
    assert energies(reader, 1, 3) == [-1, -2]
    assert energies(reader, 2, 2) == []
    assert [s["source"].tolist() for s in reader.read(0, 4)] == [[0, 0], [1, 0], [2, 0], [2, 1]]
    assert reader.describe(3) == f"{b}, frame 1"
    assert len(reader.report()) == 3
    with pytest.raises(IndexError):
        list(reader.read(0, 5))


def test_folders_and_patterns_are_expanded_in_sorted_order(tmp_path):
    write(tmp_path / "b.xyz", -2)
    write(tmp_path / "a.extxyz", -1)
    (tmp_path / "notes.txt").write_text("no structures")
    assert energies(open_reader(tmp_path)) == [-1, -2]
    assert energies(open_reader(str(tmp_path / "*xyz"))) == [-1, -2]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["nowhere.xyz"], "nowhere.xyz: the file does not exist"),
        (["link.xyz"], "link.xyz: the file does not exist"),
        (["*.db"], "no file matches the pattern"),
        (["empty.xyz"], "empty.xyz: the file is empty"),
        (["blank.xyz"], "blank.xyz: holds no frames"),
        (["folder"], "folder: the folder holds no file of structures"),
        (["a.xyz", "./a.xyz"], "a.xyz: given twice"),
        ([], "no file of structures was given"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, monkeypatch, paths, message):
    write(tmp_path / "a.xyz", -1)
    (tmp_path / "empty.xyz").touch()
    (tmp_path / "blank.xyz").write_text("\n\n")
    (tmp_path / "link.xyz").symlink_to("nothing.xyz")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        open_reader(paths)


def test_the_error_names_the_file_that_lacks_energies(tmp_path):
    good, bad = write(tmp_path / "good.xyz", -1), tmp_path / "bad.xyz"
    bad.write_text("1\nE=-3 Properties=species:S:1:pos:R:3\nH 0 0 0\n")
    with pytest.raises(
        DataError, match=r"bad.xyz: no frame has an energy \(the names found are 'E'\)"
    ):
        open_reader([good, bad])


def test_the_fingerprint_follows_contents_and_options_and_not_folders(tmp_path):
    path = write(tmp_path / "a.xyz", -1, -2)
    before = open_reader(path).fingerprint
    assert open_reader(path).fingerprint == before
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "a.xyz"
    shutil.copy(path, copy)
    assert open_reader(copy).fingerprint == before
    assert open_reader(path, replace(LabelOptions(), group_key="kind")).fingerprint != before
    write(path, -1, -2.5)
    assert open_reader(path).fingerprint != before


def _energies_of(job):
    reader, start, stop = job
    return energies(reader, start, stop)


def test_processes_read_ranges_of_one_reader_at_once(tmp_path):
    path = write(tmp_path / "a.xyz", *range(-40, 0))
    reader = open_reader(path)
    assert len(energies(reader, 0, 5)) == 5
    jobs = [(reader, start, start + 8) for start in range(0, 40, 8)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pieces = pool.map(_energies_of, jobs)
    assert [e for piece in pieces for e in piece] == list(range(-40, 0))
