"""What chains are drawn, how often, and what samples of them hold."""

import dataclasses
import pickle

import numpy as np
import pytest

from bevatron.data.proteins.chain_samples import ChainSizes
from bevatron.data.proteins.weights import chain_weights
from bevatron.errors import ConfigError
from bevatron.models.alphafold2.config import whole_chains
from bevatron.recipes.alphafold2 import data as chains
from bevatron.recipes.alphafold2.data import ChainDataConfig, chain_table, load_chains
from bevatron.recipes.alphafold2.stores import open_chains

SIZES = ChainSizes(residues=24, msa_rows=6, extra_rows=9)


@pytest.fixture
def loaded(store):
    return load_chains(ChainDataConfig(train=(store,), valid_size=0.34), SIZES, 2)


def test_clusters_are_held_out_whole(loaded):
    ((_, table),) = loaded.train
    (held,) = {len(loaded.valid)}
    assert len(table.length) + held == 4
    held_units = {tuple(unit) for unit in loaded.valid.units.tolist()}
    everything = chain_table(open_chains(loaded.valid.path))
    of_held = {
        c
        for u, c in zip(everything.units.tolist(), everything.cluster, strict=True)
        if tuple(u) in held_units
    }
    assert not of_held & set(table.cluster.tolist())


def test_a_number_of_clusters_is_held_out(store):
    config = ChainDataConfig(train=(store,), valid_size=2)
    data = load_chains(config, SIZES, 2)
    ((_, table),) = data.train
    clusters = np.unique(chain_table(open_chains(store)).cluster)
    assert len(np.unique(table.cluster)) == len(clusters) - 2
    config = dataclasses.replace(config, valid_size=len(clusters))
    with pytest.raises(ConfigError, match=rf"data\.valid_size: {len(clusters)} of {len(clusters)}"):
        load_chains(config, SIZES, 2)


def test_a_run_without_what_was_to_validate_it_says_why(store):
    config = ChainDataConfig(train=(store,), valid_size=2, valid_longest=3)
    data = load_chains(config, SIZES, 2)
    assert data.valid is None
    assert data.report[-1].startswith("warning: nothing is validated, all chains held out for it")
    whole = load_chains(dataclasses.replace(config, valid_size=0), SIZES, 2)
    assert not any("nothing is validated" in line for line in whole.report)


def test_a_sample_is_a_function_of_its_chain_and_seed(loaded):
    dataset = loaded.draws(SIZES, 0).sources[0].dataset
    first, again, other = (dataset.sample(0, seed) for seed in (5, 5, 6))
    for name, value in first.items():
        np.testing.assert_array_equal(again[name], value)
    assert not np.array_equal(first["msa"], other["msa"])
    assert first["aatype"].shape == (24,)
    rows = [dataset.sample(index, 0)["msa"].shape for index in range(len(dataset))]
    assert max(rows) == (2, 6, 24)


def test_what_a_data_set_has_open_is_not_sent_to_workers(loaded):
    """They open it themselves: a mapped file and its tables would be copied."""
    expected = loaded.valid[0]
    sent = pickle.loads(pickle.dumps(loaded.valid))
    assert "opened" in vars(loaded.valid)
    assert "opened" not in vars(sent)
    for name, value in sent[0].items():
        np.testing.assert_array_equal(value, expected[name])


def test_validation_has_whole_chains(loaded):
    for index in range(len(loaded.valid)):
        assert len(loaded.valid[index]["aatype"]) == loaded.valid.lengths("tokens")[index]


def test_validation_and_predictions_have_the_best_templates(loaded):
    assert loaded.valid.sizes.best_templates
    assert whole_chains(9).best_templates
    assert not loaded.draws(SIZES, 0).sources[0].dataset.sizes.best_templates


def test_no_row_is_deleted_in_validation(store):
    sizes = dataclasses.replace(SIZES, deleted_blocks=5)
    data = load_chains(ChainDataConfig(train=(store,), valid_size=0.34), sizes, 1)
    assert data.valid.sizes.deleted_blocks == 0
    assert data.draws(sizes, 0).sources[0].dataset.sizes.deleted_blocks == 5


def test_chains_are_drawn_by_length_and_cluster(loaded, store):
    source = loaded.draws(SIZES, 0).sources[0]
    ((_, table),) = loaded.train
    np.testing.assert_allclose(source.weights, chain_weights(table.length, table.cluster))


@pytest.mark.parametrize(("name", "limit"), [("MAX_RESOLUTION", 1.6), ("MOST_OF_ONE", 0.12)])
def test_chains_above_a_limit_are_not_trained_on(store, monkeypatch, name, limit):
    opened = open_chains(store)
    before = chain_table(opened).usable
    monkeypatch.setattr(chains, name, limit)
    after = chain_table(opened).usable
    assert before.all()
    assert 0 < after.sum() < len(after)


def test_a_run_says_from_how_many_chains_confidence_does_not_learn(store, monkeypatch):
    config = ChainDataConfig(train=(store,), valid_size=0.0)
    assert not any("pLDDT" in line for line in load_chains(config, SIZES, 1).report)
    monkeypatch.setattr(chains, "WORST_RESOLUTION", 1.6)
    unsure = int((~chain_table(open_chains(store)).sure).sum())
    assert 0 < unsure < 4
    (line,) = [line for line in load_chains(config, SIZES, 1).report if "pLDDT" in line]
    assert f"is not trained on {unsure} of them" in line


def test_a_sequence_without_alignment_is_its_only_row(store, tmp_path):
    config = ChainDataConfig(train=(store,), valid_size=0.0)
    data = load_chains(config, SIZES, 1)
    dataset = data.draws(dataclasses.replace(SIZES, residues=100), 0).sources[0].dataset
    dataset.opened = (open_chains(store), None, None)
    sample = dataset.sample(0, 1)
    assert sample["msa"].shape[1] == sample["extra_msa"].shape[1] == 1
    assert not sample["extra_msa_mask"].any()
    np.testing.assert_array_equal(sample["true_msa"][0, 0], sample["aatype"])


def test_a_run_without_data_is_refused():
    with pytest.raises(ConfigError, match=r"data\.train"):
        load_chains(ChainDataConfig(), SIZES, 1)


def test_a_store_is_trained_on_once_and_validated_on_with_a_warning(store):
    said = load_chains(ChainDataConfig(train=(store,), valid=(store,)), SIZES, 1).report
    assert f"warning: {store} is validated on and trained on" in said
    with pytest.raises(ConfigError, match=r"data\.train: .* is there twice; give it once"):
        load_chains(ChainDataConfig(train=(store, store)), SIZES, 1)
