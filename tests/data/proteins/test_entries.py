"""Stores of entries: what a plan reads of them, what it draws, and a hundred thousand of them."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bevatron.data.proteins.alignments import ALIGNMENT_FIELDS, merge_alignment
from bevatron.data.proteins.complexes import describe
from bevatron.data.proteins.entries import (
    STORED_ENTRY_FIELDS,
    UNKNOWN_DAY,
    Choices,
    EntryReader,
    chain_key,
    left_out,
    prepare_entries,
    protein_sequences,
)
from bevatron.data.proteins.sample import sequence_classes
from bevatron.data.proteins.weights import complex_weights
from bevatron.data.store.prepare import write_store
from bevatron.data.store.shards import concatenate
from bevatron.data.store.store import Store
from bevatron.errors import DataError

sys.path.insert(0, str(Path(__file__).parent))
from made_up_entries import indexed


def store_of(path, entries):
    return write_store(
        path, STORED_ENTRY_FIELDS, [concatenate(entries, STORED_ENTRY_FIELDS)], sources=["a.cif"]
    )


@pytest.fixture
def store(tmp_path):
    entries = [indexed([12, 20], 0), left_out("no atoms", 1), indexed([15], 2), indexed([12, 9], 0)]
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
    with pytest.raises(DataError, match="no chain to draw"):
        nothing.draw(0, 0, 1)


def test_draws_follow_the_weights_and_continue_anywhere(store):
    choices = Choices.of(store)
    entry, chains = choices.draw(7, 0, 40_000)
    found = np.zeros(len(choices.weight))
    table = np.concatenate([choices.entry[:, None], choices.chains], axis=1).tolist()
    drawn, counts = np.unique(
        np.concatenate([entry[:, None], chains], axis=1), axis=0, return_counts=True
    )
    for row, count in zip(drawn.tolist(), counts, strict=True):
        found[table.index(row)] = count / 40_000
    np.testing.assert_allclose(found, choices.weight / choices.weight.sum(), atol=0.015)
    later = choices.draw(7, 30_000, 50)
    np.testing.assert_array_equal(later[0], entry[30_000:30_050])
    np.testing.assert_array_equal(later[1], chains[30_000:30_050])
    other, _ = choices.draw(8, 0, 1000)
    assert (other != entry[:1000]).any()


def test_sequences_for_clusters_are_those_of_the_chains(store):
    found = protein_sequences(store)
    assert len(found) == 3  # the chain of nine residues is a peptide
    for key, sequence in found.items():
        assert key == chain_key("protein", sequence)
        assert len(sequence) >= 10


def test_an_entry_that_is_left_out_has_no_chain_and_says_why(store):
    assert store[1]["reason"].tobytes() == b"no atoms"
    assert store[1]["released"] == UNKNOWN_DAY
    assert store[0]["released"] == (
        np.datetime64("2020-02-03") - np.datetime64("1970-01-01")
    ).astype(int)


# ---- real files ----


@pytest.mark.shared
def test_files_become_entries_and_a_damaged_one_is_told_of(shared, dictionary, tmp_path):
    whole = shared / "data/complexes/mmcif/1pfe.cif.gz"
    cut = tmp_path / "cut.cif"
    cut.write_bytes(gzip.decompress(whole.read_bytes())[:3000])
    with pytest.raises(DataError, match=r"cut\.cif"):
        prepare_entries(EntryReader([cut], dictionary), tmp_path / "strict", workers=0)
    reader = EntryReader([whole, cut], dictionary, strict=False)
    store = prepare_entries(reader, tmp_path / "s", workers=0)
    assert "cut.cif" in store[1]["reason"].tobytes().decode()
    entry = store[0]
    chains = describe(entry)["chains"]
    assert entry["chain_kind"].tolist() == [
        {"protein": 0, "rna": 1, "dna": 2}.get(chain["kind"], 3) for chain in chains
    ]
    keys = dict(zip(entry["chain_key"].tolist(), chains, strict=False))
    assert len(keys) == len({(c["kind"], c["sequence"]) for c in chains if c["sequence"]}) + len(
        {n for n, c in zip(entry["chain_key"].tolist(), chains, strict=True) if not c["sequence"]}
    )
    choices = Choices.of(store)
    kind, key = entry["chain_kind"], np.unique(entry["chain_key"], return_inverse=True)[1]
    expected = complex_weights(kind, key, entry["interfaces"].astype(np.int64) - 1)
    np.testing.assert_allclose(
        choices.weight, np.concatenate([expected.chains, expected.interfaces])
    )


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
                "deletions": np.zeros((301, len(q)), dtype=np.uint16),
                "species": rng.integers(0, 9, 301).astype(np.int32),
                "files": np.zeros(1, dtype=np.int32),
                "file_rows": np.full(1, 301, dtype=np.int32),
            }
        )
        for q in sequences
    ]
    columns = concatenate([entries[i % 50] for i in range(1024)], STORED_ENTRY_FIELDS)
    one = write_store(tmp_path / "one", STORED_ENTRY_FIELDS, [columns])
    large = many(tmp_path / "large", one, 98)
    columns = concatenate([stored[i % 100] for i in range(64)], ALIGNMENT_FIELDS)
    few = write_store(tmp_path / "few", ALIGNMENT_FIELDS, [columns])
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
