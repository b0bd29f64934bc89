"""The triangle multiplication in plain PyTorch: the specification."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.pair.add_dropped.reference import add_dropped, linear
from bevatron.kernels.pair.layer_norm.reference import layer_norm
from bevatron.kernels.pair.triangle_multiply.contraction import Contraction


def triangle_multiply(
    z: Tensor,
    mask: Tensor | None,
    drop: Tensor | None,
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
    a_bias: Tensor | None,
    a_gate_bias: Tensor | None,
    b_bias: Tensor | None,
    b_gate_bias: Tensor | None,
    out_bias: Tensor | None,
    out_gate_bias: Tensor | None,
    outgoing: bool,
    eps: float,
    residual: bool,
    contraction: Contraction | None,
) -> Tensor:
    """Compute ``sigmoid(gate(n)) * out(LayerNorm(sum_k a_ik b_jk))`` with n the normalised pair.

    Times the dropout mask, if there is one, and plus the pair if it is residual.
    """
    n = layer_norm(z, norm_in_weight, norm_in_bias, None, None, eps, False)
    a = linear(n, a_gate_weight, a_gate_bias).sigmoid() * linear(n, a_weight, a_bias)
    b = linear(n, b_gate_weight, b_gate_bias).sigmoid() * linear(n, b_weight, b_bias)
    if mask is not None:
        kept = mask.to(z.dtype)[..., None]
        a, b = a * kept, b * kept
    if contraction is None:
        equation = "...ikc,...jkc->...ijc" if outgoing else "...kic,...kjc->...ijc"
        x = torch.einsum(equation, a, b)
    else:
        planes = [rows.movedim(-1, -3) for rows in (a, b)]
        matrices = (plane.flatten(0, -3) for plane in planes)
        x = (
            _Contracted.apply(contraction, outgoing, *matrices)
            .view(planes[0].shape)
            .movedim(-3, -1)
        )
    x = layer_norm(x, norm_out_weight, norm_out_bias, None, None, eps, False)
    gate = linear(n, out_gate_weight, out_gate_bias).sigmoid()
    y = gate * linear(x, out_weight, out_bias)
    drop = None if drop is None else drop.to(z.dtype)
    if residual:
        return add_dropped(z, y, drop)
    return y if drop is None else y * drop.unsqueeze(-3)


class _Contracted(torch.autograd.Function):
    """A caller's contraction."""

    @staticmethod
    def forward(ctx: Any, contraction: Contraction, outgoing: bool, a: Tensor, b: Tensor) -> Tensor:
        ctx.how, x = (contraction, outgoing), a.new_empty(a.shape)
        ctx.save_for_backward(a, b, *contraction.contract(a, b, x, outgoing))
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        (contraction, outgoing), (a, b, *kept) = ctx.how, ctx.saved_tensors
        da, db = a.new_empty(a.shape), b.new_empty(b.shape)
        contraction.contract_backward(dx, a, b, kept, da, db, outgoing, lambda: None)
        return None, None, da, db
