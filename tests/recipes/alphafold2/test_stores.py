"""Folders of structures and alignments become stores of chains."""

import csv

import numpy as np
import pytest

from bevatron.data.proteins.alignment_files import OF_NO_CHAIN
from bevatron.data.proteins.alignments import Alignments
from bevatron.data.proteins.chains import chain_entry
from bevatron.data.readers.proteins import read_structure
from bevatron.errors import DataError
from bevatron.recipes.alphafold2.data import chain_of, chain_table
from bevatron.recipes.alphafold2.stores import open_chains, prepare_chains
from bevatron.recipes.proteins import searches


def test_damaged_files_are_listed_and_left_out(folder, store):
    rows = list(csv.reader(store.with_name("chains-rejects.csv").open()))
    assert {row[0] for row in rows[1:]} == {str(folder / f"damaged.{x}") for x in ("cif", "a3m")}
    assert len(chain_table(open_chains(store)).length) == 4


def test_a_chain_of_a_store_is_that_of_its_file(folder, store):
    opened = open_chains(store)
    for entry, path in zip(opened, opened.manifest["sources"], strict=True):
        if len(entry["chain_length"]):
            expected = chain_entry(read_structure(path), 0)
            found = chain_of(entry, 0)
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value)


def test_chains_of_a_file_are_told_apart(shared, tmp_path):
    path = shared / "data/proteins/mmcif/2gox.cif.gz"
    prepare_chains([path], tmp_path / "s", workers=0, progress=False)
    store, structure = open_chains(tmp_path / "s"), read_structure(path)
    proteins = np.flatnonzero(structure.chains.kind == "protein")
    assert len(proteins) > 1
    for number, chain in enumerate(proteins.tolist()):
        expected = chain_entry(structure, chain)
        np.testing.assert_array_equal(chain_of(store[0], number)["aatype"], expected["aatype"])


def test_alignments_are_found_by_sequence_and_copies_are_one_cluster(store):
    opened, alignments = open_chains(store), Alignments.open(store / "alignments")
    assert len(alignments) == 3
    for entry in opened:
        if len(entry["query"]):
            place = alignments.find(np.array(entry["query"]))
            assert place is not None
            assert alignments[place].num_columns == len(entry["query"])
    table = chain_table(opened)
    assert sorted(np.unique(table.cluster, return_counts=True)[1].tolist()) == [1, 1, 2]


def test_a_store_of_something_else_is_named(store):
    with pytest.raises(DataError, match="not a store of chains"):
        open_chains(store / "alignments")


def test_strictly_a_damaged_file_is_an_error(folder, tmp_path):
    with pytest.raises(DataError, match="damaged"):
        prepare_chains([folder], tmp_path / "s", strict=True, workers=0, progress=False)


def test_alignments_in_an_archive_that_are_of_no_chain_are_one_line(tmp_path):
    archive = tmp_path / "all.tar"
    archive.write_bytes(b"")
    inside = [(str(archive / f"{number}.a3m"), OF_NO_CHAIN) for number in range(3)]
    others = [(str(archive / "4.a3m"), "is empty"), (str(tmp_path / "5.a3m"), OF_NO_CHAIN)]
    summed = (str(archive), "3 alignments in it of no chain of the structures")
    assert searches._summed_up([*inside, *others]) == [*others, summed]
