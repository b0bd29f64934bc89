"""The specification of the channelwise tensor product, path by path."""

from functools import cache
from math import sqrt

import torch
from torch import Tensor

from bevatron.kernels.channelwise_tensor_product.paths import PathTable
from bevatron.maths.irreps import Irreps
from bevatron.maths.so3 import wigner_3j


def channelwise_tensor_product(
    x: Tensor,
    harmonics: Tensor,
    weights: Tensor,
    edges: Tensor,
    irreps_in: Irreps,
    irreps_harmonics: Irreps,
    table: PathTable,
) -> Tensor:
    """Per path: one small matrix per edge times its weighted sender, then a sum over receivers.

    Inside, channels come last, so that a processor's vector units run along them.
    """
    senders, receivers = edges[0], edges[1]
    gathered = [
        x[:, part].unflatten(1, (block.mul, block.dim)).mT.contiguous().index_select(0, senders)
        for block, part in zip(irreps_in, irreps_in.slices, strict=True)
    ]
    results = []
    for path in table.paths:
        y = harmonics[:, irreps_harmonics.slices[path.harmonics]]
        matrix = _couple(y, path.l1, path.l2, path.out.l)
        weighted = weights[:, None, path.weights] * gathered[path.x]
        # A product with one column is cheaper as a broadcast.
        message = matrix @ weighted if path.l1 else matrix * weighted
        total = x.new_zeros(x.shape[0], path.out.dim, path.out.mul)
        results.append(total.index_add(0, receivers, message).mT.flatten(1))
    return torch.cat(results, dim=1) if results else x.new_zeros(x.shape[0], 0)


def _couple(y: Tensor, l1: int, l2: int, l3: int) -> Tensor:
    """Return M[e, m3, m1], the coefficients contracted with the harmonics."""
    coefficients = _coefficients(l1, l2, l3, y.dtype, y.device)
    return (y @ coefficients).view(len(y), 2 * l3 + 1, 2 * l1 + 1)


@cache
def _coefficients(l1: int, l2: int, l3: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return sqrt(2 l3 + 1) C as a matrix [m2, (m3, m1)]."""
    scaled = sqrt(2 * l3 + 1) * wigner_3j(l1, l2, l3)
    return scaled.permute(1, 2, 0).flatten(1).to(device, dtype)
