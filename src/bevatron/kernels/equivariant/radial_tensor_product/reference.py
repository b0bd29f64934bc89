"""The specification of the radial tensor product."""

from torch import Tensor

from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder, PathTable
from bevatron.kernels.equivariant.channelwise_tensor_product.reference import (
    channelwise_tensor_product,
)
from bevatron.maths.irreps import Irreps, Layout


def radial_tensor_product(
    x: Tensor,
    harmonics: Tensor,
    hidden: Tensor,
    last_weight: Tensor,
    edges: Tensor | EdgeOrder,
    irreps_in: Irreps,
    irreps_harmonics: Irreps,
    table: PathTable,
    layout: Layout = "mul_ir",
) -> Tensor:
    """Compute all weights, then the product."""
    weights = hidden @ last_weight
    return channelwise_tensor_product(
        x, harmonics, weights, edges, irreps_in, irreps_harmonics, table, layout
    )
