"""The gradient of normalised rows from all that reads them, in one kernel.

Rows of a pair are read by the layers of queries, keys, values and gate, by the layer of the
attention's bias, both after one LayerNorm, and by the residual. `input_kernel` multiplies the
gradients of both layers' results back, applies the norm's backward and adds the residual's
gradient, so that nothing of the rows' size is added by autograd. It also writes the normalised
rows, from which cuBLAS computes the gradient of the joint weight.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.pair.qkvg.tiles import TILES
from bevatron.kernels.shared.launch import contiguous, pointers
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.rows import as_rows
from bevatron.kernels.shared.triton_launch import Launch
from bevatron.kernels.shared.triton_math import load_vector, norm_gradient, row_offsets
from bevatron.kernels.shared.triton_partial_sums import sum_partials

WIDTHS = (16, 32, 64, 128)
STEP = 64
"""Divides the channels of the joint layer."""
MOST_HEADS = 16
"""Of the bias; also what they are padded to."""


def fits(x: Tensor, channels: int, bias_weight: Tensor) -> bool:
    """Whether the kernel supports these rows, a joint layer of ``channels``, and the bias."""
    return (
        x.element_size() == 2
        and x.shape[-1] in WIDTHS
        and x.ndim >= 3
        and x.numel() > 0
        and channels % STEP == 0
        and bias_weight.shape[0] <= MOST_HEADS
    )


def gradients(
    dy: Tensor,
    dbias: Tensor,
    dresidual: Tensor | None,
    x: Tensor,
    norm: tuple[Tensor | None, Tensor | None],
    matrix: Tensor,
    bias_weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Return gradients of x, of the norm's weight and bias, of the bias's weight, and n.

    Parameters
    ----------
    dy, dbias, dresidual : [..., K], [..., heads] and [..., C]
    x : [..., C] in any strides; its gradient has the same
    matrix, bias_weight : [K, C] of the type of x, and [heads, C]
    mean, rstd : of every row
    """
    dx, given = torch.empty_like(x), (dbias, dresidual)
    launch, readable, blocks = _launch(x, dx, *given, *norm, matrix, bias_weight)
    if not readable:
        x, dbias, dx = x.contiguous(), dbias.contiguous(), x.new_empty(x.shape)
        dresidual = contiguous(dresidual)
    C, heads = x.shape[-1], bias_weight.shape[0]
    normed = x.new_empty((mean.numel(), C))
    parts, sums = mean.new_empty((blocks, 2 + heads, C)), mean.new_empty((2 + heads, C))
    launch(
        *(dy, dbias, *pointers(x, dresidual), x, *pointers(x, *map(contiguous, norm))),
        *(matrix, bias_weight.contiguous(), mean, rstd, dx, normed, parts),
    )
    sum_partials(parts, sums)
    vectors = zip(norm, sums[:2], strict=True)
    dnorm = [None if each is None else found.to(each.dtype) for each, found in vectors]
    return dx, dnorm[0], dnorm[1], sums[2:].to(bias_weight.dtype), normed


