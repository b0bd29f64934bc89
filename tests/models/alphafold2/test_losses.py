"""Losses of AlphaFold2 against reference values and gradients of another implementation."""

import numpy as np
import pytest
import torch

from bevatron.errors import ConfigError
from bevatron.models.alphafold2 import fape, losses, naming, violation


@pytest.fixture(scope="module")
def golden(shared):
    return dict(np.load(shared / "golden/alphafold2/losses_1d66_A.npz"))


def tensor(array):
    found = torch.from_numpy(np.asarray(array))
    return found.double() if found.is_floating_point() else found


@pytest.fixture
def batch(golden):
    return {k[4:]: tensor(v) for k, v in golden.items() if k.startswith("in__")}


@pytest.fixture
def outputs(golden):
    return {k[6:]: tensor(v).requires_grad_() for k, v in golden.items() if k.startswith("pred__")}


def close(found, expected, bound=1e-9):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= bound * expected.abs().max()


TERMS = {
    "distogram": ["distogram_logits"],
    "experimentally_resolved": ["experimentally_resolved_logits"],
    "plddt": ["lddt_logits"],
    "masked_msa": ["masked_msa_logits"],
    "supervised_chi": ["angles", "unnormalized_angles"],
    "violation": ["positions"],
    "tm": ["tm_logits"],
}


@pytest.mark.parametrize("name", TERMS)
def test_a_term_and_its_gradients(golden, batch, outputs, name):
    stored = "plddt_loss" if name == "plddt" else name
    term = losses.unweighted_losses(outputs, batch)[name]
    close(term, golden[f"out__{stored}"])
    inputs = [outputs[key] for key in TERMS[name]]
    for key, gradient in zip(TERMS[name], torch.autograd.grad(term, inputs), strict=True):
        close(gradient, golden[f"g__{stored}__{key}"])


@pytest.mark.parametrize("clamped", [1.0, 0.0])
def test_the_error_of_the_backbone(golden, batch, outputs, clamped):
    batch["use_clamped_fape"] = torch.tensor(clamped, dtype=torch.float64)
    stored = "fape_backbone_clamped" if clamped else "fape_backbone_unclamped"
    term = fape.backbone_fape(outputs["frames"], batch)
    close(term, golden[f"out__{stored}"])
    close(torch.autograd.grad(term, outputs["frames"])[0], golden[f"g__{stored}__frames"])


def test_the_error_of_side_chains(golden, batch, outputs):
    last = outputs["positions"][-1]
    term = fape.sidechain_fape(
        outputs["sidechain_frames"][-1], last, naming.renamed_reference(last, batch), batch
    )
    close(term, golden["out__fape_sidechain"])
    keys = ["sidechain_frames", "positions"]
    found = torch.autograd.grad(term, [outputs[key] for key in keys])
    for key, gradient in zip(keys, found, strict=True):
        close(gradient, golden[f"g__fape_sidechain__{key}"])


def test_names_of_the_reference_are_chosen_by_distances(golden, batch, outputs):
    found = naming.renamed_reference(outputs["positions"][-1], batch)
    assert golden["out__alt_naming_is_better"].sum() > 0
    close(found.swapped, golden["out__alt_naming_is_better"])
    close(found.position, golden["out__renamed_atom14_gt_positions"])
    close(found.resolved, golden["out__renamed_atom14_gt_exists"])


def test_violations_of_each_kind(golden, batch, outputs):
    found = violation.violations(outputs["positions"][-1].detach(), batch)
    between, within = "out__violation__between_residues__", "out__violation__within_residues__"
    close(found.bond, golden[f"{between}bonds_c_n_loss_mean"])
    close(found.angle_at_c, golden[f"{between}angles_ca_c_n_loss_mean"])
    close(found.angle_at_n, golden[f"{between}angles_c_n_ca_loss_mean"])
    close(found.clashes, golden[f"{between}clashes_per_atom_loss_sum"])
    close(found.within, golden[f"{within}per_atom_loss_sum"])


def test_lddt_of_each_residue(golden, batch, outputs):
    found = losses.lddt_of_residues(
        outputs["final_atom_positions"][:, 1].detach(),
        batch["all_atom_positions"][:, 1],
        batch["all_atom_mask"][:, 1],
    )
    close(found, golden["out__lddt_ca_per_residue"])


WEIGHTS = losses.LossWeights(experimentally_resolved=0.01, violation=1.0, tm=0.1)


