"""Losses of AlphaFold3 against reference values, and what holds for any complex."""

import importlib
from dataclasses import replace

import pytest
import torch

from bevatron.errors import ConfigError
from bevatron.models.alphafold3 import edm, losses
from bevatron.models.alphafold3.losses import confidence, diffusion
from bevatron.testing import assert_close

complexes = importlib.import_module("complexes")

ALL = losses.LossWeights(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
PREDICTION = {"mse": "denoised", "bond": "denoised", "smooth_lddt": "denoised"}


@pytest.fixture(scope="module")
def golden(shared):
    return complexes.reference(shared, "losses")


@pytest.fixture
def batch(golden):
    return complexes.loss_batch(golden)


@pytest.fixture
def outputs(golden):
    return complexes.loss_outputs(golden)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("mse", "mse"),
        ("bond", "bond_sparse"),
        ("smooth_lddt", "smooth_lddt"),
        ("distogram", "distogram"),
        ("plddt", "plddt"),
        ("pde", "pde"),
        ("resolved", "resolved"),
        ("pae", "pae"),
    ],
)
def test_terms_and_gradients_equal_the_reference(golden, batch, outputs, name, stored):
    value = losses.structure_losses(outputs, batch, [name])[name]
    assert_close(value.detach(), complexes.tensor(golden[f"out__{stored}"]), 1e-9, name)
    prediction = PREDICTION.get(name, name)
    (gradient,) = torch.autograd.grad(value, outputs[prediction])
    key = f"g__{stored}__{'coordinate' if prediction == 'denoised' else prediction}"
    # Large gradients are stored in float32.
    tolerance = 1e-9 if golden[key].dtype == "float64" else 1e-7
    assert_close(gradient, complexes.tensor(golden[key]), tolerance, key)


@pytest.mark.shared
def test_targets_equal_the_reference(golden, batch, outputs):
    truth, resolved, x = batch["position"], batch["resolved"], outputs["rollout"]
    framed = batch["has_frame"]
    pairs = complexes.tensor(golden["out__pae_pair_mask"]) > 0
    error = confidence.alignment_error(x, truth, batch["frame_atoms"], batch["centre_atom"])
    squared = error.square()[:, framed] * pairs
    assert_close(squared, complexes.tensor(golden["out__pae_squared_error"]), 1e-9)
    bins = confidence.bin_of(error[:, framed], confidence.ERROR_EDGES)
    assert torch.equal(bins[:, pairs], complexes.tensor(golden["out__pae_bin"]).long()[:, pairs])
    counts = losses.is_standard_residue(batch) & resolved[batch["centre_atom"]]
    nucleic = (batch["molecule_type"] == 1) | (batch["molecule_type"] == 2)
    preserved, considered = confidence.atom_lddt(x, truth, batch["centre_atom"], counts, nucleic)
    assert_close(preserved[:, resolved], complexes.tensor(golden["out__atom_lddt_sum"]), 1e-12)
    assert_close(
        considered[:, resolved], complexes.tensor(golden["out__atom_lddt_count"]).double(), 1e-12
    )
    frames = truth[batch["frame_atoms"][framed]]
    local = confidence.in_frames(truth[batch["centre_atom"]], frames)
    assert_close(local, complexes.tensor(golden["out__express_in_frame"]), 1e-9)


@pytest.mark.shared
def test_the_squared_error_without_its_noise_weight_equals_the_reference(golden, batch, outputs):
    x, truth, resolved = outputs["denoised"], batch["position"], batch["resolved"]
    weight = diffusion.atom_weights(
        batch["molecule_type"], batch["atom_to_token"], resolved, x.dtype
    )
    assert_close(weight, complexes.tensor(golden["out__align_weight"]), 1e-12)
    value = diffusion.aligned_squared_error(x, truth, resolved, weight).mean()
    assert_close(value.detach(), complexes.tensor(golden["out__mse_unscaled"]), 1e-9)
    scale = edm.loss_weight(outputs["sigma"])
    assert_close(scale, complexes.tensor(golden["out__per_sample_scale"]), 1e-12)


