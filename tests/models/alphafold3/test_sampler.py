"""Noise levels and sampling: against reference values, and what holds for any draw."""

import importlib

import pytest
import torch

from bevatron.models.alphafold3 import augmentation, edm, noising, sampler
from bevatron.models.common.folding.normal import SeededNormal
from bevatron.testing import assert_close

golden_modules = importlib.import_module("golden_modules")
reference, tensor = golden_modules.reference, golden_modules.tensor

TOLERANCE = 1e-12


@pytest.mark.shared
def test_noise_levels_and_factors(shared):
    golden = reference(shared, "edm")
    sigma = tensor(golden["in__sigma"])
    factors = edm.preconditioning(sigma)
    found = {
        "c_skip": factors.skip,
        "c_out": factors.out,
        "c_in": factors.in_,
        "c_noise": factors.noise,
        "loss_weight": edm.loss_weight(sigma),
        "schedule_200": edm.schedule(200, dtype=torch.float64),
        "schedule_20": edm.schedule(20, dtype=torch.float64),
        "training_sigma": edm.training_sigma(tensor(golden["in__normal"])),
    }
    for name, value in found.items():
        assert_close(value, tensor(golden[f"out__{name}"]), TOLERANCE, name)


def test_steps_have_different_numbers_and_few_draws():
    normal = SeededNormal(torch.tensor(3), torch.float64)
    steps = list(sampler.draw_steps(45, (2, 7), normal))
    assert len(steps) == 45
    assert normal.calls == 2 * 3
    assert {tuple(step.normal.shape) for step in steps} == {(2, 7, 3)}
    assert {tuple(step.move.rotation.shape) for step in steps} == {(2, 3, 3)}
    for part in (lambda s: s.normal, lambda s: s.move.rotation, lambda s: s.move.translation):
        assert len({float(part(step).flatten()[0]) for step in steps}) == 45


@pytest.mark.shared
def test_sampling_with_given_draws(shared):
    golden = reference(shared, "sampler")
    target = tensor(golden["in__target"])
    draws = [
        sampler.StepDraw(augmentation.Move(rotation, translation), normal)
        for rotation, translation, normal in zip(
            *(
                tensor(golden[f"draw_{name}"])
                for name in ("rotation", "translation", "step_normal")
            ),
            strict=True,
        )
    ]
    seen = {"x_noisy": [], "t_hat": [], "x_denoised": []}

    def denoise(x, sigma):
        level = sigma[..., None, None].square()
        found = (edm.SIGMA_DATA**2 * x + level * target) / (edm.SIGMA_DATA**2 + level)
        for values, value in zip(seen.values(), (x, sigma, found), strict=True):
            values.append(value)
        return found

    x = sampler.sample(
        denoise,
        tensor(golden["in__schedule"]),
        tensor(golden["draw_initial_normal"]),
        draws,
        torch.ones(9, dtype=torch.bool),
    )
    for name, values in seen.items():
        assert_close(torch.stack(values), tensor(golden[f"out__{name}"]), TOLERANCE, name)
    assert_close(x, tensor(golden["out__x_final"]), TOLERANCE, "coordinates")


def draw(seed, steps=3, shape=(2, 5)):
    normal = SeededNormal(torch.tensor(seed), torch.float64)
    start = normal((*shape, 3))
    return start, list(sampler.draw_steps(steps, shape, normal))


def test_draws_are_a_function_of_the_seed():
    first, again, other = draw(1), draw(1), draw(2)
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a.normal, b.normal) for a, b in zip(first[1], again[1], strict=True))
    assert not torch.equal(first[0], other[0])


def test_rotations_are_proper_and_without_a_preferred_direction():
    normal = SeededNormal(torch.tensor(0), torch.float64)
    rotation = augmentation.draw_moves((4000,), normal).rotation
    product = rotation @ rotation.transpose(-1, -2)
    assert_close(product, torch.eye(3).double().expand_as(product), TOLERANCE)
    assert_close(torch.linalg.det(rotation), torch.ones(4000).double(), TOLERANCE)
    # Entries of a uniform rotation have mean 0 and variance 1/3; six standard errors.
    assert rotation.mean(0).abs().max() < 6 * (1 / 3 / 4000) ** 0.5
    assert (rotation.square().mean(0) - 1 / 3).abs().max() < 6 * (4 / 45 / 4000) ** 0.5


def test_moved_copies_keep_their_distances_and_lie_around_the_translation():
    normal = SeededNormal(torch.tensor(0), torch.float64)
    x = 30 + normal((1, 7, 3))
    move = augmentation.draw_moves((4,), normal)
    moved = augmentation.centre_and_move(x, move, torch.ones(7, dtype=torch.bool))
    assert_close(distances(moved), distances(x).expand(4, 7, 7), TOLERANCE)
    assert_close(moved.mean(-2, keepdim=True), move.translation, TOLERANCE)


def test_padded_atoms_change_no_sample():
    start, steps = draw(3)

    def pull(x, sigma):
        return x / (1 + sigma[..., None, None])

    levels = edm.schedule(3, dtype=torch.float64)
    whole = torch.ones(5, dtype=torch.bool)
    expected = sampler.sample(pull, levels, start, steps, whole)
    padded = [sampler.StepDraw(step.move, pad(step.normal)) for step in steps]
    found = sampler.sample(pull, levels, pad(start), padded, pad(whole[:, None])[:, 0])
    assert torch.equal(found[:, :5], expected)
    assert not found[:, 5:].any()


def distances(x):
    return (x[..., :, None, :] - x[..., None, :, :]).norm(dim=-1)


def pad(x):
    """Two more atoms, of ones unless they are a mask."""
    more = torch.ones_like(x[..., :2, :]) if x.is_floating_point() else torch.zeros_like(x[:2])
    return torch.cat([x, more], -2)


def test_noisy_copies_are_moved_structures_with_noise_of_their_level():
    normal = SeededNormal(torch.tensor(4), torch.float64)
    position = normal((500, 3))
    resolved = normal((500,)) > -0.8
    draw = noising.draw_copies((6, 500), normal)
    copies = noising.noisy_copies(position, resolved, draw)
    assert not copies.target[:, ~resolved].any()
    known = position[resolved] - position[resolved].mean(0)
    turned = known @ draw.move.rotation.transpose(-1, -2) + draw.move.translation
    assert_close(copies.target[:, resolved], turned, TOLERANCE)
    spread = (copies.x - copies.target).std(dim=(-2, -1))
    assert_close(spread / copies.sigma, torch.ones(6).double(), 0.1)
    assert len(set(copies.sigma.tolist())) == 6
    noise = ((copies.x - copies.target) / copies.sigma[:, None, None]).flatten(1)
    alike = noise @ noise.T / noise.shape[1] - torch.eye(6)
    assert alike.abs().max() < 0.2


def test_draws_of_too_few_steps_are_refused():
    start, steps = draw(1, steps=2)
    with pytest.raises(ValueError, match="zip"):
        sampler.sample(
            lambda x, _: x, edm.schedule(3), start, steps, torch.ones(5, dtype=torch.bool)
        )
