"""A linear layer with a kernel for the bias gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.molecule.linear.rounding import rounded
from bevatron.kernels.shared.chunked_linear import linear as product
from bevatron.kernels.shared.launch import on_gpu
from bevatron.kernels.shared.rows import indexable_by_32_bits
from bevatron.kernels.shared.triton_row_sums import sum_rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the same as the reference; see `bevatron.kernels.molecule.linear`."""
    kind, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    found: tuple[Tensor, Tensor] = _Linear.apply(x, weight, bias, dtype)
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        narrow_x, narrow_weight = indexable_by_32_bits(_rows(x).to(dtype)), rounded(weight, dtype)
        ctx.save_for_backward(narrow_x, narrow_weight)
        ctx.set_materialize_grads(False)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.shape = x.shape
        # Not a view of the product: autograd refuses to modify one in place.
        y = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)
        given = narrow_x, narrow_weight, None if bias is None else rounded(bias, dtype)
        product(*given, out=_rows(y))
        return y, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, more: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return more, None, None, None
        dy = indexable_by_32_bits(_rows(dy))
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            more = None if more is None else more.reshape(x.shape)
            dx = _row_gradient(dy, weight, more, of_x).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            dweight = _weight_gradient(dy, x, of_weight)
        if of_bias is not None and ctx.needs_input_grad[2]:
            dbias = sum_rows(dy).to(of_bias)
        return dx, dweight, dbias, None


def _rows(x: Tensor) -> Tensor:
    """Fold all axes but the last; without channels, their number cannot be left to torch."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _row_gradient(dy: Tensor, weight: Tensor, more: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute ``dy weight + more`` out of place: autograd may have passed ``more`` to others."""
    if more is None:
        return torch.mm(dy, weight).to(dtype)
    if dtype == dy.dtype:
        return torch.addmm(more, dy, weight)
    return more + torch.mm(dy, weight).to(dtype)


def _weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    if on_gpu(dy) and dy.dtype != dtype == torch.float32:
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return torch.mm(dy.t(), x).to(dtype)
