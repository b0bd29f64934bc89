"""The model with its Triton kernels, interpreted or compiled, against the reference."""

from dataclasses import replace

import pytest
import torch
from tiny_model import random_features, random_weights

from bevatron import kernels
from bevatron.models.alphafold2 import AlphaFold2, AlphaFold2Config
from bevatron.models.common.folding import Checkpointing

pytest.importorskip("triton", reason="the kernels need the package triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPERATORS = {
    "global_attention",
    "layer_norm",
    "layer_norm_linear",
    "outer_product_mean",
    "pair_attention",
    "qkvg",
    "transition",
    "triangle_multiply",
}


@pytest.mark.slow
def test_kernels_give_the_structure_and_gradients_of_the_reference():
    small = AlphaFold2Config.preset("small")
    config = replace(
        small,
        evoformer=replace(small.evoformer, num_blocks=1),
        structure=replace(small.structure, num_blocks=1),
        checkpointing=Checkpointing("none"),
    )
    model = random_weights(AlphaFold2(config)).to(DEVICE)
    features = random_features(length=3, rows=2, extra=2, templates=1)
    features = {name: value.to(DEVICE) for name, value in features.items()}
    names = ("positions", "distogram_logits", "lddt_logits", "masked_msa_logits")
    found, gradients = {}, {}
    for implementation in ("reference", "triton"):
        kernels.reset_launches()
        with kernels.use(implementation):
            found[implementation] = model([features])
            loss = sum(found[implementation][name].square().mean() for name in names)
            gradients[implementation] = torch.autograd.grad(
                loss, list(model.parameters()), allow_unused=True, materialize_grads=True
            )
        ran = {name for name, kind in kernels.launches() if kind == implementation}
        assert ran >= OPERATORS, OPERATORS - ran
    for name in names:
        expected = found["reference"][name]
        error = (found["triton"][name] - expected).abs().max()
        assert error <= 2e-5 * expected.abs().max(), name
    largest = max(gradient.abs().max() for gradient in gradients["reference"])
    for one, other in zip(gradients["triton"], gradients["reference"], strict=True):
        assert (one - other).abs().max() <= 1e-4 * max(other.abs().max(), 1e-3 * largest)
