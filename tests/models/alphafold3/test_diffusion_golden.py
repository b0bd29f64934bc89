"""Modules of AlphaFold3's diffusion against reference values: results and all gradients."""

import importlib

import pytest
import torch

from bevatron.models.alphafold3 import edm
from bevatron.models.alphafold3.adaptive import AdaptiveNorm, ConditionedTransition
from bevatron.models.alphafold3.atom_attention import AtomDecoder, AtomEncoder, Atoms
from bevatron.models.alphafold3.atom_tokens import AtomTokens
from bevatron.models.alphafold3.conditioning import DiffusionConditioning, NoiseEmbedding
from bevatron.models.alphafold3.config_diffusion import (
    AtomConfig,
    DiffusionConfig,
    TokenTransformerConfig,
    TrunkWidths,
)
from bevatron.models.alphafold3.diffusion import DiffusionModule
from bevatron.models.alphafold3.diffusion_transformer import (
    ConditionedAttention,
    DiffusionTransformer,
    biases_of,
)
from bevatron.models.common.folding import Checkpointing

golden_modules = importlib.import_module("golden_modules")
check, inputs, load = golden_modules.check, golden_modules.inputs, golden_modules.load
reference, sample, tensor = golden_modules.reference, golden_modules.sample, golden_modules.tensor

pytestmark = pytest.mark.shared

WIDTHS = TrunkWidths(inputs=14, single=12, pair=10)


KEEP = Checkpointing("none")
POLICIES = [KEEP, Checkpointing("all"), Checkpointing("paper"), Checkpointing("segments", 2)]


def small_atoms(num_blocks):
    return AtomConfig(width=16, pair_width=6, num_heads=2, num_blocks=num_blocks)


def test_adaptive_norm(shared):
    golden = reference(shared, "adaln")
    module = load(AdaptiveNorm(20, 24), golden)
    a, s = inputs(golden, "a", "s")
    check(golden, module, {"y": module(a, s)}, a=a, s=s)


def test_conditioned_transition(shared):
    golden = reference(shared, "conditioned_transition")
    module = load(ConditionedTransition(20, 24), golden)
    a, s = inputs(golden, "a", "s")
    check(golden, module, {"y": module(a, s)}, a=a, s=s)


@pytest.mark.parametrize("batched", [False, True])
def test_attention_with_pair_bias(shared, batched):
    golden = reference(shared, "attention_pair_bias_conditioned")
    module = load(ConditionedAttention(21, 24, 16, 3), golden)
    a, s, z = inputs(golden, "a", "s", "z")
    mask = torch.ones(17, dtype=torch.bool)
    (bias,) = biases_of(z, [module.bias])
    given = [x[None] for x in (a, s, bias, mask)] if batched else [a, s, bias, mask]
    check(golden, module, {"y": module(*given)}, a=a, s=s, z=z)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.kind)
def test_diffusion_transformer(shared, policy):
    golden = reference(shared, "diffusion_transformer2")
    module = load(DiffusionTransformer(21, 24, 16, 3, 2, policy), golden)
    a, s, z = inputs(golden, "a", "s", "z")
    mask = torch.ones(17, dtype=torch.bool)
    check(golden, module, {"y": module(a, s, module.biases(z), mask)}, a=a, s=s, z=z)


def test_noise_embedding(shared):
    golden = reference(shared, "fourier_embedding")
    module = load(NoiseEmbedding(32), golden)
    noise = edm.preconditioning(tensor(golden["in__t_hat"])).noise
    golden_modules.assert_same(module(noise), golden["out__y"], "embedding")


def test_atom_encoder_without_coordinates(shared):
    golden = reference(shared, "atom_attention_encoder_input")
    module = load(AtomEncoder(small_atoms(2), 18, None, KEEP), golden)
    batch = sample(golden)
    atoms = module.describe(batch)
    a, q = module(atoms)
    slots = tensor(golden["out__mask_trunked"])[..., None]
    found = {"a": a[0], "q_l": q[0], "c_l": atoms.c[0], "p_lm_masked": atoms.p * slots}
    check(golden, module, found)
    assert torch.equal(atoms.tokens.place, batch["atom_to_tokatom_idx"])


@pytest.mark.parametrize("batched", [False, True])
def test_atom_encoder_with_coordinates(shared, batched):
    golden = reference(shared, "atom_attention_encoder_coords")
    module = load(AtomEncoder(small_atoms(1), 18, (12, 10), KEEP), golden)
    r, s, z = inputs(golden, "r_l", "s", "z")
    batch = sample(golden)
    if batched:
        batch = {name: x if name in {"s", "z"} else x[None] for name, x in batch.items()}
        atoms = module.describe(batch, s, z)
        (a, q), c = (x[0] for x in module(atoms, r[None])), atoms.c[0]
    else:
        atoms = module.describe(batch, s[0], z[0])
        (a, q), c = module(atoms, r), atoms.c
    check(golden, module, {"a": a, "q_l": q, "c_l": c}, r_l=r, s=s, z=z)


def test_atom_decoder(shared):
    golden = reference(shared, "atom_attention_decoder")
    module = load(AtomDecoder(small_atoms(1), 18, KEEP), golden)
    a, q, c = inputs(golden, "a", "q_skip", "c_skip")
    batch = sample(golden)
    mask = batch["atom_mask"]
    tokens = AtomTokens.of(batch["atom_to_token"], mask, a.shape[-2])
    atoms = Atoms(c, tensor(golden["in__p_skip"])[0], tokens, mask)
    check(golden, module, {"r": module(a, q, atoms)}, a=a, q_skip=q, c_skip=c)


def test_diffusion_conditioning(shared):
    golden = reference(shared, "diffusion_conditioning")
    module = load(DiffusionConditioning(WIDTHS, 16), golden)
    s_inputs, s, z = inputs(golden, "s_inputs", "s_trunk", "z_trunk")
    ids = {key.removeprefix("in__"): tensor(golden[key]) for key in golden if key[:4] == "in__"}
    noise = edm.preconditioning(ids["t_hat"]).noise
    found = {"s": module.at_noise(module.singles(s_inputs, s), noise), "z": module.pairs(ids, z)}
    check(golden, module, found, s_inputs=s_inputs, s_trunk=s, z_trunk=z)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.kind)
def test_denoiser(shared, policy):
    golden = reference(shared, "diffusion_module")
    atoms, tokens = small_atoms(1), TokenTransformerConfig(18, 3, 2)
    config = DiffusionConfig(atoms, tokens, atoms, checkpointing=policy)
    module = load(DiffusionModule(config, WIDTHS), golden)
    x, s_inputs, s, z = inputs(golden, "x_noisy", "s_inputs", "s_trunk", "z_trunk")
    shared_by_copies = module.describe(sample(golden), s_inputs, s, z)
    found = module(x, tensor(golden["in__t_hat"]), shared_by_copies)
    with torch.no_grad():
        beforehand = _one_by_one(module, x, tensor(golden["in__t_hat"]), shared_by_copies)
    golden_modules.assert_same(beforehand, golden["out__x_denoised"], "of conditions beforehand")
    check(
        golden,
        module,
        {"x_denoised": found},
        x_noisy=x,
        s_inputs=s_inputs,
        s_trunk=s,
        z_trunk=z,
    )


def _one_by_one(module, x, sigma, shared):
    """Denoise every copy as a sampling does: its level is conditioned with the others."""
    prepared = module.prepare(shared)
    levels = module.levels(sigma.flatten(), prepared)
    copies = zip(x.split(1, -3), sigma.split(1, -1), levels, strict=True)
    return torch.cat([module(one, at, prepared, level) for one, at, level in copies], -3)
