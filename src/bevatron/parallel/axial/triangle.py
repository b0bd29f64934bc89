"""The triangle multiplication of a pair's own rows; on one process that of `bevatron.kernels`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron import kernels
from bevatron.kernels import layer_norm_linear
from bevatron.parallel.axial.contraction import contract, contract_backward
from bevatron.parallel.axial.groups import sample_group
from bevatron.parallel.axial.outer_product import joined
from bevatron.parallel.axial.rows import own
from bevatron.parallel.groups import Group


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
    :math:`x_{ij} = \sum_k a_{ki} b_{kj}` is a sum over rows, so that nothing has to be transposed:
    see `bevatron.parallel.axial.contraction`. The mask is whole.
    """
    if sample_group().size == 1:
        return kernels.triangle_multiply(
            *(z, mask, norm_in_weight, norm_in_bias, a_weight, a_gate_weight, b_weight),
            *(b_gate_weight, norm_out_weight, norm_out_bias, out_weight, out_gate_weight),
            *(a_bias, a_gate_bias, b_bias, b_gate_bias, out_bias, out_gate_bias),
            outgoing=outgoing,
        )
    kept = None if mask is None else own(mask, -2).to(z.dtype)[..., None]
    weights = (a_weight, a_gate_weight, b_weight, b_gate_weight, out_gate_weight)
    joint_bias = joined((a_bias, a_gate_bias, b_bias, b_gate_bias, out_gate_bias), weights)
    update: Tensor = _TriangleMultiply.apply(
        *(outgoing, sample_group(), kept, z, norm_in_weight, norm_in_bias, torch.cat(weights)),
        *(joint_bias, norm_out_weight, norm_out_bias, out_weight, out_bias),
    )
    return update


FIRST = 5
"""Arguments of the first linear layers: z, a norm's, a layer's."""


class _TriangleMultiply(torch.autograd.Function):
    """Keeps own rows of z and x, as the kernel does, and projects z again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, outgoing: bool, group: Group, kept: Tensor | None, *given: Any) -> Tensor:
        ctx.how = outgoing, group
        with _in_its_type(given[0]):
            a, b, gate = _projected(kept, *given[:FIRST])
            x = _rows(contract(_planes(a), _planes(b), outgoing, group))
            ctx.save_for_backward(kept, x, *given)
            return _output(x, gate, *given[FIRST:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, *saved = ctx.saved_tensors
        leaves: list[Any] = [None if t is None else t.detach().requires_grad_() for t in saved]
        x, first, last = leaves[0], leaves[1 : FIRST + 1], leaves[FIRST + 1 :]
        with torch.enable_grad(), _in_its_type(x):
            a, b, gate = _projected(kept, *first)
            opened = gate.detach().requires_grad_()
            y = _output(x, opened, *last)
        dx, dgate, *dlast = _gradients((y,), (x, opened, *last), (dy,))
        da, db = contract_backward(_planes(a), _planes(b), _planes(dx), *ctx.how)
        dfirst = _gradients((a, b, gate), first, (_rows(da), _rows(db), dgate))
        return None, None, None, *dfirst, *dlast


def _in_its_type(z: Tensor) -> AbstractContextManager[None]:
    """Keep autocast away, as the kernel does: what is computed again has no autocast around it."""
    return torch.autocast(z.device.type, enabled=False)


def _gradients(
    of: Sequence[Tensor], leaves: Sequence[Tensor | None], given: Sequence[Tensor]
) -> list[Any]:
    """Return the gradients of all leaves; None of one that is not there."""
    found = iter(torch.autograd.grad(of, [leaf for leaf in leaves if leaf is not None], given))
    return [None if leaf is None else next(found) for leaf in leaves]


def _projected(
    kept: Tensor | None,
    z: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return own rows of a, b and the gate of the result before its sigmoid."""
    C = z.shape[-1]
    H = (len(weight) - C) // 4
    projected = layer_norm_linear(z, norm_weight, norm_bias, weight, bias)
    a, a_gate, b, b_gate, gate = projected.split([H, H, H, H, C], -1)
    a, b = a_gate.sigmoid() * a, b_gate.sigmoid() * b
    return (a, b, gate) if kept is None else (a * kept, b * kept, gate)


def _output(
    x: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    gated: Tensor = gate.sigmoid() * layer_norm_linear(x, norm_weight, norm_bias, weight, bias)
    return gated


def _planes(rows: Tensor) -> Tensor:
    """Place channels in front of rows, as products take them."""
    return rows.detach().movedim(-1, -3).contiguous()


def _rows(planes: Tensor) -> Tensor:
    return planes.movedim(-3, -1)
