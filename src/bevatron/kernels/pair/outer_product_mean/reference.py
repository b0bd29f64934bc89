"""The outer product mean in plain PyTorch: the specification."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bevatron.kernels.pair.layer_norm.reference import layer_norm
from bevatron.kernels.shared.dtypes import wide_type


def outer_product_mean(
    m: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    a_weight: Tensor,
    b_weight: Tensor,
    out_weight: Tensor,
    a_bias: Tensor | None,
    b_bias: Tensor | None,
    out_bias: Tensor | None,
    eps: float,
    mask_eps: float,
) -> Tensor:
    """Compute ``out(sum_s a_si x b_sj) / (mask_eps + sum_s mask_si mask_sj)``."""
    n = layer_norm(m, norm_weight, norm_bias, None, None, eps, False)
    kept = mask.to(m.dtype)
    a = _linear(n, a_weight, a_bias) * kept[..., None]
    b = _linear(n, b_weight, b_bias) * kept[..., None]
    wide = wide_type(m)
    count = torch.einsum("...si,...sj->...ij", kept.to(wide), kept.to(wide))
    return layer_of_products(a, b, mask_eps + count, out_weight, out_bias)


def layer_of_products(
    a: Tensor, b: Tensor, count: Tensor, out_weight: Tensor, out_bias: Tensor | None
) -> Tensor:
    """Compute ``out(sum_s a_si x b_sj) / count_ij``."""
    outer = torch.einsum("...sic,...sjd->...ijcd", a, b).flatten(-2)
    return _linear(outer, out_weight, out_bias) / count.to(a.dtype)[..., None]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