def test_the_whole_loss_and_its_gradients(golden, batch, outputs):
    terms = losses.loss_terms(outputs, batch, WEIGHTS)
    # The reference takes the root of the length in float32.
    total = sum(terms.values()) * float(np.sqrt(np.float32(24))) / 24**0.5
    close(total, golden["out__total"])
    assert golden["out__total"] == golden["out__breakdown__loss"]
    keys = ["frames", "sidechain_frames", "positions"]
    found = torch.autograd.grad(total, [outputs[key] for key in keys])
    for key, gradient in zip(keys, found, strict=True):
        close(gradient, golden[f"g__total__{key}"])


def test_samples_of_a_batch_have_the_losses_that_they_have_alone(batch, outputs):
    other = {k: v.detach() * (1.0 + 0.01 * torch.rand_like(v)) for k, v in outputs.items()}
    first = losses.loss_terms(outputs, batch, WEIGHTS)
    second = losses.loss_terms(other, batch, WEIGHTS)
    blocks = {"frames", "sidechain_frames", "positions", "angles", "unnormalized_angles"}
    together = losses.loss_terms(
        {k: torch.stack([v, other[k]], dim=int(k in blocks)) for k, v in outputs.items()},
        {k: torch.stack([v, v]) for k, v in batch.items()},
        WEIGHTS,
    )
    for name, term in together.items():
        torch.testing.assert_close(term, torch.stack([first[name], second[name]]))


@pytest.mark.parametrize(("length", "share"), [(6, 0.5), (24, 1.0), (500, 1.0)])
def test_a_chain_counts_by_its_length_up_to_that_of_the_crop(batch, outputs, length, share):
    whole = losses.loss_terms(outputs, batch, WEIGHTS)["fape"]
    batch["seq_length"] = torch.tensor(length)
    found = losses.loss_terms(outputs, batch, WEIGHTS)["fape"]
    torch.testing.assert_close(found, whole * share)


@pytest.mark.parametrize("resolution", [0.0, 3.5])
def test_confidence_is_not_judged_by_inaccurate_structures(batch, outputs, resolution):
    batch["resolution"] = torch.tensor(resolution, dtype=torch.float64)
    found = losses.unweighted_losses(outputs, batch)
    for name in ("plddt", "experimentally_resolved", "tm"):
        assert found[name] == 0
    assert found["fape"] > 0


def test_a_loss_without_weights_is_refused():
    with pytest.raises(ConfigError, match="fape: all weights are 0, nothing would be learnt"):
        losses.LossWeights(**dict.fromkeys(vars(WEIGHTS), 0.0))
    assert losses.LossWeights(**dict.fromkeys(vars(WEIGHTS), 0.0) | {"tm": 0.1}).tm == 0.1


def test_initial_training_does_not_compute_violations(batch, outputs):
    assert "violation" not in losses.loss_terms(outputs, batch, losses.LossWeights())


@pytest.mark.parametrize("cycles", [1, 3])
def test_losses_of_a_whole_model(shared, cycles):
    folder = shared / "golden/alphafold2"
    stored = np.load(folder / f"full_model_rec{cycles}.npz")
    batch = {k: tensor(v[..., -1]) for k, v in np.load(folder / "full_model_batch.npz").items()}
    outputs = {
        k.removeprefix("out__").removeprefix("sm__"): tensor(stored[k])
        for k in stored.files
        if k.startswith("out__") and not k.startswith("out__loss")
    }
    found = losses.unweighted_losses(outputs, batch)
    # Distogram logits, side-chain frames and others of the stored predictions are in float32.
    for name, term in found.items():
        close(term, stored[f"out__loss__{'plddt_loss' if name == 'plddt' else name}"], 1e-6)
    close(sum(losses.loss_terms(outputs, batch, WEIGHTS).values()), stored["out__loss__loss"], 1e-6)


def test_single_precision_is_close_to_double(batch, outputs):
    single = {
        k: v.detach().float().requires_grad_(v.is_floating_point()) for k, v in outputs.items()
    }
    features = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    found = sum(losses.loss_terms(single, features, WEIGHTS).values())
    exact = sum(losses.loss_terms(outputs, batch, WEIGHTS).values())
    found.backward()
    exact.backward()
    close(found.detach().double(), exact.detach(), 2e-5)
    for name, value in outputs.items():
        if value.grad is not None:
            close(single[name].grad.double(), value.grad, 1e-4)


def test_a_prediction_equal_to_the_reference_has_no_error(batch, outputs):
    frames = batch["rigidgroups_gt_frames"]
    atoms = batch["atom14_gt_positions"]
    renamed = naming.renamed_reference(atoms, batch)
    assert not renamed.swapped.any()
    # The root of 1e-4 is what is left of each error, in units of 10 Å.
    error = fape.sidechain_fape(frames, atoms, renamed, batch)
    assert abs(error - 1e-3) < 1e-5
    scores = losses.lddt_of_residues(atoms[:, 1], atoms[:, 1], batch["backbone_rigid_mask"])
    assert (scores == 1).all()
