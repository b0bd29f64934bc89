"""Rigid motions: algebra, quaternions, frames of three points."""

import pytest
import torch

from bevatron.maths import rigid

DTYPE = torch.float64


def drawn(*shape):
    quaternion = rigid.normalise_quaternion(torch.randn(*shape, 4, dtype=DTYPE))
    return rigid.Rigid(
        rigid.rotation_of_quaternion(quaternion), 10 * torch.randn(*shape, 3, dtype=DTYPE)
    )


def test_rotations_of_unit_quaternions_are_proper():
    rotation = drawn(50).rotation
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(3, dtype=DTYPE).expand(50, 3, 3))
    torch.testing.assert_close(torch.linalg.det(rotation), torch.ones(50, dtype=DTYPE))


def test_a_quaternion_about_z_turns_x_to_y():
    half = torch.tensor(0.25 * torch.pi, dtype=DTYPE)
    quaternion = torch.stack([half.cos(), 0 * half, 0 * half, half.sin()])
    turned = rigid.rotate(
        rigid.rotation_of_quaternion(quaternion), torch.tensor([1.0, 0, 0], dtype=DTYPE)
    )
    torch.testing.assert_close(turned, torch.tensor([0.0, 1, 0], dtype=DTYPE))


def test_products_of_quaternions_are_products_of_rotations():
    a, b = rigid.normalise_quaternion(torch.randn(2, 20, 4, dtype=DTYPE))
    torch.testing.assert_close(
        rigid.rotation_of_quaternion(rigid.compose_quaternions(a, b)),
        rigid.rotation_of_quaternion(a) @ rigid.rotation_of_quaternion(b),
    )


def test_composition_applies_the_right_motion_first():
    left, right, x = drawn(4, 5), drawn(5), torch.randn(5, 3, dtype=DTYPE)
    torch.testing.assert_close(
        rigid.apply(rigid.compose(left, right), x), rigid.apply(left, rigid.apply(right, x))
    )


def test_the_inverse_undoes_a_motion():
    frame, x = drawn(7), torch.randn(7, 3, dtype=DTYPE)
    moved = rigid.apply(frame, x)
    torch.testing.assert_close(rigid.apply_inverse(frame, moved), x)


def test_a_frame_has_its_points_on_its_axes():
    origin, on_x, in_xy = torch.randn(3, 9, 3, dtype=DTYPE)
    frame = rigid.frame_of_points(origin, on_x, in_xy, eps=0.0)
    assert rigid.apply_inverse(frame, origin).abs().max() == 0
    x = rigid.apply_inverse(frame, on_x)
    assert (x[:, 0] > 0).all()
    torch.testing.assert_close(x[:, 1:], torch.zeros(9, 2, dtype=DTYPE))
    xy = rigid.apply_inverse(frame, in_xy)
    assert (xy[:, 1] > 0).all()
    torch.testing.assert_close(xy[:, 2], torch.zeros(9, dtype=DTYPE))


def test_coinciding_points_have_a_gradient():
    points = torch.zeros(3, 3, dtype=DTYPE, requires_grad=True)
    frame = rigid.frame_of_points(*points)
    assert (frame.rotation == 0).all()
    frame.rotation.sum().backward()
    assert points.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_matrices_hold_the_same_motion(shape):
    frame = drawn(*shape)
    matrix = rigid.matrix_of_rigid(frame)
    assert matrix.shape == (*shape, 4, 4)
    back = rigid.rigid_of_matrix(matrix)
    assert torch.equal(back.rotation, frame.rotation)
    assert torch.equal(back.translation, frame.translation)


def test_selecting_adds_axes_to_both_parts():
    frame = rigid.select(drawn(2, 3), (..., None))
    assert frame.rotation.shape == (2, 3, 1, 3, 3)
    assert frame.translation.shape == (2, 3, 1, 3)
    assert rigid.select(frame, 0).translation.shape == (3, 1, 3)


def test_the_rotation_about_x_leaves_x_alone():
    angle = torch.tensor(0.3, dtype=DTYPE)
    rotation = rigid.rotation_about_x(torch.stack([angle.sin(), angle.cos()]))
    torch.testing.assert_close(
        rotation @ torch.tensor([1.0, 1.0, 0.0], dtype=DTYPE),
        torch.stack([torch.ones_like(angle), angle.cos(), angle.sin()]),
    )