@per_layout
def _launch(
    x: Tensor,
    dx: Tensor,
    dbias: Tensor,
    dresidual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    matrix: Tensor,
    bias_weight: Tensor,
) -> tuple[Launch, bool, int]:
    """Prepare the launch; return whether it reads rows in place, and its programs."""
    heads, (K, C), tiles = bias_weight.shape[0], matrix.shape, TILES["input"]
    of_residual = dx if dresidual is None else dresidual
    rows = as_rows(x, dx, dbias[..., :1].expand(x.shape), of_residual)
    readable = rows.in_place and x.stride(-1) == of_residual.stride(-1) == dx.stride(-1) == 1
    steps = [step for each in rows.strides for step in each[:3]]
    strides = (*steps[:9], dbias.stride(-1), *steps[9:])
    if not readable:
        strides = (0, 0, C, 0, 0, C, 0, 0, heads, 1, 0, 0, C)
    blocks = -(-rows.count // tiles.rows)
    made = Launch(
        input_kernel,
        (blocks,),
        (rows.count, *rows.sizes, *strides),
        K=K,
        C=C,
        HEADS=heads,
        HEADS_PAD=MOST_HEADS,
        BLOCK=tiles.rows,
        BLOCK_K=tiles.depth,
        AXES=rows.axes if readable else 1,
        HAS_WEIGHT=norm_weight is not None,
        HAS_BIAS=norm_bias is not None,
        RESIDUAL=dresidual is not None,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        **tiles.register_limit(x.device),
    )
    return made, readable, blocks


@triton.jit
def input_kernel(
    DY, DBias, DResidual, X, NormWeight, NormBias, Matrix, BiasWeight, Mean, Rstd,
    DX, Normed, Parts,
    count, n1, n2, x_0, x_1, x_2, dx_0, dx_1, dx_2, db_0, db_1, db_2, db_H, r_0, r_1, r_2,
    K: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, AXES: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx of BLOCK rows, and write their normalised rows n.

    With g = W^T dy + W_bias^T dbias: dx = norm_gradient(weight g) + dresidual. Parts
    [programs, 2 + HEADS, C] are sums of g xhat, of g, and of dbias^T n.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < count)[:, None]
    c, h = tl.arange(0, C), tl.arange(0, HEADS_PAD)
    of_heads = (h < HEADS)[:, None]
    # Loaded before the loop, to be under way during it.
    mean = tl.load(Mean + row, mask=row < count, other=0.0)  # [BLOCK]
    rstd = tl.load(Rstd + row, mask=row < count, other=0.0)  # [BLOCK]
    at = X + row_offsets(row, n1, n2, x_0, x_1, x_2, AXES)[:, None] + c[None, :]
    x = tl.load(at, mask=inside, other=0.0)  # [BLOCK, C]
    # [HEADS_PAD, C]
    bias_weight = tl.load(BiasWeight + h[:, None] * C + c[None, :], mask=of_heads, other=0.0)
    at = DBias + row_offsets(row, n1, n2, db_0, db_1, db_2, AXES)[:, None]
    # [BLOCK, HEADS_PAD]
    dbias = tl.load(at + (h * db_H)[None, :], mask=inside & (h < HEADS)[None, :], other=0.0)
    g = tl.dot(dbias, bias_weight.to(dbias.dtype))  # [BLOCK, C]
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        of_k = k + tl.arange(0, BLOCK_K)
        # [BLOCK, BLOCK_K]
        dy = tl.load(DY + row[:, None] * K + of_k[None, :], mask=inside, other=0.0)
        matrix = tl.load(Matrix + of_k[:, None] * C + c[None, :])  # [BLOCK_K, C]
        g = tl.dot(dy, matrix, g)  # [BLOCK, C]
    xhat = tl.where(inside, (x.to(tl.float32) - mean[:, None]) * rstd[:, None], 0.0)
    normed = xhat
    if HAS_WEIGHT:
        normed = normed * load_vector(NormWeight, c, C)  # [BLOCK, C]
    if HAS_BIAS:
        normed = normed + load_vector(NormBias, c, C)  # [BLOCK, C]
    normed = normed.to(X.dtype.element_ty)
    tl.store(Normed + row[:, None] * C + c[None, :], normed, mask=inside)
    part = Parts + tl.program_id(0).to(tl.int64) * (2 + HEADS) * C + c[None, :]
    dbias_weight = tl.dot(tl.trans(dbias), normed)  # [HEADS_PAD, C]
    tl.store(part + (2 + h)[:, None] * C, dbias_weight, mask=of_heads)
    # Column sums by the tensor cores, in rows that are all alike: shuffles take longer. What they
    # add is rounded, as plain PyTorch rounds g.
    ones = tl.full([HEADS_PAD, BLOCK], 1.0, normed.dtype)
    dnorm_weight = tl.dot(ones, (g * xhat).to(normed.dtype))  # [HEADS_PAD, C]
    tl.store(part + h[:, None] * 0, dnorm_weight, mask=(h == 0)[:, None])
    dnorm_bias = tl.dot(ones, g.to(normed.dtype))  # [HEADS_PAD, C]
    tl.store(part + C + h[:, None] * 0, dnorm_bias, mask=(h == 0)[:, None])
    if HAS_WEIGHT:
        g *= load_vector(NormWeight, c, C)  # [BLOCK, C]
    dx = norm_gradient(g, xhat, rstd, C)
    if RESIDUAL:
        at = DResidual + row_offsets(row, n1, n2, r_0, r_1, r_2, AXES)[:, None] + c[None, :]
        dx += tl.load(at, mask=inside, other=0.0)  # [BLOCK, C]
    at = DX + row_offsets(row, n1, n2, dx_0, dx_1, dx_2, AXES)[:, None] + c[None, :]
    tl.store(at, dx.to(DX.dtype.element_ty), mask=inside)
