"""A whole AlphaFold2 of 76,626 parameters against OpenFold's, with one and with three cycles."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch
from reference_arrays import close
from tiny_model import TINY

from bevatron.models.alphafold2.convert import from_openfold
from bevatron.models.alphafold2.losses import LossWeights, loss_terms, unweighted_losses
from bevatron.models.alphafold2.model import AlphaFold2, cycles_of
from bevatron.models.alphafold2.openfold_layout import openfold_name
from bevatron.models.common.folding import Checkpointing, metrics

ALL_LOSSES = LossWeights(experimentally_resolved=0.01, violation=1.0, tm=0.1)


@pytest.fixture
def model(golden):
    weights = golden("full_model_weights")
    return from_openfold({name: weights[name] for name in weights.arrays}, TINY, torch.float64)


def batch_of(golden, cycles):
    file = golden("full_model_batch")
    return {name: file[name][..., -cycles:] for name in file.arrays}


@pytest.mark.parametrize("cycles", [1, 3])
def test_all_outputs_are_those_of_openfold(golden, model, cycles):
    assert sum(p.numel() for p in model.parameters()) == 76_626
    batch = batch_of(golden, cycles)
    found = model(cycles_of(batch))
    errors, mask = found["tm_logits"], batch["seq_mask"][..., -1] > 0
    found |= {
        "plddt": metrics.expected_lddt(found["lddt_logits"]),
        "predicted_aligned_error": metrics.expected_error(errors),
        "ptm_score": metrics.ptm(errors, mask, mask),
        "final_affine_tensor": found["frames"][-1],
        "single_sm": found["states"][-1],
    }
    file = golden(f"full_model_rec{cycles}")
    references = {n: r for n, r in file.part("out__").items() if not n.startswith("loss__")}
    for name, reference in references.items():
        result = found["single_sm" if name == "sm__single" else name.removeprefix("sm__")]
        # Arrays above 3,000 numbers are stored as float32.
        stored = file.arrays[f"out__{name}"].dtype
        tolerance = 1e-7 if stored == np.float32 else 1e-9
        error = (result - reference).abs().max()
        assert error <= tolerance * reference.abs().max(), name
    assert len(references) == 20


@pytest.mark.parametrize("cycles", [1, 3])
def test_all_gradients_of_the_loss_are_those_of_openfold(golden, model, cycles):
    file, features = golden(f"full_model_rec{cycles}"), golden("full_model_batch")
    found = model(cycles_of(batch_of(golden, cycles)))
    last = {name: features[name][..., -1] for name in features.arrays}
    terms = loss_terms(found, last, ALL_LOSSES)
    # The reference takes the root of the length in float32.
    root = torch.tensor(21.0)
    loss = sum(terms.values()) * (root.sqrt().double() / root.double().sqrt())
    close(loss, file["out__loss__loss"], "loss")
    loss.backward()

    gradients = {openfold_name(name): p.grad for name, p in model.named_parameters()}
    norms = dict(zip(file.arrays["gw_names"], file["gw_norm"], strict=True))
    assert gradients.keys() == norms.keys()
    largest = max(norms.values())
    for name, norm in norms.items():
        # A matrix that is found by two equal ways has a gradient that is rounding alone.
        close(gradients[name].norm(), norm, name, floor=1e-3 * largest)
    for name, reference in file.part("gw__").items():
        tolerance = 1e-7 if file.arrays[f"gw__{name}"].dtype == np.float32 else 1e-9
        close(gradients[name], reference, name, tolerance, floor=1e-3 * largest)


def reference_batch(golden):
    file = golden("full_model_batch")
    batch = {name: file[name][..., -1:] for name in file.arrays}
    return {n: v.float() if v.is_floating_point() else v for n, v in batch.items()}


def test_a_new_model_knows_nothing_and_learns_a_protein(golden):
    batch = reference_batch(golden)
    last, cycles = {name: value[..., 0] for name, value in batch.items()}, cycles_of(batch)
    model = AlphaFold2(replace(TINY, checkpointing=Checkpointing("none")))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(13):
        found = model(cycles, torch.tensor(step))
        losses.append({n: float(v.detach()) for n, v in unweighted_losses(found, last).items()})
        optimizer.zero_grad()
        sum(loss_terms(found, last, LossWeights()).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    first, after = losses[0], losses[-1]
    for name, bins in (("distogram", 64), ("masked_msa", 23), ("plddt", 50), ("tm", 64)):
        assert first[name] == pytest.approx(log(bins), rel=1e-5)
    for name, share in (("masked_msa", 0.5), ("distogram", 0.9), ("supervised_chi", 0.8)):
        assert after[name] < share * first[name], name
