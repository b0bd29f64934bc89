"""Preparing complexes and chains, killed before any step on disk, loses and repeats nothing."""

import functools

import protein_texts as proteins
import pytest

from bevatron.data.proteins import poses
from bevatron.errors import DataError, StoreError
from bevatron.recipes.alphafold2.stores import open_chains, prepare_chains
from bevatron.recipes.alphafold3.stores import open_complexes, prepare_complexes
from killing import killed_at_each_step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A protein, its alignment and template hits, and damaged files."""
    root = tmp_path_factory.mktemp("proteins")
    (root / "a.cif").write_bytes(proteins.cif())
    (root / "bad.cif").write_bytes(b"nothing")
    (root / "a.a3m").write_bytes(proteins.A3M)
    (root / "bad.a3m").write_bytes(b"nothing")
    (root / "a_A.m8").write_text("q\ta_A\t1\t12\t0\t0\t1\t12\t1\t12\t0\t9\t12M\n")
    (root.parent / "components.cif").write_bytes(proteins.COMPONENTS)
    return root


@pytest.fixture(params=["alphafold3", "alphafold2"])
def system(request, folder, monkeypatch):
    """Prepare and open of a system."""
    monkeypatch.setattr(poses, "_PER_PART", 2)
    # To embed takes longer than all the rest.
    monkeypatch.setattr("bevatron.data.proteins.conformers._embedded", lambda *_: [])
    options = {"workers": 0, "progress": False}
    if request.param == "alphafold2":
        return functools.partial(prepare_chains, [folder], **options), open_chains
    options["components"] = str(folder.parent / "components.cif")
    return functools.partial(prepare_complexes, [folder], **options), open_complexes


def contents(out):
    """Every file of a store and beside it, by path."""
    root = out.parent
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def durable(out):
    """When each finished file was written; lists are written each time."""
    files = [*out.rglob("shard-*.arrow"), *out.glob("poses.arrow"), *out.rglob("manifest.json")]
    return {path: path.stat().st_mtime_ns for path in files}


def test_killed_at_every_step_it_ends_the_same(system, tmp_path):
    prepare, opened = system
    expected = tmp_path / "whole" / "s"
    expected.parent.mkdir()
    prepare(expected)
    assert (expected / "templates").is_dir()
    expected = contents(expected)
    unfinished = 0
    for out in killed_at_each_step(prepare, tmp_path):
        before = durable(out)
        try:
            opened(out)
        except (DataError, StoreError):
            unfinished += 1
        else:
            # What can be opened lacks nothing.
            assert expected.keys() <= contents(out).keys()
        prepare(out)
        assert contents(out) == expected
        assert {path: path.stat().st_mtime_ns for path in before} == before
    assert unfinished > 30
