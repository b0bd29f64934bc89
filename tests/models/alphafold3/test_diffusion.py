"""What holds for AlphaFold3's diffusion module, whatever its weights: padding, copies, samples."""

import importlib

import pytest
import torch

from bevatron.kernels import pair_attention, window_attention
from bevatron.models.alphafold3 import atom_transformer, atom_windows, edm, sampler
from bevatron.models.alphafold3.atom_tokens import AtomTokens
from bevatron.models.alphafold3.config_diffusion import (
    AtomConfig,
    DiffusionConfig,
    TokenTransformerConfig,
    TrunkWidths,
)
from bevatron.models.alphafold3.convert import protenix_names
from bevatron.models.alphafold3.diffusion import DiffusionModule
from bevatron.models.common.folding import attention as folding_attention
from bevatron.models.common.folding.normal import SeededNormal
from bevatron.testing import assert_close

random_complex = importlib.import_module("random_complex")

TOLERANCE = 1e-11
WIDTHS = TrunkWidths(inputs=9, single=8, pair=6)
COPIES = 3


@pytest.fixture
def module():
    atoms = AtomConfig(width=16, pair_width=4, num_heads=2, num_blocks=1)
    tokens = TokenTransformerConfig(16, 2, 1)
    module = DiffusionModule(DiffusionConfig(atoms, tokens, atoms, noise_width=8), WIDTHS).double()
    random_complex.randomise(module)
    return module


@pytest.fixture
def batch():
    return random_complex.features([5, 1, 9, 14, 1, 1, 7])


@pytest.fixture
def trunk():
    return random_complex.trunk(7, WIDTHS)


def denoised(module, batch, trunk, x, sigma):
    return module(x, sigma, module.describe(batch, *trunk))


def noisy(num_atoms):
    normal = SeededNormal(torch.tensor(5), torch.float64)
    x = 16 * normal((COPIES, num_atoms, 3))
    return x, torch.tensor([0.5, 9.0, 200.0], dtype=torch.float64)


@pytest.mark.parametrize("atoms", [1, 26, 60])
def test_padding_changes_no_atom(module, batch, trunk, atoms):
    x, sigma = noisy(38)
    expected = denoised(module, batch, trunk, x, sigma)
    wide, filled = random_complex.padded(batch, trunk, atoms=atoms, tokens=2)
    more = torch.full((COPIES, atoms, 3), 77.0, dtype=torch.float64)
    found = denoised(module, wide, filled, torch.cat([x, more], -2), sigma)
    assert found.isfinite().all()
    assert_close(found[:, :38], expected, TOLERANCE)


def test_padding_changes_no_gradient(module, batch, trunk):
    x, sigma = noisy(38)
    denoised(module, batch, trunk, x, sigma).square().sum().backward()
    expected = [weight.grad.clone() for weight in module.parameters()]
    module.zero_grad()
    wide, filled = random_complex.padded(batch, trunk, atoms=40, tokens=2)
    more = torch.full((COPIES, 40, 3), 77.0, dtype=torch.float64)
    found = denoised(module, wide, filled, torch.cat([x, more], -2), sigma)
    found[:, :38].square().sum().backward()
    for weight, gradient in zip(module.parameters(), expected, strict=True):
        assert_close(weight.grad, gradient, TOLERANCE)


def test_a_copy_is_denoised_as_if_alone(module, batch, trunk):
    x, sigma = noisy(38)
    together = denoised(module, batch, trunk, x, sigma)
    for copy in range(COPIES):
        one = slice(copy, copy + 1)
        alone = denoised(module, batch, trunk, x[one], sigma[one])
        assert_close(alone, together[one], TOLERANCE)


def test_a_sample_of_a_batch_is_denoised_as_if_alone(module, batch, trunk):
    other = random_complex.features([2, 11, 3, 14, 6, 1, 1], seed=9)
    second = random_complex.trunk(7, WIDTHS, seed=9)
    x, sigma = noisy(38)
    both = {name: torch.stack([batch[name], other[name]]) for name in batch}
    pairs = [torch.stack(pair) for pair in zip(trunk, second, strict=True)]
    found = denoised(module, both, pairs, torch.stack([x, -x]), torch.stack([sigma, sigma]))
    assert_close(found[0], denoised(module, batch, trunk, x, sigma), TOLERANCE)
    assert_close(found[1], denoised(module, other, second, -x, sigma), TOLERANCE)


