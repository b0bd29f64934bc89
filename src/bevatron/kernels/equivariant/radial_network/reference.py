"""The specification of the radial network."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import silu

from bevatron.kernels.equivariant.radial_basis.reference import radial_basis


def radial_network(
    lengths: Tensor,
    frequencies: Tensor,
    prefactor: Tensor,
    r_max: Tensor,
    order: int,
    weights: Sequence[Tensor],
) -> Tensor:
    """Evaluate layer by layer."""
    x = radial_basis(lengths, frequencies, prefactor, r_max, order)
    for weight in weights:
        x = silu(x @ weight)
    return x
