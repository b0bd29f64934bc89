"""Rigid motions x -> R x + t: from points and quaternions, composed, inverted, applied.

Products of three by three are written as sums, not as matrix multiplications: under autocast or
TF32 these would round coordinates of 100 Å to 0.1 Å. Leading axes of two arguments broadcast.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


class Rigid(NamedTuple):
    """Rigid motions with any leading axes.

    Attributes
    ----------
    rotation : [..., 3, 3]
        Columns are the axes of the frame.
    translation : [..., 3]
        Origin of the frame.
    """

    rotation: Float[Tensor, "*frames 3 3"]
    translation: Float[Tensor, "*frames 3"]


def rotate(
    rotation: Float[Tensor, "*frames 3 3"], vectors: Float[Tensor, "*points 3"]
) -> Float[Tensor, "*moved 3"]:
    """Rotate vectors, R v."""
    return (rotation * vectors[..., None, :]).sum(-1)


def compose_rotations(
    left: Float[Tensor, "*left 3 3"], right: Float[Tensor, "*right 3 3"]
) -> Float[Tensor, "*both 3 3"]:
    """Multiply rotations; the right one acts first."""
    return (left[..., :, :, None] * right[..., None, :, :]).sum(-2)


def apply(frame: Rigid, points: Float[Tensor, "*points 3"]) -> Float[Tensor, "*moved 3"]:
    """Move points out of the frame into the world, R x + t."""
    return rotate(frame.rotation, points) + frame.translation


def apply_inverse(frame: Rigid, points: Float[Tensor, "*points 3"]) -> Float[Tensor, "*moved 3"]:
    """Express points of the world in the frame, R^T (x - t)."""
    return rotate(frame.rotation.mT, points - frame.translation)


def compose(left: Rigid, right: Rigid) -> Rigid:
    """Compose two motions; the right one acts first."""
    return Rigid(compose_rotations(left.rotation, right.rotation), apply(left, right.translation))


def select(frame: Rigid, index: object) -> Rigid:
    """Index the leading axes; an index with ``None`` adds axes to broadcast over."""
    whole = index if isinstance(index, tuple) else (index,)
    if Ellipsis not in whole:
        whole = (*whole, Ellipsis)
    return Rigid(
        frame.rotation[(*whole, slice(None), slice(None))], frame.translation[(*whole, slice(None))]
    )


def orthonormal_axes(
    first: Float[Tensor, "*frames 3"], second: Float[Tensor, "*frames 3"], eps: float = 1e-8
) -> Float[Tensor, "*frames 3 3"]:
    r"""Rotation whose x axis is along one vector and whose xy plane holds another (Gram-Schmidt).

    .. math::
        e_1 = v_1 / |v_1|,\quad u = v_2 - (e_1 \cdot v_2) e_1,\quad e_2 = u / |u|,\quad
        e_3 = e_1 \times e_2

    AlphaFold2's supplement, algorithm 21.

    Parameters
    ----------
    eps
        Added to squared lengths before the root, so that the gradient exists everywhere; three
        points at one place give the zero matrix.
    """
    e_1 = first / torch.sqrt(first.square().sum(-1, keepdim=True) + eps)
    across = second - (e_1 * second).sum(-1, keepdim=True) * e_1
    e_2 = across / torch.sqrt(across.square().sum(-1, keepdim=True) + eps)
    return torch.stack([e_1, e_2, torch.linalg.cross(e_1, e_2)], dim=-1)


def frame_of_points(
    origin: Float[Tensor, "*frames 3"],
    on_x: Float[Tensor, "*frames 3"],
    in_xy: Float[Tensor, "*frames 3"],
    eps: float = 1e-8,
) -> Rigid:
    """Frame of three points: an origin, one on the positive x axis, one in the xy plane, y > 0.

    A residue's backbone frame has CA, C and N (AlphaFold2's supplement, algorithm 21). ``eps`` as
    in `orthonormal_axes`.
    """
    return Rigid(orthonormal_axes(on_x - origin, in_xy - origin, eps), origin)


def rotation_of_quaternion(quaternion: Float[Tensor, "*frames 4"]) -> Float[Tensor, "*frames 3 3"]:
    r"""Rotation of a unit quaternion (w, v), written as a quadratic form.

    .. math::
        R = (w^2 - v \cdot v)\, I + 2\, v v^T + 2 w\, [v]_\times

    with :math:`[v]_\times u = v \times u`. A quaternion of length s gives s² R. Products of whole
    vectors, where a sum for each entry would be a hundred launches.
    """
    w, v = quaternion[..., :1, None], quaternion[..., 1:]
    unit = torch.eye(3, dtype=v.dtype, device=v.device)
    # Row i is e_i x v, which is that of the antisymmetric [v]x.
    across = torch.linalg.cross(unit.expand(*v.shape[:-1], 3, 3), v[..., None, :])
    outer = v[..., :, None] * v[..., None, :]
    scale = w * w - v.square().sum(-1)[..., None, None]
    rotation: Tensor = scale * unit + 2 * (outer + w * across)
    return rotation


def normalise_quaternion(quaternion: Float[Tensor, "*frames 4"]) -> Float[Tensor, "*frames 4"]:
    """Divide quaternions by their lengths."""
    return quaternion / quaternion.square().sum(-1, keepdim=True).sqrt()


def compose_quaternions(
    left: Float[Tensor, "*left 4"], right: Float[Tensor, "*right 4"]
) -> Float[Tensor, "*both 4"]:
    """Multiply quaternions (a, u) (w, v) = (a w - u.v, a v + w u + u x v); v rotates first."""
    a, u = left.split([1, 3], dim=-1)
    w, v = right.split([1, 3], dim=-1)
    first = a * w - (u * v).sum(-1, keepdim=True)
    across = torch.linalg.cross(*torch.broadcast_tensors(u, v))
    return torch.cat([first, a * v + w * u + across], dim=-1)


def rotation_about_x(sin_cos: Float[Tensor, "*angles 2"]) -> Float[Tensor, "*angles 3 3"]:
    """Rotation about the x axis by the angle of a (sine, cosine) pair (algorithm 25)."""
    sin, cos = sin_cos.unbind(-1)
    zero, one = torch.zeros_like(sin), torch.ones_like(sin)
    rows = [[one, zero, zero], [zero, cos, -sin], [zero, sin, cos]]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def rigid_of_matrix(matrix: Float[Tensor, "*frames 4 4"]) -> Rigid:
    """Take apart homogeneous matrices, whose last row is (0, 0, 0, 1)."""
    return Rigid(matrix[..., :3, :3], matrix[..., :3, 3])


def matrix_of_rigid(frame: Rigid) -> Float[Tensor, "*frames 4 4"]:
    """Write motions as homogeneous matrices."""
    top = torch.cat([frame.rotation, frame.translation[..., None]], dim=-1)
    last = F.pad(top.new_ones(1), (3, 0))
    return torch.cat([top, last.expand(*top.shape[:-2], 1, 4)], dim=-2)


def rigid_of_quaternion(frame: Float[Tensor, "*frames 7"]) -> Rigid:
    """Take apart (unit quaternion, translation)."""
    return Rigid(rotation_of_quaternion(frame[..., :4]), frame[..., 4:])


def identity(*shape: int, like: Tensor) -> Rigid:
    """Motions that change nothing, of the type and device of a tensor."""
    rotation = torch.eye(3, dtype=like.dtype, device=like.device).expand(*shape, 3, 3)
    return Rigid(rotation, like.new_zeros(*shape, 3))
