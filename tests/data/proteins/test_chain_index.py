"""Stores of entries: what a plan reads of them, what it draws, and a hundred thousand of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bevatron.data.proteins.alignments import (
    ALIGNMENT_FIELDS,
    ALIGNMENTS_VERSION,
    merge_alignment,
)
from bevatron.data.proteins.chain_index import (
    UNKNOWN_DAY,
    Choices,
    chain_key,
    index_of,
    protein_sequences,
)
from bevatron.data.proteins.featurize import describe, featurize
from bevatron.data.readers.proteins.alphabet import sequence_classes
from bevatron.data.readers.proteins.structures import read_structure
from bevatron.data.store.prepare import write_store
from bevatron.data.store.shards import concatenate
from bevatron.data.store.store import Store

sys.path.insert(0, str(Path(__file__).parent))
from made_up_entries import STORED, empty_entry, indexed, made_up_entry


def store_of(path, entries):
    return write_store(path, STORED, [concatenate(entries, STORED)], sources=["a.cif"])


@pytest.fixture
def store(tmp_path):
    entries = [indexed([12, 20], 0), empty_entry(), indexed([15], 2), indexed([12, 9], 0)]
    return store_of(tmp_path / "entries", entries)


def test_choices_are_all_chains_and_interfaces_with_their_weights(store):
    choices = Choices.of(store)
    pairs = [store[i]["interfaces"].tolist() for i in range(4)]
    assert pairs == [[[1, 2]], [], [], [[1, 2]]]
    assert choices.entry.tolist() == [0, 0, 2, 3, 3, 0, 3]
    chains = [[1, 0], [2, 0], [1, 0], [1, 0], [2, 0], [1, 2], [1, 2]]
    assert choices.chains.tolist() == chains
    # Entries 0 and 3 begin with the same chain; all else is alone.
    assert store[0]["chain_key"][0] == store[3]["chain_key"][0]
    np.testing.assert_allclose(choices.weight, [0.75, 1.5, 1.5, 0.75, 1.5, 6.0, 6.0])


def test_clusters_join_chains_and_interfaces(store):
    keys = [store[i]["chain_key"].tolist() for i in (0, 2, 3)]
    clusters = {keys[0][1]: 0, keys[2][1]: 0, keys[1][0]: 1}
    choices = Choices.of(store, clusters)
    np.testing.assert_allclose(choices.weight, [0.75, 0.75, 1.5, 0.75, 0.75, 3.0, 3.0])


def test_entries_that_are_not_allowed_are_not_drawn_and_count_in_no_cluster(store):
    choices = Choices.of(store, allowed=np.array([False, True, True, True]))
    assert choices.entry.tolist() == [2, 3, 3, 3]
    assert choices.chains.tolist() == [[1, 0], [1, 0], [2, 0], [1, 2]]
    np.testing.assert_allclose(choices.weight, [1.5, 1.5, 1.5, 6.0])
    nothing = Choices.of(store, allowed=np.array([False, True, False, False]))
    assert len(nothing.entry) == len(nothing.weight) == 0


def test_sequences_for_clusters_are_those_of_the_chains(store):
    found = protein_sequences(store)
    assert len(found) == 3  # the chain of nine residues is a peptide
    for key, sequence in found.items():
        assert key == chain_key("protein", sequence)
        assert len(sequence) >= 10


def test_days_are_counted_from_1970():
    day = np.datetime64("2020-02-03") - np.datetime64("1970-01-01")
    assert index_of(made_up_entry([5]))["released"] == day.astype(int)
    assert index_of(made_up_entry([5], released=None))["released"] == UNKNOWN_DAY


@pytest.mark.shared
@pytest.mark.parametrize("name", ["1pfe", "7a4d"])
def test_index_of_a_real_entry_is_that_of_its_chains(shared, dictionary, name):
    structure = read_structure(shared / f"data/complexes/mmcif/{name}.cif.gz").assembly("1")
    entry = featurize(structure, dictionary)
    index, chains = index_of(entry), describe(entry)["chains"]
    kinds = {"protein": 0, "rna": 1, "dna": 2}
    assert index["chain_type"].tolist() == [kinds.get(chain["kind"], 3) for chain in chains]
    for number, chain in enumerate(chains, start=1):
        tokens = int((entry["asym_id"] == number).sum())
        expected = len(chain["sequence"]) or tokens
        assert index["chain_length"][number - 1] == expected
    same = index["chain_key"][:, None] == index["chain_key"]
    for i, first in enumerate(chains):
        for j, second in enumerate(chains):
            if first["sequence"] or second["sequence"]:
                alike = first["kind"] == second["kind"] and first["sequence"] == second["sequence"]
            else:
                alike = first["entity"] == second["entity"]
            assert same[i, j] == alike


# ---- many ----


def many(folder, store, copies):
    """Make the one shard of a store many, by links."""
    manifest = json.loads((store.path / "manifest.json").read_text())
    (shard,) = manifest["shards"]
    folder.mkdir()
    for number in range(copies):
        os.link(store.path / shard["name"], folder / f"shard-{number:06d}.arrow")
    manifest["shards"] = [shard | {"name": f"shard-{n:06d}.arrow"} for n in range(copies)]
    manifest["num_samples"] = copies * shard["samples"]
    del manifest["checksum"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Store.open(folder)


def test_a_hundred_thousand_entries_open_plan_and_sample_in_two_seconds_and_300_mb(tmp_path):
    entries = [indexed([40, 60], number) for number in range(50)]
    sequences = [
        sequence_classes("protein", chain["sequence"])
        for entry in entries
        for chain in describe(entry)["chains"]
    ]
    rng = np.random.default_rng(0)
    stored = [
        merge_alignment(
            {
                "rows": np.concatenate([q[None], rng.integers(0, 20, (300, len(q)))]).astype("i1"),
                "deletions": (rng.random((301, len(q))) < 0.01).astype(np.uint16),
                "species": rng.integers(0, 9, 301).astype(np.int32),
                "files": np.zeros(1, dtype=np.int32),
                "file_rows": np.full(1, 301, dtype=np.int32),
            }
        )
        for q in sequences
    ]
    columns = concatenate([entries[i % 50] for i in range(1024)], STORED)
    one = write_store(tmp_path / "one", STORED, [columns])
    large = many(tmp_path / "large", one, 98)
    columns = concatenate([stored[i % 100] for i in range(64)], ALIGNMENT_FIELDS)
    settings = {"features": ALIGNMENTS_VERSION}
    few = write_store(tmp_path / "few", ALIGNMENT_FIELDS, [columns], settings=settings)
    alignments = many(tmp_path / "alignments", few, 1563)
    assert len(large) > 100_000
    assert len(alignments) > 100_000
    script = Path(__file__).parent / "open_large_store.py"
    done = subprocess.run(
        [sys.executable, script, large.path, alignments.path],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    found = json.loads(done.stdout)
    assert found["choices"] > 200_000
    assert found["rows"] == 128
    assert found["seconds"] < 2.0
    assert found["bytes"] < 300e6
