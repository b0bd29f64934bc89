"""Rotations: real Clebsch-Gordan coefficients, spherical harmonics, rotation matrices of degree l.

Basis and signs are e3nn's. The polar axis is y; the components of degree l run over m = -l..l, so
degree 1 is (x, y, z) in the coordinates of the vector itself. In textbook coordinates, whose polar
axis is z, the same three functions are called y, z, x. There is no Condon-Shortley sign.
"""

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from math import factorial, sqrt

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.maths.irreps import Irreps
from bevatron.typing import FloatArray


def wigner_3j(l1: int, l2: int, l3: int) -> Float[Tensor, "M1 M2 M3"]:
    r"""Real coupling coefficients of three degrees, float64, of Frobenius norm 1.

    The only tensor, up to a factor, that does not change when all three axes are rotated:
    :math:`C_{abc} = \sum_{ijk} C_{ijk} D^{l_1}_{ai} D^{l_2}_{bj} D^{l_3}_{ck}`. Racah's formula in
    exact arithmetic gives the complex coefficients; a unitary change of basis makes them real.
    Raises ValueError if the degrees violate the triangle inequality.

    Examples
    --------
    >>> wigner_3j(1, 1, 0)[:, :, 0].mul(3**0.5).round(decimals=6)
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]], dtype=torch.float64)
    """
    if not abs(l1 - l2) <= l3 <= l1 + l2:
        raise ValueError(f"degrees {l1}, {l2}, {l3} violate the triangle inequality")
    return torch.from_numpy(coupling(l1, l2, l3).copy())


@cache
def coupling(l1: int, l2: int, l3: int) -> FloatArray:
    """Return `wigner_3j` as a read-only numpy array; computed once per process."""
    complex_cg = np.zeros((2 * l1 + 1, 2 * l2 + 1, 2 * l3 + 1))
    for m1, m2 in _projections(l1, l2, l3):
        complex_cg[l1 + m1, l2 + m2, l3 + m1 + m2] = _racah(l1, m1, l2, m2, l3)
    to_complex = [_real_to_complex(degree) for degree in (l1, l2, l3)]
    real: FloatArray = np.einsum(
        "ia,jb,kc,ijk->abc", to_complex[0], to_complex[1], to_complex[2].conj(), complex_cg
    ).real
    real /= np.linalg.norm(real)
    # The change of basis leaves rounding errors where the coefficient is exactly zero.
    real[np.abs(real) < 1e-14] = 0.0
    real.flags.writeable = False
    return real


def spherical_harmonics(
    l_max: int, vectors: Float[Tensor, "*batch 3"], normalize: bool = True
) -> Float[Tensor, "*batch S"]:
    r"""Real spherical harmonics of all degrees up to ``l_max``, 'component' normalised.

    :math:`Y_{l,\pm m} = \sqrt{(2l+1)\, 2 \tfrac{(l-m)!}{(l+m)!}}\; \Pi_l^m(y, r^2)\,
    \{\mathrm{Re}, \mathrm{Im}\}(z + i x)^m`, without the 2 for m = 0, where :math:`\Pi_l^m` is the
    m-th derivative of Legendre's polynomial made homogeneous with r². Polynomials only, so all
    derivatives exist; :math:`\sum_m Y_{lm}^2 = 2l+1` on the unit sphere.

    Parameters
    ----------
    l_max : highest degree
    vectors : any length if ``normalize``; then a vector of length zero gives NaN
    normalize
        Divide each vector by its length first. Otherwise degree l scales with the length to the l.

    Returns
    -------
    Tensor
        S = (l_max+1)² components: degree 0, then degree 1 with m = -1, 0, 1, and so on.
    """
    if normalize:
        vectors = vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    x, y, z = vectors.unbind(-1)
    r2 = x * x + y * y + z * z
    one = torch.ones_like(x)
    legendre: dict[tuple[int, int], Tensor] = {(0, 0): one}
    cosine, sine = [one], [torch.zeros_like(x)]
    for m in range(1, l_max + 1):
        cosine, sine = (
            [*cosine, z * cosine[-1] - x * sine[-1] if m > 1 else z],
            [*sine, z * sine[-1] + x * cosine[-1] if m > 1 else x],
        )
    for degree in range(1, l_max + 1):
        for m in range(degree + 1):
            legendre[degree, m] = _legendre(degree, m, y, r2, legendre)
    components = []
    for degree in range(l_max + 1):
        for m in range(-degree, degree + 1):
            order = abs(m)
            scale = _harmonic_norm(degree, order)
            angular = sine[order] if m < 0 else cosine[order]
            polar = legendre[degree, order]
            if order == 0:
                components.append(scale * polar)
            elif order == degree:
                # The polar factor is a constant here.
                components.append(scale * _double_factorial(2 * degree - 1) * angular)
            else:
                components.append(scale * (polar * angular))
    return torch.stack(components, dim=-1)


