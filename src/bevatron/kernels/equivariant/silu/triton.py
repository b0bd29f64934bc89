r"""Silu in Triton, with its first and second derivatives in closed form.

With :math:`s = \sigma(x)`: :math:`y = x s`, :math:`y' = s (1 + x (1 - s))` and
:math:`y'' = s (1 - s) (2 + x (1 - 2 s))`.

One elementwise kernel per order of derivative; a program owns ``BLOCK`` consecutive elements.
``forward`` -> ``backward`` -> ``double_backward``; the last is not differentiable.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.triton_math import sigmoids

BLOCK = 1024
INTERPRETED_BLOCK = 65536


def silu(x: Tensor) -> Tensor:
    """Compute x sigma(x)."""
    result: Tensor = forward(x)
    return result


@custom_op("silu", fake="x")
def forward(x: Tensor) -> Tensor:
    """Return y."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _launch(silu_forward, x, y)
    return y


@forward.backward()
def backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy y'(x)."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    _launch(silu_backward, dy, x, dx)
    return dx


@backward.backward()
def double_backward(ddx: Tensor, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``ddx . backward(dy, x)`` by dy and x."""
    ddx, dy, x = ddx.contiguous(), dy.contiguous(), x.contiguous()
    by_dy, by_x = torch.empty_like(x), torch.empty_like(x)
    _launch(silu_double_backward, ddx, dy, x, by_dy, by_x)
    return by_dy, by_x


def _launch(kernel: Any, *tensors: Tensor) -> None:
    """Launch a kernel over all elements."""
    x = tensors[0]
    block = BLOCK if x.is_cuda else INTERPRETED_BLOCK
    if x.numel():
        grid = (triton.cdiv(x.numel(), block),)
        kernel[grid](*tensors, x.numel(), BLOCK=block, WIDE=x.dtype == torch.float64)


@triton.jit
@no_type_check
def silu_forward(x_ptr, y_ptr, numel, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Compute y = x s."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    T: tl.constexpr = tl.float64 if WIDE else tl.float32
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(T)  # [BLOCK]
    s, _ = sigmoids(x)
    tl.store(y_ptr + offsets, x * s, mask=mask)


@triton.jit
@no_type_check
def silu_backward(dy_ptr, x_ptr, dx_ptr, numel, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Compute dx = dy y'."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    T: tl.constexpr = tl.float64 if WIDE else tl.float32
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(T)  # [BLOCK]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(T)  # [BLOCK]
    s, t = sigmoids(x)
    tl.store(dx_ptr + offsets, dy * s * (1.0 + x * t), mask=mask)


@triton.jit
@no_type_check
def silu_double_backward(
    ddx_ptr, dy_ptr, x_ptr, grad_dy_ptr, grad_x_ptr, numel, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """Compute grad_dy = ddx y' and grad_x = ddx dy y''."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    T: tl.constexpr = tl.float64 if WIDE else tl.float32
    ddx = tl.load(ddx_ptr + offsets, mask=mask, other=0.0).to(T)  # [BLOCK]
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(T)  # [BLOCK]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(T)  # [BLOCK]
    s, t = sigmoids(x)
    tl.store(grad_dy_ptr + offsets, ddx * s * (1.0 + x * t), mask=mask)
    second = s * t * (2.0 + x * (t - s))
    tl.store(grad_x_ptr + offsets, ddx * dy * second, mask=mask)
