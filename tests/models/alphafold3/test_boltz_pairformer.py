"""A Pairformer block with weights of Boltz-2 computes what Boltz-2 does."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bevatron.errors import CheckpointError
from bevatron.models.alphafold3.boltz_pairformer import from_boltz, to_boltz
from bevatron.models.alphafold3.config_trunk import PairConfig, PairformerConfig
from bevatron.models.alphafold3.pairformer import Pairformer, PairformerBlock
from bevatron.models.common.folding import Checkpointing
from bevatron.testing import assert_close

S, Z, HEADS, TOKENS = 8, 6, 2, 5
PAIR = PairConfig(hidden=Z, num_heads=2, head_width=3, transition=4, dropout=0.0)
CONFIG = PairformerConfig(2, HEADS, S // HEADS, 4, PAIR)


def block():
    return PairformerBlock(S, Z, CONFIG, Checkpointing()).double()


def stack():
    return Pairformer(S, Z, CONFIG, Checkpointing()).double()


@pytest.fixture(scope="module")
def golden():
    """Boltz 2.2.1's layer in float64, its float32 parts included; the last token is masked."""
    with np.load(Path(__file__).with_name("boltz_pairformer.npz")) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def of(golden, kind):
    found = {n.removeprefix(kind): v for n, v in golden.items() if n.startswith(kind)}
    return {n: v.double() if v.is_floating_point() else v for n, v in found.items()}


def test_values_and_gradients_are_those_of_boltz(golden):
    module, given, cotangent = block(), of(golden, "in__"), of(golden, "cot__")
    module.load_state_dict(from_boltz(module, of(golden, "w__")))
    mask = given.pop("mask")
    inputs = {name: value.requires_grad_() for name, value in given.items()}
    pairs = mask[:, :, None] & mask[:, None, :]
    found = dict(zip("sz", module((inputs["s"], inputs["z"]), mask, pairs), strict=True))
    for name, valid in {"s": mask[..., None], "z": pairs[..., None]}.items():
        assert_close(found[name] * valid, of(golden, "out__")[name] * valid, 1e-12)
    sum((found[name] * cotangent[name]).sum() for name in found).backward()
    for name, gradient in of(golden, "gin__").items():
        assert_close(inputs[name].grad, gradient, 1e-12)
    gradients = from_boltz(module, of(golden, "gw__"))
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, weight in module.named_parameters():  # what shifts all logits of a row has none
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-12, atol=1e-12 * largest)


def test_a_stack_goes_there_and_back():
    module = stack()
    theirs = to_boltz(module)
    assert theirs["layers.1.tri_mul_in.p_in.weight"].shape == (2 * Z, Z)
    assert theirs["layers.0.attention.proj_q.bias"].shape == (S,)
    back = from_boltz(module, theirs)
    for name, value in module.state_dict().items():
        assert torch.equal(back[name], value), name
    with pytest.raises(CheckpointError, match=r"layers\.0\.pre_norm_s\.weight: .* is missing"):
        from_boltz(module, {n: v for n, v in theirs.items() if "0.pre_norm_s.w" not in n})


def test_the_names_are_those_of_boltz():
    layers = pytest.importorskip("boltz.model.layers.pairformer", reason="Boltz is not installed")
    layer = layers.PairformerLayer(
        S, Z, num_heads=HEADS, pairwise_head_width=3, pairwise_num_heads=2, v2=True
    )
    theirs = to_boltz(block())
    assert {n: v.shape for n, v in theirs.items()} == {
        n: v.shape for n, v in layer.state_dict().items()
    }
