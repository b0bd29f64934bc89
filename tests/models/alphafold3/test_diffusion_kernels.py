"""The diffusion module with fused operators, and in bfloat16, against plain PyTorch."""

import importlib
import weakref

import pytest
import torch

from bevatron import kernels
from bevatron.models.alphafold3 import diffusion
from bevatron.models.alphafold3.atom_transformer import AtomTransformer
from bevatron.models.alphafold3.config_diffusion import (
    AtomConfig,
    DiffusionConfig,
    TokenTransformerConfig,
    TrunkWidths,
)
from bevatron.models.alphafold3.diffusion import DiffusionModule
from bevatron.models.common.folding import Checkpointing
from bevatron.testing import assert_close

random_complex = importlib.import_module("random_complex")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = TrunkWidths(inputs=9, single=16, pair=16)


def of_blocks(number):
    atoms = AtomConfig(width=16, pair_width=16, num_heads=2, num_blocks=number)
    tokens = TokenTransformerConfig(16, 2, number)
    module = DiffusionModule(DiffusionConfig(atoms, tokens, atoms, noise_width=8), WIDTHS)
    random_complex.randomise(module)
    return module


@pytest.fixture
def module():
    return of_blocks(1)


def outcome(module, dtype):
    """Denoised coordinates, and gradients of trunk and weights."""
    module.zero_grad()
    batch = random_complex.features([5, 1, 9, 14, 4])
    batch = {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}
    trunk = [x.to(dtype).requires_grad_() for x in random_complex.trunk(5, WIDTHS)]
    generator = torch.Generator().manual_seed(0)
    x = 16 * torch.randn(2, 33, 3, generator=generator)
    found = module(x, torch.tensor([3.0, 40.0]), module.describe(batch, *trunk))
    found.square().mean().backward()
    weights = [weight.grad.clone() for weight in module.parameters()]
    return found.detach(), [x.grad for x in trunk] + weights


def test_fused_operators_read_windows_and_shared_conditions_in_place():
    pytest.importorskip("triton")
    module = AtomTransformer(16, 16, 2, 1, Checkpointing())
    random_complex.randomise(module)
    module.to(DEVICE)
    shapes = ((2, 33, 16), (1, 33, 16), (2, 32, 128, 16))
    given = [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]
    mask = torch.arange(33, device=DEVICE) < 30
    cotangent = torch.randn(2, 33, 16, device=DEVICE)
    found = {}
    for implementation in ("reference", "triton"):
        with kernels.use(implementation):
            kernels.reset_launches()
            result = module(*given, mask)
            sources = [*given, *module.parameters()]
            found[implementation] = [result, *torch.autograd.grad(result, sources, cotangent)]
            assert {which for _, which in kernels.launches()} == {implementation}
    for fused, plain in zip(found["triton"], found["reference"], strict=True):
        assert_close(fused, plain, 2e-5)


@pytest.mark.parametrize(
    ("number", "dtype", "tolerance"), [(2, torch.float32, 2e-5), (1, torch.bfloat16, 0.02)]
)
def test_a_sampling_conditions_its_levels_beforehand(number, dtype, tolerance, monkeypatch):
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        implementation = "reference"
    else:
        pytest.importorskip("triton")
        implementation = "triton"
    monkeypatch.setattr(diffusion, "ROWS_AT_ONCE", 12)  # two levels of five tokens
    made, conditions = [], diffusion.block_conditions

    def noted(s, blocks):
        assert all(one() is None for one in made)  # nobody holds those of the levels before
        found = conditions(s, blocks)
        made.extend(weakref.ref(given.gate) for block in found for given in block)
        return found

    monkeypatch.setattr(diffusion, "block_conditions", noted)
    module = of_blocks(number).to(DEVICE)
    batch = random_complex.features([5, 1, 9, 14, 4])
    batch = {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}
    batch = {name: x.to(DEVICE) for name, x in batch.items()}
    trunk = [x.to(DEVICE, dtype) for x in random_complex.trunk(5, WIDTHS)]
    x = 16 * torch.randn(2, 33, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    sigmas = torch.tensor([900.0, 3.0, 1.0], device=DEVICE)
    with torch.no_grad(), kernels.use(implementation):
        shared = module.describe(batch, *trunk)
        prepared = module.prepare(shared)
        levels = module.levels(sigmas, prepared)
        for sigma in sigmas:
            found = module(x, sigma.expand(2), prepared, next(levels))
            with kernels.use("reference"):
                expected = module(x, sigma.expand(2), shared)
            assert_close(found, expected, tolerance)


def test_a_trunk_in_bfloat16_leaves_coordinates_in_float32(module):
    expected, _ = outcome(module, torch.float32)
    found, gradients = outcome(module, torch.bfloat16)
    assert found.dtype == torch.float32
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert_close(found, expected, 0.02)


def test_the_update_of_coordinates_is_made_in_float32_of_rows_in_bfloat16(module):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 33, 16, generator=generator).bfloat16()
    tokens, seen = torch.zeros(2, 5, 16).bfloat16(), []
    module.decoder.norm.register_forward_hook(lambda _, given, made: seen.append((*given, made)))
    shared = module.describe(
        random_complex.features([5, 1, 9, 14, 4]),
        *(x.bfloat16() for x in random_complex.trunk(5, WIDTHS)),
    )
    found = module.decoder(tokens, rows, shared.atoms)
    assert {x.dtype for x in (*seen[0], found)} == {torch.float32}


def test_results_repeat_bit_for_bit(module):
    first, gradients = outcome(module, torch.float32)
    again, others = outcome(module, torch.float32)
    assert torch.equal(first, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