def test_rollout_keeps_no_graph_and_repeats(module, batch, trunk):
    described = module.describe(batch, *trunk)

    def rollout():
        normal = SeededNormal(torch.tensor(2), torch.float64)
        start = normal((2, 38, 3))
        steps = sampler.draw_steps(4, (2, 38), normal)
        levels = edm.schedule(4, dtype=torch.float64)
        denoise = lambda x, sigma: module(x, sigma, described)  # noqa: E731
        return sampler.sample(denoise, levels, start, steps, batch["atom_mask"])

    found = rollout()
    assert not found.requires_grad
    assert found.isfinite().all()
    assert torch.equal(found, rollout())


def test_pairs_are_not_repeated_for_copies(module, batch, trunk, monkeypatch):
    """Biases have as many numbers for three copies as for one."""
    shapes = []

    def of_windows(q, k, v, gate, bias, mask):
        shapes.append((tuple(q.shape[:2]), tuple(bias.shape)))
        return window_attention(q, k, v, gate, bias, mask)

    def of_tokens(q, k, v, bias, mask, **others):
        shapes.append((tuple(q.shape[:2]), tuple(bias.shape)))
        return pair_attention(q, k, v, bias, mask, **others)

    monkeypatch.setattr(atom_transformer, "window_attention", of_windows)
    monkeypatch.setattr(folding_attention, "pair_attention", of_tokens)
    denoised(module, batch, trunk, *noisy(38))
    atoms, tokens = ((1, COPIES), (1, 2, 2, 32, 128)), ((1, COPIES), (1, 1, 2, 7, 7))
    assert shapes == [atoms, tokens, atoms]


def test_a_new_module_denoises_without_the_trunk(batch, trunk):
    """Gates are almost closed at first and what trunk and noise add is zero."""
    atoms = AtomConfig(width=16, pair_width=4, num_heads=2, num_blocks=1)
    tokens = TokenTransformerConfig(16, 2, 1)
    new = DiffusionModule(DiffusionConfig(atoms, tokens, atoms, noise_width=8), WIDTHS).double()
    gates = [p for name, p in new.named_parameters() if name.endswith("output_gate.bias")]
    assert len(gates) == 6
    assert all(torch.equal(gate, torch.full_like(gate, -2)) for gate in gates)
    x, sigma = noisy(38)
    other = [2 * given for given in trunk]
    assert_close(denoised(new, batch, other, x, sigma), denoised(new, batch, trunk, x, sigma), 0.1)


def test_windows_hold_32_queries_and_the_128_atoms_around_them():
    atoms = torch.arange(70.0)[:, None]
    queries, keys = atom_windows.queries_of(atoms)[..., 0], atom_windows.keys_of(atoms)[..., 0]
    for window in range(3):
        for slots, first in ((queries[window], 0), (keys[window], -48)):
            numbers = torch.arange(len(slots)) + 32 * window + first
            inside = (numbers >= 0) & (numbers < 70)
            assert torch.equal(slots, torch.where(inside, numbers, 0).float())


def test_keys_of_windows_are_one_copy_of_the_atoms():
    atoms = torch.randn(5, 64, 8)
    assert atom_windows.keys_of(atoms).untyped_storage().nbytes() == 4 * 5 * (64 + 96) * 8


def test_atoms_are_averaged_in_each_token_and_padding_is_in_none():
    token = torch.tensor([0, 0, 2, 2, 2, 0, 0])
    mask = torch.tensor([True] * 5 + [False] * 2)
    tokens = AtomTokens.of(token, mask, 4)
    x = torch.arange(14.0).reshape(2, 7, 1)
    expected = torch.tensor([[0.5, 0.0, 3.0, 0.0], [7.5, 0.0, 10.0, 0.0]])[..., None]
    assert torch.equal(tokens.mean(x), expected)
    assert tokens.place[:5].tolist() == [0, 1, 0, 1, 2]


def test_spreading_and_summing_are_adjoint():
    token = torch.tensor([0, 0, 2, 2, 2, 3, 3])
    mask = torch.tensor([True] * 5 + [False] * 2)
    tokens = AtomTokens.of(token, mask, 4)
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 7, 3, dtype=torch.float64)
    spread = tokens.spread(x)
    assert torch.equal(spread[:, :5], x[:, token[:5]])
    (gradient,) = torch.autograd.grad((spread * y).sum(), x)
    counts = torch.tensor([2.0, 1.0, 3.0, 1.0])[:, None]
    assert_close(gradient, tokens.mean(y) * counts, TOLERANCE)


def test_names_in_files_are_distinct_and_cover_every_weight(module):
    names = protenix_names(module)
    assert set(names) == set(module.state_dict())
    assert len(set(names.values())) == len(names)
