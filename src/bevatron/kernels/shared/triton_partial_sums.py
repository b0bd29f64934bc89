"""Adds the partial sums of a kernel's programs in order, so that results repeat bit for bit."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.launch import pointers
from bevatron.kernels.shared.triton_launch import launch
from bevatron.kernels.shared.triton_math import accumulator

SUM_BLOCK, PAIR_BLOCK, SUM_BLOCK_C = 512, 1024, 8
"""Most partial sums loaded at once, of one tensor and of two; columns of a program."""
MOST_AT_ONCE = 1024
"""Partial sums that one program for each column adds; more go in groups of SUM_BLOCK."""
LAYER_BLOCK_C = 32
"""Columns for a layer: few, so that all partial sums are in flight at once."""


def new_sums(rows: Tensor, count: int, width: int) -> Tensor:
    """Allocate sums of rows that `sum_partials` will write; zeros if there are no rows."""
    wide = wide_type(rows)
    if rows.numel():
        return rows.new_empty((count, width), dtype=wide)
    return rows.new_zeros((count, width), dtype=wide)


def sum_partials(parts: Tensor, sums: Tensor) -> None:
    """Add the partial sums ``parts`` [programs, ...] in order, many of them in groups."""
    programs, width = len(parts), sums.numel()
    each = programs if programs <= MOST_AT_ONCE else SUM_BLOCK
    groups = -(-programs // each)
    found = sums if groups == 1 else sums.new_empty((groups, width))
    launch(
        add_shares_kernel,
        (triton.cdiv(width, SUM_BLOCK_C), groups),
        (parts, found),
        (programs, width, each),
        BLOCK=min(SUM_BLOCK, triton.next_power_of_2(each)),
        BLOCK_C=SUM_BLOCK_C,
        WIDE=accumulator(parts),
        num_warps=8,
    )
    if groups > 1:
        sum_partials(found, sums)


def sum_weight_and_bias_partials(
    shares: Tensor, weight: Tensor | None, bias: Tensor | None, dweight: Tensor, dbias: Tensor
) -> None:
    """Add the partial sums ``shares`` [programs, 2, C] in order."""
    if weight is None and bias is None:
        return
    programs, _, width = shares.shape
    launch(
        sum_kernel,
        (-(-width // SUM_BLOCK_C), 2),
        (shares, dweight, dbias),
        (programs,),
        C=width,
        BLOCK=min(PAIR_BLOCK, 1 << (programs - 1).bit_length()),
        BLOCK_C=SUM_BLOCK_C,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        num_warps=8,
    )


def layer_blocks(parts: int) -> dict[str, int]:
    """Return the block and warps that finish a layer from partial sums, 64 elements a thread."""
    block = min(SUM_BLOCK, 1 << (parts - 1).bit_length())
    warps = max(1, block * LAYER_BLOCK_C // 2048)
    return {"BLOCK": block, "BLOCK_C": LAYER_BLOCK_C, "num_warps": warps}


def finish_normed_layer(
    parts: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    dweight: Tensor,
    dbias: Tensor,
    shares: Tensor,
) -> None:
    """Compute the gradients of a norm and the linear layer behind it from partial sums.

    Parameters
    ----------
    parts
        [programs, K C + K], partial sums over rows of ``d xhat^T`` and of d. d is the gradient of
        the layer's result, xhat are the normalised rows, without the norm's weight and bias.
    weight, norm_weight, norm_bias : [K, C] and [C]
    dweight, dbias : written; empty if there is no bias
    shares : [K, 2, C], written: terms of the gradients of the norm's weight and bias
    """
    K, C = weight.shape
    launch(
        finish_layer_kernel,
        (K, -(-C // LAYER_BLOCK_C)),
        (parts, *pointers(parts, weight, norm_weight, norm_bias), dweight, dbias, shares),
        (len(parts),),
        K=K,
        C=C,
        HAS_NORM_WEIGHT=norm_weight is not None,
        HAS_NORM_BIAS=norm_bias is not None,
        HAS_BIAS=dbias.numel() > 0,
        **layer_blocks(len(parts)),
    )


@triton.jit
def finish_layer(
    Parts, Weight, NormWeight, NormBias, DWeight, DBias, Shares, parts, h,
    K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Finish BLOCK_C weights of channel h of a layer, adding their partial sums in order.

    With X = sum d xhat^T and s = sum d, W the layer's weight, w and b the norm's: dW = X w + s b,
    ds = s, and dw = sum_h W_h X_h, db = sum_h W_h s_h, whose terms go to Shares.
    """
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    of_c = c < C
    # Loaded before the sums, so that all loads are in flight together.
    weight = tl.load(Weight + h * C + c, mask=of_c, other=0.0).to(tl.float32)  # [BLOCK_C]
    if HAS_NORM_WEIGHT:
        norm_weight = tl.load(NormWeight + c, mask=of_c, other=0.0).to(tl.float32)  # [BLOCK_C]
    if HAS_NORM_BIAS:
        norm_bias = tl.load(NormBias + c, mask=of_c, other=0.0).to(tl.float32)  # [BLOCK_C]
    total = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        at, keep = Parts + part.to(tl.int64) * (K * (C + 1)), part < parts
        # [BLOCK, BLOCK_C]
        total += tl.load(
            at[:, None] + h * C + c[None, :], mask=keep[:, None] & of_c[None, :], other=0.0
        )
        sums += tl.load(at + K * C + h, mask=keep, other=0.0)  # [BLOCK]
    d_xhat, d_sum = tl.sum(total, 0), tl.sum(sums, 0)
    tl.store(Shares + 2 * h * C + c, weight * d_xhat, mask=of_c)
    tl.store(Shares + (2 * h + 1) * C + c, weight * d_sum, mask=of_c)
    if HAS_NORM_WEIGHT:
        d_xhat *= norm_weight
    if HAS_NORM_BIAS:
        d_xhat += d_sum * norm_bias
    tl.store(DWeight + h * C + c, d_xhat.to(DWeight.dtype.element_ty), mask=of_c)
    if HAS_BIAS and tl.program_id(1) == 0:
        tl.store(DBias + h, d_sum.to(DBias.dtype.element_ty))


