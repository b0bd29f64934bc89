"""Samples of AlphaFold2: rows, clusters, masks, crops and templates."""

import dataclasses

import numpy as np
import pytest

from bevatron.data.proteins import chain_samples
from bevatron.data.proteins.alignment_files import AlignmentReader
from bevatron.data.proteins.alignments import prepare_alignments
from bevatron.data.proteins.chain_samples import ChainSizes, mask_rows, sample_chain
from bevatron.data.proteins.rows_in_memory import RowsInMemory, rows_in_memory
from bevatron.data.readers.proteins import read_alignment
from bevatron.errors import DataError

SIZES = ChainSizes(residues=30, msa_rows=8, extra_rows=16, templates=4)


def alignment(num_rows=60, length=50, seed=0):
    draw = np.random.default_rng(seed)
    rows = draw.integers(0, 22, (num_rows, length)).astype(np.int8)
    rows[rows == 21] = 31
    rows[0] = rows[0] % 20
    return RowsInMemory(rows, draw.integers(0, 4, rows.shape).astype(np.uint8))


def chain(length=50, templates=3, seed=0):
    draw = np.random.default_rng(seed)
    rows = templates * length
    return {
        "aatype": draw.integers(0, 20, length).astype(np.int8),
        "residue_index": np.arange(length, dtype=np.int32),
        "all_atom_positions": draw.normal(size=(length, 37, 3)).astype(np.float32),
        "all_atom_mask": draw.random((length, 37)) < 0.5,
        "resolution": np.array(2.0, dtype=np.float32),
        "template_aatype": np.repeat(np.arange(templates), length).astype(np.int8),
        "template_positions": draw.normal(size=(rows, 4, 3)).astype(np.float32),
        "template_atom_mask": np.ones((rows, 4), dtype=bool),
        "template_torsions": draw.normal(size=(rows, 7, 2)).astype(np.float32),
        "template_torsions_mask": np.ones((rows, 7), dtype=bool),
    }


def test_rows_of_a_file_are_those_of_the_reference(shared):
    stored = np.load(shared / "golden/alphafold2/features_nonensembled_1ckb_A.npz")
    read = read_alignment(shared / "data/proteins/msa/1ckb_A/pool_mmseqs2.a3m.gz")
    first = dataclasses.replace(
        read, rows=read.rows[:300], deletions=read.deletions[:300], names=read.names[:300]
    )
    found = rows_in_memory([first, first])
    assert np.array_equal(np.minimum(found.rows, 21), stored["msa"])
    assert np.array_equal(found.deletions, stored["deletion_matrix"])
    profile = np.concatenate([found.profile[:, :21], found.profile[:, 31:]], axis=1)
    assert np.allclose(profile, stored["hhblits_profile"], atol=1e-7)


def test_a_sample_depends_on_the_seed_alone():
    first, again, other = (
        sample_chain(chain(), alignment(), seed, SIZES) for seed in (7, 7, 2**62 + 7)
    )
    assert first.keys() == again.keys()
    for name, array in first.items():
        assert np.array_equal(array, again[name])
    assert not np.array_equal(first["msa"], other["msa"])


def test_fewer_cycles_are_the_first_ones():
    many, few = (sample_chain(chain(), alignment(), 3, SIZES, cycles) for cycles in (4, 2))
    assert np.array_equal(many["msa"][:2], few["msa"])
    assert np.array_equal(many["cluster_counts"][:2], few["cluster_counts"])
    assert not np.array_equal(many["msa"][0], many["msa"][1])


def test_every_row_is_in_one_cluster_or_a_centre():
    rows = alignment()
    sample = sample_chain(chain(), rows, 1, SIZES)
    members = sample["cluster_counts"].sum(-1, dtype=int)
    assert (members == members[..., :1]).all()
    assert (members[..., 0].sum(-1) == rows.num_rows - SIZES.msa_rows).all()
    deletions = sample["cluster_deletions"].sum(1) + sample["deletions"].sum(1, dtype=int)
    start = sample["residue_index"][0]
    assert (deletions == rows.deletions[:, start : start + 30].sum(0, dtype=int)).all()


def test_deleted_blocks_are_in_no_part_of_a_sample(monkeypatch):
    rows = alignment(num_rows=100)
    drawn = []

    def kept_rows(*given):
        drawn.append(kept_rows_(*given))
        return drawn[-1]

    kept_rows_ = chain_samples.kept_rows
    monkeypatch.setattr(chain_samples, "kept_rows", kept_rows)
    sizes = dataclasses.replace(SIZES, residues=50, deleted_blocks=2)
    sample = sample_chain(chain(), rows, 11, sizes)
    (kept,) = drawn
    assert 40 <= len(kept) <= 70
    used = {row.tobytes() for row in np.concatenate([*sample["true_msa"], *sample["extra_msa"]])}
    classes = np.minimum(rows.rows, 21)
    assert used <= {row.tobytes() for row in classes[kept]}
    assert not used & {row.tobytes() for row in np.delete(classes, kept, axis=0)}
    clustered = sample["cluster_counts"][..., 0, :].sum(axis=(1, 2))
    assert (clustered == len(kept) - sizes.msa_rows).all()


