"""The outer product mean of own rows of an alignment; `bevatron.kernels`' on one process."""

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
    m: Float[Tensor, "*batch R _ C"],
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
    by_columns: bool = False,
) -> Float[Tensor, "*batch _ N Z"]:
    r"""Compute own rows of `bevatron.kernels.outer_product_mean` from own rows of an alignment.

    :math:`\sum_s a_{si} \otimes b_{sj}` for own residues i needs a of these and b of all residues,
    both for all rows s: projections, which have fewer channels than the alignment. ``by_columns``:
    m is [..., K, S, C], own columns as rows, so that a is already here.
    """
    if sample_group().size == 1:
        m = m.transpose(-2, -3) if by_columns else m
        return kernels.outer_product_mean(
            *(m, mask, norm_weight, norm_bias, a_weight, b_weight, out_weight),
            *(a_bias, b_bias, out_bias),
            mask_eps=mask_eps,
        )
    weights, S = (a_weight, b_weight), mask.shape[-2]
    joint_bias = joined((a_bias, b_bias), weights)
    projected = layer_norm_linear(m, norm_weight, norm_bias, torch.cat(weights), joint_bias)
    of_own = own(mask.mT if by_columns else mask, -2).to(m.dtype)
    a, b = (projected * of_own[..., None]).chunk(2, -1)
    columns = None if by_columns else turned(a, S)
    whole = gathered(b, ROWS, mask.shape[-1] if by_columns else S)
    kept = mask.to(wide_type(m))
    with torch.autocast(m.device.type, enabled=False):  # 16 bits count to 256
        count = mask_eps + torch.einsum("...si,...sj->...ij", own(kept, -1), kept)
    a = (a if columns is None else columns.wait()).transpose(-2, -3)
    b = whole.wait().transpose(-2, -3) if by_columns else whole.wait()
    return layer_of_products(a, b, count, out_weight, out_bias)


def joined(biases: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor | None:
    """Concatenate biases, with zeros for any that is None; None if all are."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, weights, strict=True)
    return torch.cat([w.new_zeros(len(w)) if bias is None else bias for bias, w in pairs])
