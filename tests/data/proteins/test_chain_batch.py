"""The batch of AlphaFold2: what it holds, and its padding."""

import numpy as np
import torch

from bevatron.data.padding import pad
from bevatron.data.padding.shape import BatchShape
from bevatron.data.proteins.chain_batch import ChainBatch, collate_chain
from bevatron.data.proteins.chain_samples import ChainSizes, sample_chain
from bevatron.data.proteins.rows_in_memory import RowsInMemory
from bevatron.models.alphafold2.inputs import model_inputs, reference_inputs


def batch():
    draw = np.random.default_rng(0)
    length = 13
    entry = {
        "aatype": draw.integers(0, 20, length).astype(np.int8),
        "residue_index": np.arange(length, dtype=np.int32),
        "all_atom_positions": draw.normal(size=(length, 37, 3)).astype(np.float32),
        "all_atom_mask": draw.random((length, 37)) < 0.5,
        "resolution": np.array(2.0, dtype=np.float32),
    }
    rows = draw.integers(0, 21, (9, length)).astype(np.int8)
    alignment = RowsInMemory(rows, draw.integers(0, 4, rows.shape).astype(np.uint8))
    sample = sample_chain(entry, alignment, 5, ChainSizes(length, 3, 4, 2), cycles=2)
    return collate_chain([sample], np.array([17]), [1.0])


def test_a_batch_says_its_sample_and_sizes():
    found = batch()
    assert found.sample_indices.tolist() == [17]
    assert found.resolution.shape == found.seq_length.shape == ()
    assert dict(found.sizes) == {"samples": 1, "tokens": 13, "rows": 3, "extra_rows": 4}


def test_padding_leaves_the_features_of_the_model_as_they_were():
    real = batch()
    padded = pad(real, BatchShape(tokens=16, rows=4, extra_rows=8, samples=1))
    assert padded.msa.shape == (2, 4, 16)
    assert padded.cluster_counts.shape == (2, 4, 16, 22)
    for compute in (model_inputs, reference_inputs):
        ours, theirs = compute(real.tensors(), 1), compute(padded.tensors(), 1)
        for name, value in ours.items():
            cut = theirs[name][tuple(slice(count) for count in value.shape)]
            assert torch.equal(cut, value)
    features = model_inputs(padded.tensors(), 1)
    for name in ("target_feat", "seq_mask", "msa_feat", "msa_mask", "extra_msa_mask"):
        ends = features[name].movedim(-1, 0) if name.endswith("mask") else features[name]
        tail = ends[13:] if name != "msa_feat" else ends[..., 13:, :]
        assert not tail.any()
    targets = reference_inputs(padded.tensors(), 1)
    for name in ("atom14_atom_exists", "atom37_atom_exists", "rigidgroups_gt_exists", "chi_mask"):
        assert not targets[name][13:].any()


def test_samples_of_published_size_are_hardly_padded():
    def rows(*size):
        shape = ChainBatch.padding.rounded((*size, 1))
        assert (shape.tokens, shape.extra_rows) == (size[0], size[2])
        return shape.rows

    assert rows(256, 124, 1024) == 124
    assert rows(384, 508, 5120) == 512
    assert rows(64, 70, 32) == rows(64, 80, 32) == 80
