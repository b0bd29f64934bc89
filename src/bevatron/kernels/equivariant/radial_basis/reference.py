"""The specification of the radial basis."""

from torch import Tensor

from bevatron.maths.radial import bessel_basis, polynomial_cutoff


def radial_basis(
    lengths: Tensor, frequencies: Tensor, prefactor: Tensor, r_max: Tensor, order: int
) -> Tensor:
    """Multiply the basis by the cutoff."""
    cutoff = polynomial_cutoff(lengths, r_max, order).unsqueeze(-1)
    return bessel_basis(lengths, frequencies, prefactor) * cutoff
