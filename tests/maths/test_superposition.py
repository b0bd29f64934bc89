"""Weighted superposition: exact recovery, optimality, degenerate points, precision."""

import numpy as np
import pytest
import torch

from bevatron.maths.superposition import moved, superposed, superposition
from bevatron.testing import assert_close


def random_rotations(count, seed=0):
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(count, 3, 3)))
    q[:, 0] *= np.linalg.det(q)[:, None]
    return torch.from_numpy(q)


def points(*shape, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(*shape, 3))) * 10


def kabsch(x, y, w):
    """Rotation by the singular value decomposition, one structure, in numpy."""
    xc, yc = np.average(x, 0, w), np.average(y, 0, w)
    u, _, vt = np.linalg.svd(((x - xc) * w[:, None]).T @ (y - yc))
    d = np.diag([1, 1, np.sign(np.linalg.det(vt.T @ u.T))])
    r = vt.T @ d @ u.T
    return r, yc - r @ xc


def test_a_moved_copy_is_found_again():
    rotation, x = random_rotations(5), points(5, 9)
    translation = points(5)
    y = x @ rotation.mT + translation[:, None]
    weight = torch.rand(5, 9, dtype=torch.float64) + 0.1
    found, shift = superposition(x, y, weight)
    assert_close(found, rotation, 1e-12)
    assert_close(shift, translation, 1e-11)


@pytest.mark.parametrize("mirrored", [False, True])
def test_it_agrees_with_the_singular_value_decomposition(mirrored):
    x, y = points(4, 12), points(4, 12, seed=2)
    if mirrored:
        y = x * torch.tensor([1.0, 1, -1]) + 0.01 * y
    weight = torch.rand(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found, shift = superposition(x, y, weight)
    assert_close(torch.linalg.det(found), torch.ones(4, dtype=torch.float64), 1e-12)
    for k in range(4):
        rotation, translation = kabsch(x[k].numpy(), y[k].numpy(), weight[k].numpy())
        assert_close(found[k], torch.from_numpy(rotation), 1e-10)
        assert_close(shift[k], torch.from_numpy(translation), 1e-10)


def test_half_turns_are_found_whose_quaternion_has_no_real_part():
    turns = 2 * torch.eye(3, dtype=torch.float64)[:, None] * torch.eye(3) - torch.eye(3)
    x, weight = points(7), torch.ones(7, dtype=torch.float64)
    found, _ = superposition(x, x @ turns, weight)
    assert_close(found, turns, 1e-12)


def test_points_of_weight_zero_do_not_matter_but_are_moved():
    x = points(8)
    rotation = random_rotations(1)[0]
    y = x @ rotation.T
    weight = torch.ones(8, dtype=torch.float64)
    weight[5:] = 0
    broken = y.clone()
    broken[5:] = 1e3
    assert_close(superposed(x, broken, weight), y, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_degenerate_points_get_a_proper_rotation_that_fits(dtype, rank):
    x = points(7)
    x[:, rank:] = 0
    rotation = random_rotations(1, seed=4)[0]
    y = (x @ rotation.T + 3).to(dtype)
    x = x.to(dtype)
    found, _ = superposition(x, y, torch.ones(7, dtype=dtype))
    tight = 1e-5 if dtype == torch.float32 else 1e-12
    assert_close(found @ found.mT, torch.eye(3, dtype=dtype), tight)
    assert_close(torch.linalg.det(found), torch.tensor(1.0, dtype=dtype), tight)
    assert_close(superposed(x, y, torch.ones(7, dtype=dtype)), y, tight)


def test_without_weights_nothing_moves():
    found, shift = superposition(points(3), points(3, seed=2), torch.zeros(3, dtype=torch.float64))
    assert torch.equal(found, torch.eye(3, dtype=torch.float64))
    assert torch.equal(shift, torch.zeros(3, dtype=torch.float64))


def test_nearly_equal_rotations_are_told_apart():
    """A rod with a bump of a thousandth: two rotations fit almost equally well."""
    x = torch.zeros(4, 3, dtype=torch.float64)
    x[:, 0] = torch.arange(4)
    x[1, 1] = 1e-3
    rotation = random_rotations(1, seed=6)[0]
    found, _ = superposition(x, x @ rotation.T, torch.ones(4, dtype=torch.float64))
    assert_close(found, rotation, 1e-6)


def test_one_truth_is_superposed_on_many_predictions_without_gradient():
    truth, predictions = points(6), points(3, 6, seed=5).requires_grad_()
    weight = torch.ones(6, dtype=torch.float64)
    together = superposed(truth, predictions, weight)
    assert not together.requires_grad
    for k in range(3):
        assert_close(together[k], superposed(truth, predictions[k].detach(), weight), 1e-13)


def test_sixteen_bits_are_computed_in_32():
    x = points(6).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        rotation, translation = superposition(x, x, torch.ones(6))
    assert rotation.dtype == torch.float32
    assert_close(moved(x.float(), rotation, translation), x.float(), 1e-5)
