"""Superposition of point sets: the rotation and translation of smallest weighted distance.

The rotation is found as a unit quaternion (Horn, J. Opt. Soc. Am. A 4, 629 (1987); Kabsch, Acta
Cryst. A32, 922 (1976), has the same solution): the eigenvector of the largest eigenvalue of a
symmetric 4 x 4 matrix made of the covariance of both sets. A quaternion is never a reflection.
The eigenvector is that of the matrix squared again and again, so a device is never asked for a
number and points on a line, or all in one place, need no special case: of several best rotations
one is returned.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.maths.rigid import rotation_of_quaternion

_SQUARINGS = {torch.float32: 26, torch.float64: 54}
"""Two eigenvalues differ, relative to the largest, by 2^-23 or 2^-52 at least, or not at all."""


@torch.no_grad()
def superposition(
    moving: Float[Tensor, "*#batch n 3"],
    fixed: Float[Tensor, "*#batch n 3"],
    weight: Float[Tensor, "*#batch n"],
) -> tuple[Float[Tensor, "*batch 3 3"], Float[Tensor, "*batch 3"]]:
    r"""Find the proper rotation R and translation t that move one set of points onto another.

    :math:`\arg\min_{R, t} \sum_i w_i |R x_i + t - y_i|^2`

    Algorithm 28 of the AlphaFold3 supplement; what it returns carries no gradient.

    Parameters
    ----------
    moving, fixed : the points x and y, Å; a point of weight 0 must be finite
    weight
        Not negative. Where all are 0, R is the identity and t zero.

    Returns
    -------
    R, t
        In the type of the points, float32 if that has 16 bits.

    Examples
    --------
    >>> x = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 2, 0]])
    >>> quarter = torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    >>> rotation, translation = superposition(x, x @ quarter.T + 5, torch.ones(3))
    >>> rotation.round(decimals=4).abs().int().tolist()
    [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    """
    dtype = torch.promote_types(moving.dtype, torch.float32)
    x, y, w = moving.to(dtype), fixed.to(dtype), weight.to(dtype)[..., None]
    total = w.sum(-2).clamp(min=torch.finfo(dtype).tiny)
    x_centre, y_centre = (w * x).sum(-2) / total, (w * y).sum(-2) / total
    # Sums of products, not a matmul: neither autocast nor TF32 may round them.
    left, right = w * (x - x_centre[..., None, :]), y - y_centre[..., None, :]
    columns = [(left * right[..., j, None]).sum(-2) for j in range(3)]
    rotation = rotation_of_quaternion(_largest_eigenvector(_horn_matrix(torch.stack(columns, -1))))
    return rotation, y_centre - (rotation * x_centre[..., None, :]).sum(-1)


def moved(
    points: Float[Tensor, "*#batch n 3"],
    rotation: Float[Tensor, "*#batch 3 3"],
    translation: Float[Tensor, "*#batch 3"],
) -> Float[Tensor, "*batch n 3"]:
    r"""Move points: :math:`R x_i + t`."""
    turned = [(points * rotation[..., None, k, :]).sum(-1) for k in range(3)]
    return torch.stack(turned, -1) + translation[..., None, :]


def superposed(
    moving: Float[Tensor, "*#batch n 3"],
    fixed: Float[Tensor, "*#batch n 3"],
    weight: Float[Tensor, "*#batch n"],
) -> Float[Tensor, "*batch n 3"]:
    """Move points onto others as `superposition` finds best; all points, whatever their weight."""
    rotation, translation = superposition(moving, fixed, weight)
    return moved(moving.to(rotation.dtype), rotation, translation)


def _horn_matrix(covariance: Float[Tensor, "*batch 3 3"]) -> Float[Tensor, "*batch 4 4"]:
    """Build the matrix whose largest eigenvector is the best quaternion: Horn's equation 46."""
    (xx, xy, xz), (yx, yy, yz), (zx, zy, zz) = (row.unbind(-1) for row in covariance.unbind(-2))
    rows = (
        (xx + yy + zz, yz - zy, zx - xz, xy - yx),
        (yz - zy, xx - yy - zz, xy + yx, zx + xz),
        (zx - xz, xy + yx, yy - xx - zz, yz + zy),
        (xy - yx, zx + xz, yz + zy, zz - xx - yy),
    )
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def _largest_eigenvector(matrix: Float[Tensor, "*batch 4 4"]) -> Float[Tensor, "*batch 4"]:
    """Return a unit eigenvector of the largest eigenvalue of symmetric matrices."""
    identity = torch.eye(4, dtype=matrix.dtype, device=matrix.device)
    size = matrix.square().sum((-2, -1), keepdim=True).sqrt()
    # No eigenvalue is below -size: shifted by it none is negative, and the largest has the largest
    # power.
    power = matrix / size.clamp(min=torch.finfo(matrix.dtype).tiny) + identity
    for _ in range(_SQUARINGS[matrix.dtype]):
        power = power / power.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        power = (power[..., :, :, None] * power[..., None, :, :]).sum(-2)
    # Now the projection onto the eigenvectors of the largest eigenvalue, times a number. Every
    # column is one of them; the longest is the most accurate, the first if all are as good.
    diagonal = power.diagonal(dim1=-2, dim2=-1)
    longest = (diagonal / diagonal.sum(-1, keepdim=True) + identity[0] * 1e-3).argmax(-1)
    vector = power.take_along_dim(longest[..., None, None], -1).squeeze(-1)
    return vector / vector.square().sum(-1, keepdim=True).sqrt()
