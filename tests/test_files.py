"""Atomic files and folders: what a reader finds after an error or a kill at any step."""

import errno
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from bevatron import files
from bevatron.errors import BevatronError, CheckpointError


def steps_of(hook, action):
    seen = []
    hook(lambda name, path: seen.append(name))
    action()
    return seen


def test_file_appears_whole_after_write_fsync_rename_and_folder_fsync(tmp_path, hook):
    path = tmp_path / "a.json"
    seen = steps_of(hook, lambda: files.write_json_atomically(path, {"a": 1}))
    assert seen == ["write", "fsync", "rename", "fsync_folder"]
    assert path.read_text() == '{\n "a": 1\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_the_very_file_that_was_synced_takes_the_place_of_the_old_one(tmp_path, hook):
    path = tmp_path / "a.bin"
    files.write_bytes_atomically(path, b"old")
    synced = []
    hook(lambda name, _: synced.extend(p.stat().st_ino for p in tmp_path.glob("*.tmp")))
    files.write_bytes_atomically(path, b"new")
    assert path.stat().st_ino == synced[-1]


def test_error_in_the_body_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.bin"
    files.write_bytes_atomically(path, b"old")

    def write():
        with files.atomic_write(path) as file:
            file.write(b"new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
    ],
)
@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_refusal_of_the_system_is_one_sentence_and_keeps_the_old_file(
    tmp_path, hook, code, words, where
):
    path = tmp_path / "a.bin"
    files.write_bytes_atomically(path, b"old")

    def refuse(name, _path):
        if name == where:
            raise OSError(code, os.strerror(code))

    hook(refuse)
    with pytest.raises(CheckpointError, match=words) as caught:
        files.write_bytes_atomically(path, b"new", CheckpointError)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


def test_missing_folder_is_one_sentence(tmp_path):
    with pytest.raises(BevatronError, match="its folder does not exist"):
        files.write_bytes_atomically(tmp_path / "no" / "a.bin", b"")


def test_folder_is_replaced_and_nothing_is_left_over(tmp_path):
    path = tmp_path / "best"
    for text in ("old", "new"):
        with files.atomic_folder(path) as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "a.txt").write_text(text)
    assert (path / "inner" / "a.txt").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize("place", range(3))
def test_full_disk_while_torch_writes_is_named(tmp_path, hook, place):
    path = tmp_path / "weights.pt"
    count = iter(range(100))

    def refuse(name, _path):
        if name == "write" and next(count) == place:
            raise OSError(errno.ENOSPC, "full")

    hook(refuse)

    def write():
        with files.atomic_write(path) as file:
            torch.save({"a": torch.zeros(10_000), "b": torch.zeros(10_000)}, file)

    with pytest.raises(BevatronError, match="disk is full"):
        write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", range(4))
def test_full_disk_while_replacing_a_folder_keeps_the_old_one(tmp_path, hook, place):
    path = tmp_path / "best"
    with files.atomic_folder(path) as folder:
        (folder / "a.txt").write_text("old")
    count = iter(range(100))

    def refuse(name, _path):
        if next(count) == place:
            raise OSError(errno.ENOSPC, "full")

    hook(refuse)

    def replace():
        with files.atomic_folder(path) as folder:
            (folder / "a.txt").write_text("new")

    with pytest.raises(BevatronError, match="disk is full"):
        replace()
    assert (path / "a.txt").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["best"]


def test_a_file_in_an_unfinished_folder_is_named_as_in_the_finished_one(tmp_path):
    path = tmp_path / "best"
    with (
        pytest.raises(CheckpointError, match=f"^{path}/none/a: cannot be written"),
        files.atomic_folder(path) as folder,
    ):
        files.write_text_atomically(folder / "none" / "a", "", CheckpointError)
    assert not list(tmp_path.iterdir())


def replace_and_die(path: Path, place: int, done) -> None:
    count = iter(range(1000))

    def die(name: str, _path: Path) -> None:
        if next(count) == place:
            os.kill(os.getpid(), signal.SIGKILL)

    files.crash_hooks.append(die)
    with files.atomic_folder(path) as folder:
        (folder / "a.txt").write_text("new")
        (folder / "b.txt").write_text("new")
    done.value = 1


def test_kill_at_every_step_of_a_folder_leaves_the_old_or_the_new_one(tmp_path):
    context = multiprocessing.get_context("fork")
    outcomes = []
    for place in range(50):
        path = tmp_path / f"best{place}"
        with files.atomic_folder(path) as folder:
            for name in ("a.txt", "b.txt"):
                (folder / name).write_text("old")
        done = context.Value("i", 0)
        process = context.Process(target=replace_and_die, args=(path, place, done))
        process.start()
        process.join(20)
        files.recover_folder(path)
        texts = {(path / name).read_text() for name in ("a.txt", "b.txt")}
        assert len(texts) == 1
        outcomes += texts
        files.remove_leftovers(tmp_path)
        assert {p.name for p in tmp_path.iterdir()} == {f"best{i}" for i in range(place + 1)}
        if done.value:
            break
    assert done.value == 1
    assert place >= 7
    assert outcomes == sorted(outcomes, reverse=True)
    assert {"old", "new"} == set(outcomes)


def test_a_file_is_tried_before_the_work_and_left_as_it_was(tmp_path):
    (tmp_path / "old.json").write_text("old")
    files.check_writable(tmp_path / "old.json")
    files.check_writable(tmp_path / "new.json")
    files.check_writable(None)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    with pytest.raises(BevatronError, match="it is a folder"):
        files.check_writable(tmp_path)
    with pytest.raises(BevatronError, match="its folder does not exist"):
        files.check_writable(tmp_path / "none" / "new.json")
    with pytest.raises(BevatronError, match="a file is where a folder should be"):
        files.check_writable(tmp_path / "old.json" / "new.json")
