"""Residue constants and geometry against reference values of other implementations."""

import numpy as np
import pytest
import torch

from bevatron.data.proteins import atoms14, constants, rigid_groups, torsions
from bevatron.data.proteins.stereochemistry import distance_bounds
from bevatron.maths.rigid import (
    Rigid,
    matrix_of_rigid,
    normalise_quaternion,
    rigid_of_matrix,
    rotation_of_quaternion,
)


@pytest.fixture(scope="module")
def geometry(shared):
    return dict(np.load(shared / "golden/alphafold2/template_and_geometry.npz"))


def features(shared, chain):
    stored = np.load(shared / f"golden/alphafold2/features_nonensembled_{chain}.npz")
    return {name: torch.from_numpy(stored[name]) for name in stored.files}


def close(found, expected, bound):
    expected = torch.as_tensor(expected)
    scale = expected.abs().max()
    assert found.shape == expected.shape
    assert (found.to(expected.dtype) - expected).abs().max() <= bound * scale


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("ATOM14_MASK", "atom14_atom_mask"),
        ("ATOM14_GROUP", "atom14_group"),
        ("ATOM14_POSITION", "atom14_literature_positions"),
        ("GROUP_FRAME", "default_frames"),
        ("CHI_MASK", "chi_angles_mask"),
        ("CHI_PI_PERIODIC", "chi_pi_periodic"),
    ],
)
def test_tables_are_alphafolds(geometry, name, stored):
    assert np.array_equal(getattr(constants, name), geometry[f"const__{stored}"])


def test_distance_bounds_are_alphafolds(geometry):
    bounds = distance_bounds(1.5, 12.0)
    assert np.array_equal(bounds.lower, geometry["const__atom14_dists_lower_bound"])
    assert np.array_equal(bounds.upper, geometry["const__atom14_dists_upper_bound"])


def test_atom_numberings_undo_each_other():
    residue, slot = np.nonzero(constants.ATOM14_MASK)
    there = constants.ATOM14_TO_ATOM37[residue, slot]
    assert constants.ATOM37_MASK[residue, there].all()
    assert np.array_equal(constants.ATOM37_TO_ATOM14[residue, there], slot)
    assert constants.ATOM37_MASK.sum() == constants.ATOM14_MASK.sum() == 167


def test_torsions_become_atoms(geometry):
    aatype = torch.from_numpy(geometry["in__aatype21"])
    sin_cos = torch.from_numpy(geometry["in__torsions21"]).double().requires_grad_()
    backbone = Rigid(
        rotation_of_quaternion(
            normalise_quaternion(torch.from_numpy(geometry["in__frame_quat21"]).double())
        ),
        torch.from_numpy(geometry["in__frame_trans21"]).double(),
    )
    groups = rigid_groups.frames_of_torsions(backbone, sin_cos, aatype)
    atoms = rigid_groups.atoms_of_frames(groups, aatype)
    close(matrix_of_rigid(groups), geometry["out__frames21"], 1e-9)
    close(atoms, geometry["out__atom14_21"], 1e-9)
    atoms.backward(torch.from_numpy(geometry["cot__atom14_21"]).double())
    close(sin_cos.grad, geometry["gin__torsions21"], 1e-9)


CHAINS = ["1ckb_A", "1d66_A"]


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("prefix", ["", "template_"])
def test_torsions_of_a_chain(shared, chain, prefix):
    x = features(shared, chain)
    found = torsions.torsions(
        x[f"{prefix}all_atom_positions"], x[f"{prefix}all_atom_mask"], x[f"{prefix}aatype"]
    )
    mask = x[f"{prefix}torsion_angles_mask"]
    assert torch.equal(found.mask, mask)
    # The reference is in float32 and moves the origin after it rotates: 5e-5 from exact arithmetic.
    for name, values in (("", found.sin_cos), ("alt_", found.alternative)):
        stored = x[f"{prefix}{name}torsion_angles_sin_cos"]
        close(values * mask[..., None], stored * mask[..., None], 1e-4)


@pytest.mark.parametrize("chain", CHAINS)
def test_atoms_of_a_chain_under_both_names(shared, chain):
    x = features(shared, chain)
    found = atoms14.atom37_to_atom14(x["all_atom_positions"], x["all_atom_mask"], x["aatype"])
    assert torch.equal(found.position, x["atom14_gt_positions"])
    assert torch.equal(found.resolved, x["atom14_gt_exists"])
    assert torch.equal(found.alternative, x["atom14_alt_gt_positions"])
    assert torch.equal(found.alternative_resolved, x["atom14_alt_gt_exists"])
    back = atoms14.atom14_to_atom37(found.position, x["aatype"])
    known = x["all_atom_mask"] * x["atom37_atom_exists"]
    assert torch.equal(back, x["all_atom_positions"] * known[..., None])


@pytest.mark.parametrize("chain", CHAINS)
def test_frames_of_a_chain(shared, chain):
    x = features(shared, chain)
    found = rigid_groups.group_frames(x["all_atom_positions"], x["all_atom_mask"], x["aatype"])
    assert torch.equal(found.resolved, x["rigidgroups_gt_exists"])
    known = found.resolved[..., None, None]
    close(matrix_of_rigid(found.frames) * known, x["rigidgroups_gt_frames"] * known, 2e-5)
    close(matrix_of_rigid(found.alternative) * known, x["rigidgroups_alt_gt_frames"] * known, 2e-5)


@pytest.mark.parametrize("chain", CHAINS)
def test_pseudo_beta_of_a_chain(shared, chain):
    x = features(shared, chain)
    position, known = atoms14.pseudo_beta(x["all_atom_positions"], x["all_atom_mask"], x["aatype"])
    assert torch.equal(position, x["pseudo_beta"])
    assert torch.equal(known, x["pseudo_beta_mask"])


def test_torsions_of_built_residues_are_those_they_were_built_from():
    aatype = torch.arange(20)
    angle = torch.rand(20, 7, dtype=torch.float64) * 6.0
    sin_cos = torch.stack([angle.sin(), angle.cos()], dim=-1)
    backbone = rigid_of_matrix(torch.eye(4, dtype=torch.float64).expand(20, 4, 4))
    groups = rigid_groups.frames_of_torsions(backbone, sin_cos, aatype)
    atoms = atoms14.atom14_to_atom37(rigid_groups.atoms_of_frames(groups, aatype), aatype)
    known = atoms14.of_residues("ATOM37_MASK", aatype).double()
    found = torsions.torsions(atoms, known, aatype)
    mask = found.mask[:, 2:, None]
    # Literature atoms leave their planes by up to 0.005 Å.
    torch.testing.assert_close(
        found.sin_cos[:, 2:] * mask, sin_cos[:, 2:] * mask, atol=0.005, rtol=0
    )
    assert torch.equal(found.mask[:, 3:].bool(), torch.from_numpy(constants.CHI_MASK[:20]))
