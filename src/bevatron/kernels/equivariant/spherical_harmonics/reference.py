"""The specification of the spherical harmonics of directions."""

from torch import Tensor

from bevatron.maths import so3


def spherical_harmonics(l_max: int, vectors: Tensor) -> Tensor:
    """Normalise, then evaluate polynomials by recursion."""
    return so3.spherical_harmonics(l_max, vectors, normalize=True)
