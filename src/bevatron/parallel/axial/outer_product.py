"""The outer product mean of an alignment's own rows; on one process that of `bevatron.kernels`."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bevatron import kernels
from bevatron.kernels import layer_norm_linear
from bevatron.kernels.pair.outer_product_mean import layer_of_products
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.parallel.axial.groups import sample_group
from bevatron.parallel.axial.rows import ROWS, gathered, own, turned


def outer_product_mean(
    m: Float[Tensor, "*batch R N C"],
    mask: Float[Tensor, "*batch S N"] | Bool[Tensor, "*batch S N"],
    norm_weight: Tensor,
    norm_bias: Tensor,
    a_weight: Tensor,
    b_weight: Tensor,
    out_weight: Tensor,
    a_bias: Tensor | None = None,
    b_bias: Tensor | None = None,
    out_bias: Tensor | None = None,
    *,
    mask_eps: float = 1e-3,
) -> Float[Tensor, "*batch _ N Z"]:
    r"""Compute own rows of `bevatron.kernels.outer_product_mean` of an alignment's own rows.

    :math:`\sum_s a_{si} \otimes b_{sj}` of own residues i needs a of them and b of all residues,
    both of all rows s: projections, which have fewer channels than the alignment.
    """
    if sample_group().size == 1:
        return kernels.outer_product_mean(
            *(m, mask, norm_weight, norm_bias, a_weight, b_weight, out_weight),
            *(a_bias, b_bias, out_bias),
            mask_eps=mask_eps,
        )
    weights, S = (a_weight, b_weight), mask.shape[-2]
    joint_bias = joined((a_bias, b_bias), weights)
    projected = layer_norm_linear(m, norm_weight, norm_bias, torch.cat(weights), joint_bias)
    a, b = (projected * own(mask, -2).to(m.dtype)[..., None]).chunk(2, -1)
    of_own, of_all, kept = turned(a, S), gathered(b, ROWS, S), mask.to(wide_type(m))
    count = mask_eps + torch.einsum("...si,...sj->...ij", own(kept, -1), kept)
    a, b = of_own.wait().transpose(-2, -3), of_all.wait()
    update: Tensor = layer_of_products(a, b, count, out_weight, out_bias)
    return update


def joined(biases: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor | None:
    """Concatenate biases, zero where one is not given; None if none is."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, weights, strict=True)
    return torch.cat([w.new_zeros(len(w)) if bias is None else bias for bias, w in pairs])
