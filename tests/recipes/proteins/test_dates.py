"""Structures are taken by their release dates: those of their files, else of OpenFold's caches."""

import json

import numpy as np
import protein_texts as proteins
import pytest

from bevatron.cli import main
from bevatron.errors import DataError, StoreError
from bevatron.recipes.alphafold2 import inspect
from bevatron.recipes.alphafold2.stores import open_chains, prepare_chains
from bevatron.recipes.alphafold3.stores import open_complexes, prepare_complexes


def structure(date):
    """A structure of a release date, or of none."""
    tables = proteins.tables_of()
    del tables["pdbx_audit_revision_history"]
    if date is not None:
        history = {"ordinal": ["1"], "revision_date": [date]}
        tables = {"pdbx_audit_revision_history": history, **tables}
    return proteins.cif(tables=tables)


@pytest.fixture
def folder(tmp_path):
    """Files of four entries, two of which name no date, and a cache that has one of these."""
    found = tmp_path / "pdb"
    found.mkdir()
    for code, date in (
        ("1old", "2001-02-03"),
        ("1new", "2022-05-11"),
        ("1hid", None),
        ("1non", None),
    ):
        (found / f"{code}.cif").write_bytes(structure(date) + f"# {code}\n".encode())
    cache = {"1HID": {"release_date": "2010-06-30"}, "1OLD": {"release_date": "2030-01-01"}}
    (found / "mmcif_cache.json").write_text(json.dumps(cache))
    return found


def usable(store):
    names = [source.rpartition("/")[2][:4] for source in store.manifest["sources"]]
    return [name for name, entry in zip(names, store, strict=True) if not len(entry["reason"])]


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, ["1hid", "1new", "1non", "1old"]),
        ({"released_before": "2022-05-11"}, ["1hid", "1old"]),
        ({"released_before": "2022-05-12"}, ["1hid", "1new", "1old"]),
        ({"released_from": "2010-06-30"}, ["1hid", "1new"]),
        ({"released_from": "2010-07-01", "released_before": "2040-01-01"}, ["1new"]),
    ],
)
def test_structures_are_taken_by_their_dates(folder, tmp_path, options, taken):
    out = tmp_path / "s"
    # Those of other dates are no mistakes, which strict would refuse.
    prepare_chains([folder], out, workers=0, progress=False, strict=True, **options)
    store = open_chains(out)
    assert usable(store) == taken
    days = dict(zip(("1hid", "1new", "1non", "1old"), store, strict=True))
    if "1hid" in taken:
        assert days["1hid"]["released"] == 14_790
    listed = tmp_path / "s-rejects.csv"
    text = listed.read_text() if listed.exists() else ""
    assert len(text.splitlines()) == (5 - len(taken) if options else 0)
    assert ("1non.cif,has no release date" in text) == bool(options)
    rows = dict(inspect.describe(store)[0].rows)
    assert {
        name: rows[name] for name in rows if name in {"released_before", "released_from"}
    } == options


def test_complexes_are_taken_likewise(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("bevatron.data.proteins.conformers._embedded", lambda *_: [])
    (tmp_path / "components.cif").write_bytes(proteins.COMPONENTS)
    prepare_complexes(
        [folder], tmp_path / "s", components=str(tmp_path / "components.cif"), keep_all=True,
        workers=0, progress=False, released_before="2015-01-01",
    )  # fmt: skip
    store = open_complexes(tmp_path / "s")
    assert usable(store) == ["1hid", "1old"]
    assert b'"released": "2010-06-30"' in store[0]["description"].tobytes()


def test_dates_are_settings_of_a_store(folder, tmp_path):
    prepare_chains([folder], tmp_path / "s", workers=0, progress=False)
    with pytest.raises(StoreError, match='released_before was absent, is now "2022-01-01"'):
        prepare_chains([folder], tmp_path / "s", released_before="2022-01-01", progress=False)
    (folder / "mmcif_cache.json").write_text('{"1non": "2011-01-01"}')
    with pytest.raises(StoreError, match="release_dates was"):
        prepare_chains([folder], tmp_path / "s", workers=0, progress=False)


def test_a_cache_that_is_damaged_is_left_out_by_name(folder, tmp_path):
    (folder / "mmcif_cache.json").write_text('{"1hid": "soon"}')
    prepare_chains([folder], tmp_path / "s", workers=0, progress=False)
    assert "mmcif_cache.json,\"entry '1hid' has the release date" in (
        (tmp_path / "s-rejects.csv").read_text()
    )
    assert (np.array([entry["released"] for entry in open_chains(tmp_path / "s")]) < 0).sum() == 2


def test_caches_that_contradict_each_other_are_refused_before_the_work(folder, tmp_path):
    cache = {"1hid_A": {"release_date": "2010-06-30"}}
    (folder / "chain_data_cache.json").write_text(json.dumps(cache))
    prepare_chains([folder], tmp_path / "s", workers=0, progress=False)
    cache["1hid_A"]["release_date"] = "2010-07-01"
    (folder / "chain_data_cache.json").write_text(json.dumps(cache))
    sentence = "_cache.json: entry '1hid' was released on 2010-0.-.* in one and on 2010-0"
    with pytest.raises(DataError, match=sentence):
        prepare_chains([folder], tmp_path / "t", workers=0, progress=False)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--released-before", "soon"], "released_before: expected a date such as 2021-09-30, got"),
        (["--released-from", "2021-9-30"], "released_from: expected a date"),
        (["--released-from", "20210930"], "released_from: expected a date"),
        (
            ["--released-from", "2021-09-30", "--released-before", "2021-09-30"],
            "released_from: expected a day before 2021-09-30, got 2021-09-30",
        ),
    ],
)
def test_what_is_no_date_is_refused(folder, tmp_path, capsys, options, sentence):
    command = ["prepare", "alphafold2", str(folder), "--out", str(tmp_path / "s"), *options]
    assert main(command) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "s").exists()
