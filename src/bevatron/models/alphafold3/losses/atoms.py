"""Atoms selected by index for every copy of a structure."""

from jaxtyping import Float, Int
from torch import Tensor


def gather_atoms(
    points: Float[Tensor, "*batch R A 3"], index: Int[Tensor, "*batch n"]
) -> Float[Tensor, "*batch R n 3"]:
    """Select atoms, the same in all R copies of a structure."""
    return points.take_along_dim(index[..., None, :, None], -2)
