"""Stores on a node's own disk."""

import os
from pathlib import Path

import pytest

from bevatron import files
from bevatron.data.store.stage import stage
from bevatron.data.store.store import MANIFEST
from bevatron.errors import StoreError


@pytest.fixture
def store(tmp_path) -> Path:
    """Something with the outside of a store."""
    folder = tmp_path / "water"
    folder.mkdir()
    (folder / MANIFEST).write_text("{}")
    (folder / "shard-0.arrow").write_bytes(b"abc" * 1000)
    return folder


def test_a_copy_is_made_once_and_is_complete(store, tmp_path):
    local = tmp_path / "local" / "disk"
    copy = stage(store, local)
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == {
        p.name: p.read_bytes() for p in store.iterdir()
    }
    (copy / "mark").touch()
    assert stage(store, local) == copy
    assert (copy / "mark").exists()


def test_a_store_that_was_prepared_anew_is_copied_anew(store, tmp_path):
    first = stage(store, tmp_path / "local")
    (store / MANIFEST).write_text('{"fingerprint": "other"}')
    second = stage(store, tmp_path / "local")
    assert first != second
    assert (second / MANIFEST).read_text() == (store / MANIFEST).read_text()


def test_a_kill_leaves_no_copy_under_its_name(store, tmp_path):
    child = os.fork()
    if child == 0:
        files.crash_hooks.append(lambda name, path: os._exit(9) if name == "rename" else None)
        stage(store, tmp_path / "local")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    names = [p.name for p in (tmp_path / "local").iterdir() if p.is_dir()]
    assert len(names) == 1
    assert all(name.endswith(files.TEMPORARY) for name in names)
    (tmp_path / "local" / f"another-0123.4567{files.TEMPORARY}").mkdir()
    copy = stage(store, tmp_path / "local")
    assert (copy / "shard-0.arrow").exists()
    left = {path.name for path in (tmp_path / "local").iterdir()}
    assert left == {copy.name, f"another-0123.4567{files.TEMPORARY}"}, "others are let alone"


def test_several_processes_copy_once(store, tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            files.crash_hooks.append(
                lambda name, path: (
                    (local / f"rename-{os.getpid()}").touch() if name == "rename" else None
                )
            )
            stage(store, local)
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children] == [0] * 4
    assert len(list(local.glob("rename-*"))) == 1


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match="not a store"):
        stage(tmp_path, tmp_path / "local")