@triton.jit
def finish_layer_kernel(
    Parts, Weight, NormWeight, NormBias, DWeight, DBias, Shares, parts,
    K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Finish a layer, one channel per program; see `finish_layer`."""
    finish_layer(
        Parts, Weight, NormWeight, NormBias, DWeight, DBias, Shares, parts, tl.program_id(0),
        K, C, BLOCK, BLOCK_C, HAS_NORM_WEIGHT, HAS_NORM_BIAS, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def add_shares_kernel(
    Parts, Out, parts, width, each, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr
):
    """Add the partial sums [parts, width] of BLOCK_C columns in order, ``each`` to a row of Out."""
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.program_id(1) * each
    last = tl.minimum(start + each, parts)
    total = tl.zeros([BLOCK, BLOCK_C], WIDE)
    for first in range(start, last, BLOCK):
        part = first + tl.arange(0, BLOCK)
        mask = (part < last)[:, None] & (col < width)[None, :]
        block = Parts + part[:, None].to(tl.int64) * width + col[None, :]
        total += tl.load(block, mask=mask, other=0.0)  # [BLOCK, BLOCK_C]
    out = Out + tl.program_id(1).to(tl.int64) * width + col
    tl.store(out, tl.sum(total, 0), mask=col < width)  # [BLOCK_C]


@triton.jit
def sum_shares(
    Parts, Out, parts, which, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Add partial sums [parts, 2, C] of BLOCK_C channels, of a weight or (1) bias gradient."""
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        at = Parts + (part * 2 + which)[:, None] * C + col[None, :]
        # [BLOCK, BLOCK_C]
        total += tl.load(at, mask=(part < parts)[:, None] & (col < C)[None, :], other=0.0)
    tl.store(Out + col, tl.sum(total, 0).to(Out.dtype.element_ty), mask=col < C)  # [BLOCK_C]


@triton.jit
def sum_kernel(
    Parts, DWeight, DBias, parts, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Sum the partial gradients of BLOCK_C channels of dweight (program_id(1) = 0) or dbias (1)."""
    which = tl.program_id(1)
    if HAS_WEIGHT and which == 0:
        sum_shares(Parts, DWeight, parts, 0, C, BLOCK, BLOCK_C)
    if HAS_BIAS and which == 1:
        sum_shares(Parts, DBias, parts, 1, C, BLOCK, BLOCK_C)
