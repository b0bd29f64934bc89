"""The gradient of normalised rows from all that reads them.

Rows of a pair are read by the layers of queries, keys, values and gate, by the layer of the
attention's bias, both after one LayerNorm, and by the residual. cuBLAS multiplies the gradient of
the joint layer back; `input_kernel` adds that of the bias, applies the norm's backward and adds the
residual's gradient, so that autograd adds nothing of the rows' size. It also writes the normalised
rows, from which cuBLAS computes the gradient of the joint weight.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.launch import contiguous, pointers
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.rows import as_rows, indexable_by_32_bits
from bevatron.kernels.shared.tiles import Tiles, TileTable
from bevatron.kernels.shared.triton_launch import Launch
from bevatron.kernels.shared.triton_math import load_vector, norm_gradient, row_offsets
from bevatron.kernels.shared.triton_partial_sums import sum_partials

LARGEST_WIDTH, MOST_HEADS = 512, 16
"""Channels of the rows, and of the bias."""
WIDTH = 128
TILES = TileTable(input=Tiles(32, 0, 8))
"""Rows of a block if they have `WIDTH` channels: all loads of a program are in flight at once."""


def fits(x: Tensor, bias_weight: Tensor) -> bool:
    """Whether the kernel supports these rows and this bias."""
    is_wide = x.shape[-1] > LARGEST_WIDTH or bias_weight.shape[0] > MOST_HEADS
    return not is_wide and x.numel() > 0 and x.ndim >= 3


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
    dy, dbias, dresidual : rows [n, K], and [..., heads] and [..., C]
    x : [..., C] in any strides; its gradient has the same
    matrix, bias_weight : [K, C] of the type of x, and [heads, C]
    mean, rstd : of every row
    """
    dnormed, dx = torch.mm(indexable_by_32_bits(dy), matrix), torch.empty_like(x)
    launch, readable, blocks = _launch(x, dx, dbias, dresidual, *norm, bias_weight)
    if not readable:
        x, dbias, dx = x.contiguous(), dbias.contiguous(), x.new_empty(x.shape)
        dresidual = contiguous(dresidual)
    heads, C = bias_weight.shape
    normed = torch.empty_like(dnormed)
    parts, sums = mean.new_empty((blocks, 2 + heads, C)), mean.new_empty((2 + heads, C))
    launch(
        *(dnormed, dbias, *pointers(x, dresidual), x, *pointers(x, *map(contiguous, norm))),
        *(bias_weight.contiguous(), mean, rstd, dx, normed, parts),
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
    bias_weight: Tensor,
) -> tuple[Launch, bool, int]:
    """Prepare the launch; return whether it reads rows in place, and its programs."""
    heads, C = bias_weight.shape
    of_residual = dx if dresidual is None else dresidual
    rows = as_rows(x, dx, dbias[..., :1].expand(x.shape), of_residual)
    readable = rows.tensors[0] is x and x.stride(-1) == of_residual.stride(-1) == dx.stride(-1) == 1
    steps = [step for each in rows.strides for step in each[:3]]
    strides = (*steps[:9], dbias.stride(-1), *steps[9:])
    if not readable:
        strides = (0, 0, C, 0, 0, C, 0, 0, heads, 1, 0, 0, C)
    width = 1 << (C - 1).bit_length()
    tiles = TILES["input"]
    block = max(1, tiles.rows * WIDTH // width)
    blocks = -(-rows.count // block)
    made = Launch(
        input_kernel,
        (blocks,),
        (rows.count, *rows.sizes, *strides),
        C=C,
        C_PAD=width,
        HEADS=heads,
        BLOCK=block,
        AXES=rows.axes if readable else 1,
        HAS_WEIGHT=norm_weight is not None,
        HAS_BIAS=norm_bias is not None,
        RESIDUAL=dresidual is not None,
        num_warps=tiles.warps,
        **tiles.register_limit(x.device),
    )
    return made, readable, blocks


@triton.jit
def input_kernel(
    DNormed, DBias, DResidual, X, NormWeight, NormBias, BiasWeight, Mean, Rstd,
    DX, Normed, Parts,
    count, n1, n2, x_0, x_1, x_2, dx_0, dx_1, dx_2, db_0, db_1, db_2, db_H, r_0, r_1, r_2,
    C: tl.constexpr, C_PAD: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    AXES: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Compute dx of BLOCK rows, and write their normalised rows n.

    With g = dnormed + W_bias^T dbias: dx = norm_gradient(weight g) + dresidual. Parts
    [programs, 2 + HEADS, C] are sums of g xhat, of g, and of dbias^T n.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, exists = tl.arange(0, C_PAD), row < count
    inside = exists[:, None] & (c < C)[None, :]
    at = X + row_offsets(row, n1, n2, x_0, x_1, x_2, AXES)[:, None] + c[None, :]
    x = tl.load(at, mask=inside, other=0.0)  # [BLOCK, C_PAD]
    at = DNormed + row[:, None] * C + c[None, :]
    g = tl.load(at, mask=inside, other=0.0)  # [BLOCK, C_PAD]
    if RESIDUAL:
        at = DResidual + row_offsets(row, n1, n2, r_0, r_1, r_2, AXES)[:, None] + c[None, :]
        residual = tl.load(at, mask=inside, other=0.0)  # [BLOCK, C_PAD]
    mean = tl.load(Mean + row, mask=exists, other=0.0)  # [BLOCK]
    rstd = tl.load(Rstd + row, mask=exists, other=0.0)  # [BLOCK]
    xhat = tl.where(inside, (x.to(tl.float32) - mean[:, None]) * rstd[:, None], 0.0)
    normed = xhat
    if HAS_WEIGHT:
        normed = normed * load_vector(NormWeight, c, C)  # [BLOCK, C_PAD]
    if HAS_BIAS:
        normed = normed + load_vector(NormBias, c, C)  # [BLOCK, C_PAD]
    normed = normed.to(X.dtype.element_ty)
    tl.store(Normed + row[:, None] * C + c[None, :], normed, mask=inside)
    part = Parts + tl.program_id(0).to(tl.int64) * (2 + HEADS) * C + c
    g = g.to(tl.float32)
    at = DBias + row_offsets(row, n1, n2, db_0, db_1, db_2, AXES)
    for h in tl.static_range(HEADS):
        dbias = tl.load(at + h * db_H, mask=exists, other=0.0).to(tl.float32)[:, None]  # [BLOCK, 1]
        of_head = tl.sum(dbias * normed.to(tl.float32), 0)  # [C_PAD]
        tl.store(part + (2 + h) * C, of_head, mask=c < C)
        g += dbias * load_vector(BiasWeight + h * C, c, C)  # [BLOCK, C_PAD]
    tl.store(part, tl.sum(g * xhat, 0), mask=c < C)
    tl.store(part + C, tl.sum(g, 0), mask=c < C)
    if HAS_WEIGHT:
        g *= load_vector(NormWeight, c, C)  # [BLOCK, C_PAD]
    dx = norm_gradient(g, xhat, rstd, C)
    if RESIDUAL:
        dx += residual
    at = DX + row_offsets(row, n1, n2, dx_0, dx_1, dx_2, AXES)[:, None] + c[None, :]
    tl.store(at, dx.to(DX.dtype.element_ty), mask=inside)
