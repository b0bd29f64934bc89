"""The trunk with fused operators, and in bfloat16, against plain PyTorch."""

import copy

import pytest
import torch
from random_complex import randomise
from random_tokens import inputs, token_fields

from bevatron import kernels
from bevatron.models.alphafold3.config import TOKEN_FEATURES, AlphaFold3Config
from bevatron.models.alphafold3.config_diffusion import TrunkWidths
from bevatron.models.alphafold3.config_trunk import (
    MsaConfig,
    PairConfig,
    PairformerConfig,
    TemplateConfig,
)
from bevatron.models.alphafold3.templates import template_pairs
from bevatron.models.alphafold3.trunk import Trunk
from bevatron.models.common.folding import Checkpointing
from bevatron.testing import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAIR = PairConfig(hidden=8, num_heads=2, head_width=8, transition=2)
CONFIG = AlphaFold3Config(
    widths=TrunkWidths(inputs=TOKEN_FEATURES + 3, single=16, pair=8),
    templates=TemplateConfig(1, 8, PAIR),
    msa=MsaConfig(2, 8, 4, 2, 8, 2, 0.15, PAIR),
    pairformer=PairformerConfig(1, 2, 8, 2, PAIR),
    checkpointing=Checkpointing(),
)


@pytest.fixture(scope="module")
def trunk():
    module = Trunk(CONFIG).double()
    randomise(module)
    return module.float()


def outcome(module, dtype):
    """Single and pair representation, and gradients of the input and the weights."""
    module.zero_grad()
    batch = token_fields(5, rows=3, real=4)
    x = inputs(5, CONFIG.widths.inputs).to(dtype).requires_grad_()
    s, z = module(batch, x, seed=torch.tensor(7))
    assert s.dtype == z.dtype == dtype
    (s.float().sin().sum() + z.float().sin().sum()).backward()
    return [s.detach(), z.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def update_of(name, trunk):
    """One part of the trunk as a function of (s, z) of three tokens, and its weights."""
    batch = {key: value.to(DEVICE) for key, value in token_fields(3, rows=3, real=2).items()}
    tokens = batch["token_mask"]
    pairs = tokens[:, None] & tokens
    geometry = template_pairs(
        batch["template_pseudo_beta"].float(),
        batch["template_pseudo_beta_mask"],
        batch["template_backbone"].float(),
        batch["template_backbone_mask"],
        torch.float32,
    )
    restype, chain = batch["template_restype"], batch["asym_id"]
    block, single = trunk.msa.blocks[0], trunk.pairformer.blocks[0].attention
    found = {
        "templates": (
            trunk.templates,
            lambda _, z: trunk.templates(z, restype, geometry, chain, pairs),
        ),
        "averaging": (block.averaging, lambda s, z: block.averaging(s.expand(3, 3, 8), z, tokens)),
        "outer product": (
            block.outer_product_mean,
            lambda s, _: block.outer_product_mean(
                s * torch.ones(3, 1, 1, device=DEVICE), batch["msa_mask"]
            ),
        ),
        "single": (single, lambda s, z: single(torch.cat([s, s], -1), z, tokens)),
    }
    return found[name]


@pytest.mark.parametrize("name", ["templates", "averaging", "outer product", "single"])
def test_fused_operators_take_what_the_trunk_gives_them(name, trunk):
    pytest.importorskip("triton")
    module, run = update_of(name, copy.deepcopy(trunk).to(DEVICE))
    generator = torch.Generator().manual_seed(3)
    s, z = (
        torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()
        for shape in ((3, 8), (3, 3, 8))
    )
    found = {}
    for implementation in ("reference", "triton"):
        with kernels.use(implementation):
            kernels.reset_launches()
            result = run(s, z)
            sources = [s, z, *module.parameters()]
            gradients = torch.autograd.grad(
                result.sin().sum(), sources, allow_unused=True, materialize_grads=True
            )
            found[implementation] = [result, *gradients]
            assert {which for _, which in kernels.launches()} == {implementation}
    largest = max(gradient.abs().max() for gradient in found["reference"][1:])
    for fused, plain in zip(found["triton"], found["reference"], strict=True):
        # Shifts of logits have no gradient but rounding.
        assert (fused - plain).abs().max() < 2e-5 * max(plain.abs().max(), 1e-2 * largest)


def test_all_activations_are_bfloat16_where_the_input_embedding_is(trunk):
    expected = outcome(trunk, torch.float32)
    found = outcome(trunk, torch.bfloat16)
    assert all(tensor.isfinite().all() for tensor in found)
    for got, want in zip(found[:2], expected[:2], strict=True):
        assert_close(got, want, 0.05)


def test_results_repeat_bit_for_bit(trunk):
    first, again = outcome(trunk, torch.float32), outcome(trunk, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
