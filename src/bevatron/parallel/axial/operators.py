"""Operators of a pair or an alignment on own rows; on one process those of `bevatron.kernels`.

They take the same arguments. Masks are whole on every process: they are small.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from bevatron import kernels
from bevatron.kernels import layer_norm_linear
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.parallel.axial.groups import sample_group
from bevatron.parallel.axial.rows import all_rows, own, sum_rows, transposed


def triangle_multiply(
    z: Float[Tensor, "*batch R N C"],
    mask: Float[Tensor, "*batch N N"] | Bool[Tensor, "*batch N N"] | None,
    norm_in_weight: Tensor,
    norm_in_bias: Tensor,
    a_weight: Tensor,
    a_gate_weight: Tensor,
    b_weight: Tensor,
    b_gate_weight: Tensor,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    out_gate_weight: Tensor,
    a_bias: Tensor | None = None,
    a_gate_bias: Tensor | None = None,
    b_bias: Tensor | None = None,
    b_gate_bias: Tensor | None = None,
    out_bias: Tensor | None = None,
    out_gate_bias: Tensor | None = None,
    *,
    outgoing: bool = True,
) -> Float[Tensor, "*batch R N C"]:
    r"""Compute own rows of `bevatron.kernels.triangle_multiply`.

    Outgoing, :math:`x_{ij} = \sum_k a_{ik} b_{jk}` of own rows i needs b of all rows. Incoming,
    :math:`x_{ij} = \sum_k a_{ki} b_{kj}` runs over rows: every process adds up its own for all i
    and j, and sums go to those who own row i. Either sends N R H numbers to each other process,
    and none has to transpose the pair.
    """
    if sample_group().size == 1:
        return kernels.triangle_multiply(
            *(z, mask, norm_in_weight, norm_in_bias, a_weight, a_gate_weight, b_weight),
            *(b_gate_weight, norm_out_weight, norm_out_bias, out_weight, out_gate_weight),
            *(a_bias, a_gate_bias, b_bias, b_gate_bias, out_bias, out_gate_bias),
            outgoing=outgoing,
        )
    weights = (a_weight, a_gate_weight, b_weight, b_gate_weight, out_gate_weight)
    biases = (a_bias, a_gate_bias, b_bias, b_gate_bias, out_gate_bias)
    projected = layer_norm_linear(
        z, norm_in_weight, norm_in_bias, torch.cat(weights), _joined(biases, weights)
    )
    a, a_gate, b, b_gate, gate = projected.split([len(weight) for weight in weights], -1)
    a, b = a_gate.sigmoid() * a, b_gate.sigmoid() * b
    if mask is not None:
        kept = own(mask, -2).to(z.dtype)[..., None]
        a, b = a * kept, b * kept
    if outgoing:
        x = torch.einsum("...ikc,...jkc->...ijc", a, all_rows(b))
    else:
        x = sum_rows(torch.einsum("...kic,...kjc->...ijc", a, b))
    update = layer_norm_linear(x, norm_out_weight, norm_out_bias, out_weight, out_bias)
    gated: Tensor = gate.sigmoid() * update
    return gated


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
    joint_bias = _joined((a_bias, b_bias), weights)
    projected = layer_norm_linear(m, norm_weight, norm_bias, torch.cat(weights), joint_bias)
    a, b = (projected * own(mask, -2).to(m.dtype)[..., None]).chunk(2, -1)
    outer = torch.einsum("...isc,...sjd->...ijcd", transposed(a, S), all_rows(b, S)).flatten(-2)
    kept = mask.to(wide_type(m))
    count = torch.einsum("...si,...sj->...ij", own(kept, -1), kept)
    bias = None if out_bias is None else out_bias.to(outer.dtype)
    update = F.linear(outer, out_weight.to(outer.dtype), bias)
    return update / (mask_eps + count).to(update.dtype)[..., None]


def _joined(biases: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor | None:
    """Concatenate biases, zero where one is not given; None if none is."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, weights, strict=True)
    return torch.cat([w.new_zeros(len(w)) if bias is None else bias for bias, w in pairs])
