"""Features of AlphaFold2 from a sample, against the reference with its draws."""

import numpy as np
import pytest
import torch

from bevatron.data.proteins.chain_samples import (
    ChainSizes,
    CycleDraw,
    residues_of_sample,
    rows_of_sample,
    templates_of_sample,
)
from bevatron.data.proteins.rows_in_memory import RowsInMemory
from bevatron.models.alphafold2.inputs import model_inputs, reference_inputs

SIZES = ChainSizes(residues=40, msa_rows=12, extra_rows=30, templates=4)


@pytest.fixture(scope="module")
def golden(shared):
    return dict(np.load(shared / "golden/alphafold2/features_ensembled_1ckb_A.npz"))


@pytest.fixture(scope="module")
def chain(shared):
    return dict(np.load(shared / "golden/alphafold2/features_nonensembled_1ckb_A.npz"))


@pytest.fixture(scope="module")
def sample(golden, chain):
    rows = chain["msa"].astype(np.int8)
    rows[rows == 21] = 31
    alignment = RowsInMemory(rows, chain["deletion_matrix"].astype(np.uint8))
    draws = []
    for cycle in range(3):
        order = golden[f"cycle{cycle}__draw_row_order"]
        draws.append(
            CycleDraw(
                order[:12],
                order[12:][golden[f"cycle{cycle}__draw_extra_select"]],
                golden[f"cycle{cycle}__draw_masked_msa"],
                golden[f"cycle{cycle}__draw_bert_mask"].astype(bool),
                np.arange(len(rows)),
            )
        )
    entry = {
        "aatype": chain["aatype"].astype(np.int8),
        "residue_index": chain["residue_index"].astype(np.int32),
        "all_atom_positions": chain["all_atom_positions"],
        "all_atom_mask": chain["all_atom_mask"].astype(bool),
        "resolution": chain["resolution"],
        "template_aatype": chain["template_aatype"].astype(np.int8).reshape(-1),
        "template_positions": chain["template_all_atom_positions"][:, :, :4].reshape(-1, 4, 3),
        "template_atom_mask": chain["template_all_atom_mask"][:, :, :4].reshape(-1, 4) > 0,
        "template_torsions": chain["template_torsion_angles_sin_cos"].reshape(-1, 7, 2),
        "template_torsions_mask": chain["template_torsion_angles_mask"].reshape(-1, 7) > 0,
    }
    first = int(golden["cycle0__draw_crop_start"][0])
    crop = slice(first, first + 40)
    start = int(golden["cycle0__draw_template_crop_start"][0])
    templates = golden["cycle0__draw_template_permutation"][start : start + 4]
    arrays = residues_of_sample(entry, crop, 40)
    arrays["use_clamped_fape"] = np.array(1.0, dtype=np.float32)
    arrays |= templates_of_sample(entry, templates, crop, SIZES)
    arrays |= rows_of_sample(alignment, draws, crop, SIZES)
    return {name: torch.as_tensor(array) for name, array in arrays.items()}


def expected(golden, cycle, name):
    key = f"cycle{cycle}__final__{name}"
    return golden.get(key, golden[f"cycle0__final__{name}"])


@pytest.mark.parametrize("cycle", [0, 1, 2])
def test_features_of_a_cycle_are_those_of_the_reference(golden, sample, cycle):
    found = model_inputs(sample, cycle)
    for name, value in found.items():
        reference = torch.from_numpy(np.asarray(expected(golden, cycle, name)))
        if name.startswith("template_all_atom"):
            reference = reference.clone()
            reference[:, :, 4:] = 0
        assert value.shape == reference.shape
        torch.testing.assert_close(value, reference, atol=2e-6, rtol=0, check_dtype=False)


@pytest.mark.parametrize("cycle", [0, 1, 2])
def test_targets_of_a_cycle_are_those_of_the_reference(golden, sample, cycle):
    found = reference_inputs(sample, cycle)
    assert found.pop("use_clamped_fape") == 1
    masks = {
        "rigidgroups_gt_frames": "rigidgroups_gt_exists",
        "rigidgroups_alt_gt_frames": "rigidgroups_gt_exists",
        "backbone_rigid_tensor": "backbone_rigid_mask",
        "chi_angles_sin_cos": "chi_mask",
    }
    for name, value in found.items():
        reference = torch.from_numpy(np.asarray(expected(golden, cycle, name)))
        known = found[masks[name]] if name in masks else torch.ones(())
        known = known.reshape((*known.shape, *(1,) * (value.dim() - known.dim())))
        torch.testing.assert_close(
            value * known, reference * known, atol=2e-5, rtol=0, check_dtype=False
        )


def test_a_batch_has_the_features_of_its_samples(sample):
    both = {name: torch.stack([value, value]) for name, value in sample.items()}
    alone, together = model_inputs(sample, 1), model_inputs(both, 1)
    for name, value in alone.items():
        assert torch.equal(together[name][1], value)
    alone, together = reference_inputs(sample, 1), reference_inputs(both, 1)
    for name, value in alone.items():
        assert torch.equal(together[name][1], value)
