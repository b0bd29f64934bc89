"""LayerNorm and a linear layer to a few channels, such as the bias that a pair gives to attention.

A matmul with few columns feeds its rows to the tensor cores once, so one kernel that reads the rows
can do everything: the forward pass writes nothing of their size, the backward pass only their
gradient.

- `narrow_kernel`: a program normalises BLOCK rows in registers, multiplies them by the weight, and
  writes the result and the rows' statistics; for a wide layer on the same rows, the rows too.
- `narrow_backward_kernel`: its programs loop over all blocks, write dx, and keep in registers the
  sums over rows of dy xhat^T and of dy, from which `finish_normed_layer` computes all other
  gradients.

The layer maps C channels to K; K_PAD and C_PAD are padded to powers of two.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.launch import contiguous, num_sms, pointers
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.rows import as_rows
from bevatron.kernels.shared.triton_launch import Launch
from bevatron.kernels.shared.triton_math import (
    allows_tf32,
    load_vector,
    norm_gradient,
    normalise,
    row_offsets,
)
from bevatron.kernels.shared.triton_partial_sums import (
    finish_normed_layer,
    sum_weight_and_bias_partials,
)

MOST_CHANNELS, LARGEST_WIDTH = 16, 512
"""Channels of the result and of the rows; wider layers go to cuBLAS."""
ELEMENTS = 4096
"""Elements of a block, so that it fits the registers of four warps."""
FEWEST_ROWS = 16
"""Smallest dimension of a tensor core tile."""
PROGRAMS_PER_SM = 2
"""Of the backward kernel; each program writes partial sums."""


def is_narrow(x: Tensor, weight: Tensor) -> bool:
    """Whether these kernels support a layer."""
    return weight.shape[0] <= MOST_CHANNELS and 0 < x.shape[-1] <= LARGEST_WIDTH and x.numel() > 0


def project(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    normed: Tensor | None = None,
) -> None:
    """Write the result, in any strides, the statistics of the rows, and the normalised rows."""
    launch, readable = _forward(x, norm_weight, norm_bias, weight, bias, y, normed, eps, _tf32(x))
    to = y
    if not readable:
        x, to = x.contiguous(), y.new_empty(y.shape)
    given = contiguous(norm_weight), contiguous(norm_bias), weight.contiguous(), contiguous(bias)
    launch(*pointers(x, x, *given), to, mean, rstd, *pointers(x, normed))
    if to is not y:
        y.copy_(to)


@per_layout
def _forward(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    normed: Tensor | None,
    eps: float,
    tf32: bool,
) -> tuple[Launch, bool]:
    """Prepare the launch; return whether the kernel reads and writes the rows in place."""
    rows = as_rows(x, y[..., :1].expand(x.shape))
    readable = rows.in_place
    strides = (*rows.strides[0], *rows.strides[1][:3], y.stride(-1))
    if not readable:
        strides = (0, 0, x.shape[-1], 1, 0, 0, y.shape[-1], 1)
    constants = _constants(norm_weight, norm_bias, weight, tf32)
    made = Launch(
        narrow_kernel,
        (-(-rows.count // constants["BLOCK"]),),
        (rows.count, *rows.sizes, *strides, eps),
        HAS_BIAS=bias is not None,
        HAS_NORMED=normed is not None,
        AXES=rows.axes,
        **constants,
    )
    return made, readable


def project_backward(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Write the gradients: of x, of weight and bias of the norm, of weight and bias."""
    launch, readable, shape = _backward(dy, x, norm_weight, norm_bias, weight, _tf32(x))
    if not readable:
        dy, x = dy.contiguous(), x.contiguous()
    dx, dnorm_weight, dnorm_bias, dweight, dbias = gradients
    norm, weight = (contiguous(norm_weight), contiguous(norm_bias)), weight.contiguous()
    parts = x.new_empty(shape, dtype=torch.float32)
    launch(dy, x, *pointers(x, norm[0]), weight, mean, rstd, dx, parts)
    shares = parts.new_empty((weight.shape[0], 2, x.shape[-1]))
    finish_normed_layer(parts, weight, *norm, dweight, dbias, shares)
    sum_weight_and_bias_partials(shares, *norm, dnorm_weight, dnorm_bias)