@pytest.mark.parametrize("factor", ["pae", "bond", "smooth_lddt"])
def test_a_loss_without_weights_is_refused(factor):
    """Factors of terms that have no weight are none either."""
    nothing = dict.fromkeys(("confidence", "diffusion", "distogram"), 0.0)
    with pytest.raises(ConfigError, match="diffusion: all weights are 0, nothing would be learnt"):
        losses.LossWeights(**nothing, **{factor: 1.0})
    assert losses.LossWeights(**nothing | {"confidence": 1e-4}).confidence == 1e-4


@pytest.mark.shared
def test_the_total_is_the_weighted_sum_of_the_terms_of_its_stage(golden, batch, outputs):
    terms = losses.total_loss(outputs, batch, losses.LossWeights(pae=1.0, smooth_lddt=0.0))
    assert set(terms) == {"mse", "distogram", "plddt", "pde", "resolved", "pae"}
    g = {name: float(golden[f"out__{name}"]) for name in terms}
    expected = 4 * g["mse"] + 0.03 * g["distogram"]
    expected += 1e-4 * (g["plddt"] + g["pde"] + g["resolved"] + g["pae"])
    total = sum(term.sum.detach() / term.count for term in terms.values())
    assert float(total) == pytest.approx(expected, rel=1e-9)
    assert set(losses.total_loss(outputs, batch, losses.STAGES["fine_tuning_1"])) == {
        *("mse", "bond", "distogram", "plddt", "pde", "resolved")
    }
    last = set(losses.total_loss(outputs, batch, losses.STAGES["fine_tuning_3"]))
    assert last == set(losses.CONFIDENCES)


@pytest.mark.shared
def test_without_a_confidence_head_its_terms_are_left_out(batch, outputs):
    trunk = {name: outputs[name] for name in ("denoised", "sigma", "distogram")}
    terms = losses.total_loss(trunk, batch, ALL)
    assert set(terms) == {"mse", "bond", "smooth_lddt", "distogram"}


@pytest.mark.shared
@pytest.mark.parametrize("resolution", [float("nan"), 0.0, 0.05, 4.01])
def test_confidences_learn_nothing_outside_the_range_of_resolutions(batch, outputs, resolution):
    batch["resolution"] = torch.tensor(resolution, dtype=torch.float64)
    terms = losses.total_loss(outputs, batch, ALL)
    assert all(float(terms[name].sum.detach()) == 0 for name in losses.CONFIDENCES)
    assert float(terms["mse"].sum.detach()) > 0
    sum(terms[name].sum for name in losses.CONFIDENCES).backward()
    assert all(outputs[name].grad.abs().max() == 0 for name in losses.CONFIDENCES)


def stacked(batch, outputs, copies):
    return (
        {name: torch.stack([value] * copies) for name, value in batch.items()},
        {
            name: torch.stack([value.detach()] * copies).requires_grad_()
            for name, value in outputs.items()
        },
    )


@pytest.mark.shared
def test_a_batch_is_the_sum_of_its_structures_and_weight_zero_leaves_one_out(batch, outputs):
    alone = losses.total_loss(outputs, batch, ALL)
    many, given = stacked(batch, outputs, 3)
    many["weight"] = torch.tensor([1.0, 0, 1], dtype=torch.float64)
    given["denoised"].data[1] += 1
    terms = losses.total_loss(given, many, ALL)
    for name, term in terms.items():
        assert float(term.count) == 2
        assert_close(term.sum.detach(), 2 * alone[name].sum.detach(), 1e-12, name)
    sum(term.sum for term in terms.values()).backward()
    assert given["denoised"].grad[1].abs().max() == 0
    assert given["pae"].grad[1].abs().max() == 0


