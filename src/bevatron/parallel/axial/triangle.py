"""The triangle multiplication of own rows of a pair: the operator, contracted over processes."""

from jaxtyping import Bool, Float
from torch import Tensor

from bevatron import kernels
from bevatron.parallel.axial.contraction import contraction_of
from bevatron.parallel.axial.groups import sample_group
from bevatron.parallel.axial.rows import own


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
    drop: Float[Tensor, "*batch N C"] | None = None,
    residual: bool = False,
) -> Float[Tensor, "*batch R N C"]:
    r"""Compute own rows of `bevatron.kernels.triangle_multiply`.

    Outgoing, :math:`x_{ij} = \sum_k a_{ik} b_{jk}` of own rows i needs b of all rows. Incoming,
    :math:`x_{ij} = \sum_k a_{ki} b_{kj}` is a sum over rows, so nothing is transposed; see
    `bevatron.parallel.axial.contraction`. The mask is that of the whole pair; rows share ``drop``.
    """
    N, hidden = z.shape[-2], a_weight.shape[0]
    whole_bytes = z.shape[:-3].numel() * N * N * hidden * z.itemsize
    return kernels.triangle_multiply(
        z,
        None if mask is None else own(mask, -2),
        norm_in_weight,
        norm_in_bias,
        a_weight,
        a_gate_weight,
        b_weight,
        b_gate_weight,
        norm_out_weight,
        norm_out_bias,
        out_weight,
        out_gate_weight,
        a_bias=a_bias,
        a_gate_bias=a_gate_bias,
        b_bias=b_bias,
        b_gate_bias=b_gate_bias,
        out_bias=out_bias,
        out_gate_bias=out_gate_bias,
        outgoing=outgoing,
        drop=drop,
        residual=residual,
        contraction=contraction_of(sample_group(), whole_bytes),
    )