@per_layout
def _backward(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    tf32: bool,
) -> tuple[Launch, bool, tuple[int, int]]:
    """Prepare the launch; return whether it reads rows in place, and its partial sums' shape."""
    # One layout for all shapes that fold into the same rows: only their number matters.
    rows = as_rows(x, dy[..., :1].expand(x.shape))
    K, C = weight.shape
    constants = _constants(norm_weight, norm_bias, weight, tf32)
    del constants["HAS_NORM_BIAS"]
    programs = min(-(-rows.count // constants["BLOCK"]), PROGRAMS_PER_SM * num_sms(x.device))
    strides = (*rows.strides[0], *rows.strides[1][:3], dy.stride(-1))
    readable = rows.in_place
    if not readable:
        strides = (0, 0, C, 1, 0, 0, K, 1)
    made = Launch(
        narrow_backward_kernel,
        (programs,),
        (rows.count, *rows.sizes, *strides),
        AXES=rows.axes,
        **constants,
    )
    return made, readable, (programs, K * (C + 1))


def _constants(
    norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, tf32: bool
) -> dict[str, Any]:
    K, C = weight.shape
    width = max(16, 1 << (C - 1).bit_length())
    block = max(FEWEST_ROWS, ELEMENTS // width)
    return {
        "K": K,
        "K_PAD": MOST_CHANNELS,
        "C": C,
        "C_PAD": width,
        "BLOCK": block,
        "HAS_NORM_WEIGHT": norm_weight is not None,
        "HAS_NORM_BIAS": norm_bias is not None,
        "PRECISION": "tf32" if tf32 else "ieee",
        "num_warps": 4 if block * width <= ELEMENTS else 8,
    }


def _tf32(x: Tensor) -> bool:
    return x.dtype == torch.float32 and allows_tf32()


@triton.jit
def _load_weight(Weight, K: tl.constexpr, K_PAD: tl.constexpr, C: tl.constexpr,
                 C_PAD: tl.constexpr):  # fmt: skip
    """Load the weight, zero in the padding."""
    k, c = tl.arange(0, K_PAD), tl.arange(0, C_PAD)
    inside = (k < K)[:, None] & (c < C)[None, :]
    # [K_PAD, C_PAD]
    return tl.load(Weight + k[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def narrow_kernel(
    X, NormWeight, NormBias, Weight, Bias, Y, Mean, Rstd, Normed,
    count, n1, n2, x_0, x_1, x_2, x_C, y_0, y_1, y_2, y_K, eps,
    K: tl.constexpr, K_PAD: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr,
    BLOCK: tl.constexpr, AXES: tl.constexpr, HAS_NORM_WEIGHT: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORMED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK rows of the result, and each row's mean and 1/sigma in float32."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k, c = tl.arange(0, K_PAD), tl.arange(0, C_PAD)
    inside = (row < count)[:, None] & (c < C)[None, :]
    at = X + row_offsets(row, n1, n2, x_0, x_1, x_2, AXES)[:, None] + (c * x_C)[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, C_PAD]
    weight = _load_weight(Weight, K, K_PAD, C, C_PAD).to(X.dtype.element_ty)  # [K_PAD, C_PAD]
    normed, mean, rstd = normalise(x, inside, eps, C)
    tl.store(Mean + row, mean, mask=row < count)
    tl.store(Rstd + row, rstd, mask=row < count)
    if HAS_NORM_WEIGHT:
        normed *= load_vector(NormWeight, c, C)  # [BLOCK, C_PAD]
    if HAS_NORM_BIAS:
        normed += load_vector(NormBias, c, C)  # [BLOCK, C_PAD]
    normed = normed.to(X.dtype.element_ty)
    if HAS_NORMED:
        tl.store(Normed + row[:, None] * C + c[None, :], normed, mask=inside)
    y = tl.dot(normed, tl.trans(weight), input_precision=PRECISION)  # [BLOCK, K_PAD]
    if HAS_BIAS:
        y += load_vector(Bias, k, K)  # [BLOCK, K_PAD]
    to = Y + row_offsets(row, n1, n2, y_0, y_1, y_2, AXES)[:, None] + (k * y_K)[None, :]
    tl.store(to, y.to(Y.dtype.element_ty), mask=(row < count)[:, None] & (k < K)[None, :])


@triton.jit
def narrow_backward_kernel(
    DY, X, NormWeight, Weight, Mean, Rstd, DX, Parts,
    count, n1, n2, x_0, x_1, x_2, x_C, dy_0, dy_1, dy_2, dy_K,
    K: tl.constexpr, K_PAD: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr,
    BLOCK: tl.constexpr, AXES: tl.constexpr, HAS_NORM_WEIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx of every num_programs-th block; write sums of dy xhat^T and dy to Parts.

    Parts is [programs, K C + K]. With g = W^T dy times the norm's weight,
    dx = rstd (g - mean(g) - xhat mean(g xhat)).
    """
    k, c = tl.arange(0, K_PAD), tl.arange(0, C_PAD)
    weight = _load_weight(Weight, K, K_PAD, C, C_PAD).to(X.dtype.element_ty)  # [K_PAD, C_PAD]
    total = tl.zeros([K_PAD, C_PAD], tl.float32)
    sums = tl.zeros([BLOCK, K_PAD], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = (row < count)[:, None] & (c < C)[None, :]
        at = X + row_offsets(row, n1, n2, x_0, x_1, x_2, AXES)[:, None] + (c * x_C)[None, :]
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, C_PAD]
        at = DY + row_offsets(row, n1, n2, dy_0, dy_1, dy_2, AXES)[:, None] + (k * dy_K)[None, :]
        # [BLOCK, K_PAD]
        dy = tl.load(at, mask=(row < count)[:, None] & (k < K)[None, :], other=0.0)
        mean = tl.load(Mean + row, mask=row < count, other=0.0)  # [BLOCK]
        rstd = tl.load(Rstd + row, mask=row < count, other=0.0)  # [BLOCK]
        xhat = tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)
        sums += dy.to(tl.float32)
        # [K_PAD, C_PAD]
        total = tl.dot(tl.trans(dy), xhat.to(dy.dtype), total, input_precision=PRECISION)
        g = tl.dot(dy, weight, input_precision=PRECISION)  # [BLOCK, C_PAD]
        if HAS_NORM_WEIGHT:
            g *= load_vector(NormWeight, c, C)  # [BLOCK, C_PAD]
        dx = norm_gradient(g, xhat, rstd, C)
        tl.store(DX + row[:, None] * C + c[None, :], dx.to(DX.dtype.element_ty), mask=inside)
    part = Parts + tl.program_id(0).to(tl.int64) * (K * (C + 1))
    keep = (k < K)[:, None] & (c < C)[None, :]
    tl.store(part + k[:, None] * C + c[None, :], total, mask=keep)
    tl.store(part + K * C + k, tl.sum(sums, 0), mask=k < K)