def padded(batch, outputs, atoms, tokens):
    """Add padding of garbage: atoms at the end of the last token, tokens without atoms."""

    def longer(value, axes, count, fill):
        for axis in axes:
            shape = list(value.shape)
            shape[axis] = count
            value = torch.cat([value, torch.full(shape, fill, dtype=value.dtype)], axis)
        return value

    n, a = len(batch["token_mask"]), len(batch["atom_mask"])
    fills = {"resolved": False, "atom_mask": False, "atom_to_token": n, "position": 3.0}
    batch = {
        name: longer(value, (0,), atoms, fills[name])
        if name in fills
        else value
        if name in ("resolution", "weight", "polymer_ligand_bonds")
        else longer(value, (0,), tokens, a if name.endswith("atom") else 0)
        for name, value in batch.items()
    }
    bonds = torch.full((2, 2), -1)
    batch["polymer_ligand_bonds"] = torch.cat([batch["polymer_ligand_bonds"], bonds])
    axes = {"denoised": (1,), "rollout": (1,), "plddt": (1,), "resolved": (1,)}
    outputs = {
        name: value
        if name == "sigma"
        else longer(value.detach(), axes[name], atoms, 7.0)
        if name in axes
        else longer(value.detach(), (-3, -2), tokens, 7.0)
        for name, value in outputs.items()
    }
    return batch, {k: v.clone().requires_grad_() for k, v in outputs.items()}


@pytest.mark.shared
def test_padding_changes_nothing_and_gets_no_gradient(batch, outputs):
    alone = losses.total_loss(outputs, batch, ALL)
    batch, outputs = padded(batch, outputs, 5, 2)
    terms = losses.total_loss(outputs, batch, ALL)
    for name, term in terms.items():
        assert_close(term.sum.detach(), alone[name].sum.detach(), 1e-12, name)
    sum(term.sum for term in terms.values()).backward()
    assert outputs["denoised"].grad[:, -5:].abs().max() == 0
    assert outputs["plddt"].grad[:, -5:].abs().max() == 0
    assert outputs["pae"].grad[:, -2:].abs().max() == 0
    assert outputs["distogram"].grad[:, -2:].abs().max() == 0
    assert all(value.grad is None or value.grad.isfinite().all() for value in outputs.values())


@pytest.mark.shared
def test_a_structure_without_resolved_atoms_has_a_finite_loss(batch, outputs):
    batch["resolved"] = torch.zeros_like(batch["resolved"])
    batch["position"] = torch.zeros_like(batch["position"])
    terms = losses.total_loss(outputs, batch, replace(ALL))
    sum(term.sum for term in terms.values()).backward()
    assert all(term.sum.isfinite() for term in terms.values())
    assert all(value.grad is None or value.grad.isfinite().all() for value in outputs.values())


@pytest.mark.shared
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_outputs_give_losses_of_single_precision(golden, batch, outputs, dtype):
    wide = losses.total_loss(outputs, batch, ALL)
    batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    narrow = {
        k: v.to(dtype if k in losses.CONFIDENCES else torch.float32) for k, v in outputs.items()
    }
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        terms = losses.total_loss(narrow, batch, ALL)
    for name, term in terms.items():
        assert term.sum.dtype == torch.float32
        tight = 2e-5 if dtype == torch.float32 or name not in losses.CONFIDENCES else 2e-2
        assert_close(term.sum.double().detach(), wide[name].sum.detach(), tight, name)


@pytest.mark.shared
def test_the_loss_never_waits_for_the_device(batch, outputs):
    """Tensors without data: asking one for a number is an error."""
    batch = {name: value.to("meta") for name, value in batch.items()}
    outputs = {name: value.detach().to("meta").requires_grad_() for name, value in outputs.items()}
    terms = losses.total_loss(outputs, batch, ALL)
    sum(term.sum for term in terms.values()).backward()
    assert outputs["denoised"].grad.shape == outputs["denoised"].shape