def wigner_d(
    degree: int, rotation: Float[Tensor, "*batch 3 3"], parity: int | None = None
) -> Float[Tensor, "*batch M M"]:
    r"""Matrix that rotates a feature of one degree: :math:`Y_l(R v) = D^l(R)\, Y_l(v)`.

    Built from :math:`D^1 = R` degree by degree through the coupling of l-1 and 1 to l.

    Parameters
    ----------
    degree : the degree l
    rotation : orthogonal matrices acting on (x, y, z), also improper ones (reflections)
    parity
        +1 or -1: the factor of the inversion. The harmonics' own, (-1)^l, if not given.
    """
    determinant = torch.linalg.det(rotation).sign()[..., None, None]
    proper = rotation * determinant
    matrix = torch.ones_like(rotation[..., :1, :1])
    for step in range(1, degree + 1):
        c = wigner_3j(step - 1, 1, step).to(rotation)
        matrix = (2 * step + 1) * torch.einsum("abm,...ai,...bj,ijn->...mn", c, matrix, proper, c)
    sign = (-1) ** degree if parity is None else parity
    return matrix if sign == 1 else matrix * determinant


def rotate(
    features: Float[Tensor, "*batch D"], irreps: Irreps, rotation: Float[Tensor, "3 3"]
) -> Float[Tensor, "*batch D"]:
    """Rotate a flat feature in ``mul_ir`` layout by one orthogonal matrix."""
    turned = []
    for block, part in zip(irreps, irreps.slices, strict=True):
        matrix = wigner_d(block.l, rotation.to(features), block.parity)
        copies = features[..., part].unflatten(-1, (block.mul, block.dim))
        turned.append((copies @ matrix.mT).flatten(-2))
    return torch.cat(turned, dim=-1)


def _legendre(
    degree: int, m: int, y: Tensor, r2: Tensor, lower: dict[tuple[int, int], Tensor]
) -> Tensor:
    """m-th derivative of Legendre's polynomial, homogeneous of degree l-m, by recursion in l."""
    if m == degree:
        return torch.full_like(y, _double_factorial(2 * m - 1))
    if m == degree - 1:
        return _double_factorial(2 * m + 1) * y
    first = ((2 * degree - 1) / (degree - m)) * (y * lower[degree - 1, m])
    return first - ((degree + m - 1) / (degree - m)) * (r2 * lower[degree - 2, m])


def _harmonic_norm(degree: int, m: int) -> float:
    """Factor that gives the harmonic (l, m) a mean square of 1 over the sphere."""
    # Plain arithmetic, so that torch.compile can fold it.
    squared = 2.0 * degree + 1.0 if m == 0 else 4.0 * degree + 2.0
    for factor in range(degree - m + 1, degree + m + 1):
        squared /= factor
    return sqrt(squared)


def _double_factorial(n: int) -> float:
    value = 1.0
    for factor in range(n, 1, -2):
        value *= factor
    return value


def _projections(l1: int, l2: int, l3: int) -> Iterator[tuple[int, int]]:
    for m1 in range(-l1, l1 + 1):
        for m2 in range(-l2, l2 + 1):
            if abs(m1 + m2) <= l3:
                yield m1, m2


def _racah(l1: int, m1: int, l2: int, m2: int, l3: int) -> float:
    """Return <l1 m1 l2 m2 | l3 m1+m2>, rounded once: all sums are in exact integers."""
    m3 = m1 + m2
    f = factorial
    squared = Fraction(
        (2 * l3 + 1) * f(l3 + l1 - l2) * f(l3 - l1 + l2) * f(l1 + l2 - l3), f(l1 + l2 + l3 + 1)
    )
    squared *= f(l3 + m3) * f(l3 - m3) * f(l1 - m1) * f(l1 + m1) * f(l2 - m2) * f(l2 + m2)
    total = Fraction(0)
    lowest = max(0, l2 - l3 - m1, l1 - l3 + m2)
    highest = min(l1 + l2 - l3, l1 - m1, l2 + m2)
    for k in range(lowest, highest + 1):
        denominator = f(k) * f(l1 + l2 - l3 - k) * f(l1 - m1 - k) * f(l2 + m2 - k)
        denominator *= f(l3 - l2 + m1 + k) * f(l3 - l1 - m2 + k)
        total += Fraction((-1) ** k, denominator)
    magnitude = sqrt(squared * total * total)
    return magnitude if total >= 0 else -magnitude


@cache
def _real_to_complex(degree: int) -> np.ndarray[tuple[int, ...], np.dtype[np.complex128]]:
    """Unitary matrix from real to complex harmonics; rows m, columns the real order.

    The factor (-i)^l makes the coupling coefficients real for every parity of l1+l2+l3.
    """
    matrix = np.zeros((2 * degree + 1, 2 * degree + 1), dtype=np.complex128)
    matrix[degree, degree] = 1.0
    for m in range(1, degree + 1):
        cosine, sine = degree + m, degree - m
        matrix[degree - m, cosine] = sqrt(0.5)
        matrix[degree - m, sine] = -1j * sqrt(0.5)
        matrix[degree + m, cosine] = (-1) ** m * sqrt(0.5)
        matrix[degree + m, sine] = 1j * (-1) ** m * sqrt(0.5)
    return (-1j) ** degree * matrix