def test_blocks_are_three_tenths_of_the_rows_and_leave_the_query():
    missing = [
        np.setdiff1d(np.arange(100), chain_samples.kept_rows(100, 1, np.random.default_rng(seed)))
        for seed in range(400)
    ]
    starts = np.array([rows[0] for rows in missing if len(rows)])
    assert 0 not in starts
    for rows in missing:
        assert len(rows) == min(30, 100 - rows[0]) or (rows[0] == 1 and len(rows) == 29)
        assert (np.diff(rows) == 1).all()
    assert np.histogram(starts, bins=4, range=(0, 100))[0].min() > 60
    five = chain_samples.kept_rows(10, 5, np.random.default_rng(0))
    assert five[0] == 0
    assert chain_samples.kept_rows(1, 5, np.random.default_rng(0)).tolist() == [0]
    assert np.array_equal(chain_samples.kept_rows(9, 0, np.random.default_rng(0)), np.arange(9))


def test_the_query_is_the_first_centre_and_unmasked_in_true_rows():
    rows = alignment()
    sample = sample_chain(chain(), rows, 5, SIZES)
    start = sample["residue_index"][0]
    assert (sample["true_msa"][:, 0] == rows.rows[0, start : start + 30]).all()
    kept = ~sample["bert_mask"]
    assert (sample["msa"] == sample["true_msa"])[kept].all()


def test_small_chains_and_alignments_are_padded():
    sample = sample_chain(chain(20), alignment(5, 20), 2, SIZES)
    assert sample["seq_mask"].sum() == sample["seq_length"] == 20
    assert sample["msa_mask"].sum() == 5 * 20
    assert not sample["extra_msa_mask"].any()
    assert not sample["cluster_counts"].any()
    assert not sample["msa"][:, 5:].any()
    assert not sample["msa"][:, :, 20:].any()
    assert not sample["all_atom_mask"][20:].any()


def test_a_chain_without_templates_or_with_one_row_has_a_sample():
    entry = {k: v for k, v in chain(20).items() if not k.startswith("template")}
    sample = sample_chain(entry, alignment(1, 20), 2, SIZES)
    assert not sample["template_mask"].any()
    assert sample["msa_mask"].sum() == 20


def test_crops_begin_everywhere_and_numbers_of_templates_are_even():
    entry, rows = chain(35), alignment(2, 35)
    starts, templates = [], []
    for seed in range(300):
        starts.append(int(sample_chain(entry, rows, seed, SIZES, 1)["residue_index"][0]))
        rng = np.random.default_rng(seed)
        found = chain_samples.draw_templates(chain(10), slice(0, 10), rng, SIZES)
        templates.append(int(found["template_mask"].sum()))
    assert np.bincount(starts, minlength=6).min() > 300 / 6 * 0.5
    assert len(np.bincount(starts)) == 6
    assert np.bincount(templates, minlength=4).min() > 300 / 4 * 0.6


def test_a_template_is_cut_where_the_chain_is():
    entry = chain()
    sample = chain_samples.templates_of_sample(entry, np.array([2, 0]), slice(10, 40), SIZES)
    assert sample["template_aatype"][:, 0].tolist() == [2, 0, 0, 0]
    assert sample["template_mask"].tolist() == [True, True, False, False]
    stored = entry["template_positions"].reshape(3, 50, 4, 3)
    assert np.array_equal(sample["template_positions"][0], stored[2, 10:40])


def test_masks_follow_their_shares():
    rows = np.full((400, 200), 3, dtype=np.int8)
    profile = np.zeros((200, 32), dtype=np.float32)
    profile[:, 7] = profile[:, 31] = 0.5
    masked, chosen = mask_rows(rows, profile, np.random.default_rng(0))
    assert abs(chosen.mean() - 0.15) < 0.01
    found = np.bincount(masked[chosen], minlength=23) / chosen.sum()
    assert (masked[~chosen] == 3).all()
    assert abs(found[22] - 0.7) < 0.02
    assert abs(found[7] - 0.055) < 0.01
    assert abs(found[21] - 0.05) < 0.01
    assert abs(found[3] - 0.105) < 0.015
    assert abs(found[11] - 0.005) < 0.003
    assert found[20] == 0


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_errors_of_a_share_of_the_samples_are_clamped(share):
    sizes = dataclasses.replace(SIZES, clamped=share)
    rows = alignment(num_rows=4)
    drawn = [sample_chain(chain(), rows, seed, sizes, 1)["use_clamped_fape"] for seed in range(60)]
    assert np.mean(drawn) == pytest.approx(share, abs=0.15)
    assert share not in {0, 1} or np.mean(drawn) == share


def test_an_alignment_of_another_chain_is_refused():
    with pytest.raises(DataError, match="40 columns was given for a chain of 50 residues"):
        sample_chain(chain(50), alignment(5, 40), 0, SIZES)


def test_stored_alignments_give_the_sample_of_their_files(shared, tmp_path):
    path = shared / "data/proteins/msa/1ckb_A/pool_mmseqs2.a3m.gz"
    stored = prepare_alignments(AlignmentReader([path]), tmp_path / "store", workers=0)[0]
    entry = chain(stored.num_columns)
    ours = sample_chain(entry, stored, 4, ChainSizes(), cycles=2)
    theirs = sample_chain(entry, rows_in_memory([read_alignment(path)]), 4, ChainSizes(), cycles=2)
    for name, array in ours.items():
        assert np.array_equal(array, theirs[name])
