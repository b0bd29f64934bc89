"""Radial functions of an edge's length: Bessel basis, smooth cutoff, Agnesi's transform."""

from math import pi, sqrt

import torch
from jaxtyping import Float
from torch import Tensor


def bessel_parameters(
    r_max: float, num_basis: int, dtype: torch.dtype = torch.float64
) -> tuple[Float[Tensor, "B"], Float[Tensor, ""]]:
    r"""Frequencies :math:`n\pi/r_{max}` (n = 1..num_basis) and prefactor :math:`\sqrt{2/r_{max}}`.

    A model keeps both as buffers: computed again in another precision they differ in the last
    digits, and energies by 1e-8 eV.
    """
    order = torch.arange(1, num_basis + 1, dtype=dtype)
    return order * (pi / r_max), torch.tensor(sqrt(2.0 / r_max), dtype=dtype)


def bessel_basis(
    r: Float[Tensor, "*batch"],
    frequencies: Float[Tensor, "B"],
    prefactor: Float[Tensor, ""] | float,
) -> Float[Tensor, "*batch B"]:
    r"""Spherical Bessel functions of order 0: :math:`\sqrt{2/r_{max}}\,\sin(w_n r)/r`.

    Equation 7 of Gasteiger et al., "Directional message passing" (ICLR 2020).

    Parameters
    ----------
    r : lengths in Å, above zero
    frequencies, prefactor : as `bessel_parameters` gives them, or as a checkpoint stores them

    Examples
    --------
    >>> w, c = bessel_parameters(4.0, 8)
    >>> bessel_basis(torch.tensor([1.0, 2.0], dtype=torch.float64), w, c).shape
    torch.Size([2, 8])
    """
    r = r.unsqueeze(-1)
    return prefactor * (torch.sin(frequencies * r) / r)


def polynomial_cutoff(
    r: Float[Tensor, "*batch"], r_max: Tensor | float, p: int
) -> Float[Tensor, "*batch"]:
    r"""Polynomial that falls from 1 at r = 0 to 0 at ``r_max`` with two continuous derivatives.

    :math:`1 - \frac{(p+1)(p+2)}{2} x^p + p(p+2) x^{p+1} - \frac{p(p+1)}{2} x^{p+2}` with
    :math:`x = r/r_{max}`, and 0 for :math:`x \ge 1`: equation 8 of Gasteiger et al. (ICLR 2020).

    Parameters
    ----------
    r : lengths in Å
    r_max : the cutoff, one for all or one per length (the repulsion of each pair of elements)
    p : the order, at least 2
    """
    x = r / r_max
    # One power and a quadratic: fewer roundings than three powers, and cheaper to differentiate.
    inner = (p + 1) * (p + 2) / 2 - x * (p * (p + 2) - x * (p * (p + 1) / 2))
    return torch.where(r < r_max, 1.0 - x**p * inner, torch.zeros_like(x))


def agnesi_transform(
    r: Float[Tensor, "*batch"],
    r0: Float[Tensor, "*#batch"],
    a: Tensor | float = 1.0805,
    q: Tensor | float = 0.9183,
    p: Tensor | float = 4.5791,
) -> Float[Tensor, "*batch"]:
    r"""Map a length to (0, 1] so that bonds of all elements look alike.

    :math:`t = \left(1 + a\,\frac{(r/r_0)^q}{1 + (r/r_0)^{q-p}}\right)^{-1}`, from Witt et al.,
    "ACEpotentials.jl", J. Chem. Phys. 159, 164101 (2023).

    Parameters
    ----------
    r : lengths in Å, above zero
    r0 : half the sum of both atoms' covalent radii, Å
    a, q, p : shape; the defaults are those of the MACE foundation models
    """
    x = r / r0
    return 1.0 / (1.0 + a * x**q / (1.0 + x ** (q - p)))
