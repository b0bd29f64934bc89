"""The output layer of the outer product mean and its gradients, and rows scaled one by one.

cuBLAS computes the outer products P[i, c, j, d] as one matmul, for a chunk of residues
i and all N residues j (`length`); c and d are H channels each. The output layer contracts (c, d)
for each pair (i, j): its blocks gather runs of H contiguous channels d from P, which is never
permuted. `layer_kernel` writes Y [pairs, out], `layer_back_kernel` dP in the layout of P, and
`layer_weight_kernel` one partial sum [out, H H] of the weight gradient per range of pairs.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def pair_offset(pair, length, H: tl.constexpr):
    """Return the offset in P of channels (0, 0) of a pair; ``pair`` is i N + j."""
    line = pair // length
    return line.to(tl.int64) * (H * H) * length + (pair - line * length) * H


@triton.jit
def channel_offset(cd, length, H: tl.constexpr):
    """Return the offset of channels (c, d) from `pair_offset`; ``cd`` is c H + d."""
    return (cd // H).to(tl.int64) * (H * length) + cd % H


@triton.jit
def layer_kernel(
    P, Weight, Bias, Scale, Y, pairs, length, out,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute ``scale (P weight^T + bias)`` for BM pairs and BN output channels z."""
    pair = tl.program_id(0) * BM + tl.arange(0, BM)
    z = tl.program_id(1) * BN + tl.arange(0, BN)
    keep_pair, keep_z = pair < pairs, z < out
    first_of_pair = pair_offset(pair, length, H)
    total = tl.zeros([BM, BN], tl.float32)
    for first in tl.range(0, H * H, BK, num_stages=STAGES):
        cd = first + tl.arange(0, BK)
        keep = (cd < H * H)[None, :]
        at = P + first_of_pair[:, None] + channel_offset(cd, length, H)[None, :]
        p = tl.load(at, mask=keep & keep_pair[:, None], other=0.0)  # [BM, BK]
        at = Weight + z[:, None] * (H * H) + cd[None, :]
        weight = tl.load(at, mask=keep & keep_z[:, None], other=0.0)  # [BN, BK]
        total = tl.dot(p, tl.trans(weight), total, input_precision=PRECISION)  # [BM, BN]
    if HAS_BIAS:
        total += tl.load(Bias + z, mask=keep_z, other=0.0).to(tl.float32)[None, :]  # [BM, BN]
    # [BM, BN]
    total *= tl.load(Scale + pair, mask=keep_pair, other=0.0).to(tl.float32)[:, None]
    at = Y + pair.to(tl.int64)[:, None] * out + z[None, :]
    tl.store(at, total.to(Y.dtype.element_ty), mask=keep_pair[:, None] & keep_z[None, :])


@triton.jit
def layer_back_kernel(
    G, Weight, DP, pairs, length, out,
    H: tl.constexpr, OUT_PAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dP = G weight for BM pairs and all (c, d), BN at a time."""
    pair = tl.program_id(0) * BM + tl.arange(0, BM)
    z = tl.arange(0, OUT_PAD)
    keep_pair, keep_z = (pair < pairs)[:, None], z < out
    of_g = G + pair.to(tl.int64)[:, None] * out + z[None, :]
    g = tl.load(of_g, mask=keep_pair & keep_z[None, :], other=0.0)  # [BM, OUT_PAD]
    first_of_pair = pair_offset(pair, length, H)[:, None]
    for first in tl.range(0, H * H, BN, num_stages=STAGES):
        cd = first + tl.arange(0, BN)
        keep_cd = (cd < H * H)[None, :]
        of_weight = Weight + z[:, None] * (H * H) + cd[None, :]
        weight = tl.load(of_weight, mask=keep_z[:, None] & keep_cd, other=0.0)  # [OUT_PAD, BN]
        dp = tl.dot(g, weight, input_precision=PRECISION)  # [BM, BN]
        at = DP + first_of_pair + channel_offset(cd, length, H)[None, :]
        tl.store(at, dp.to(DP.dtype.element_ty), mask=keep_pair & keep_cd)


@triton.jit
def layer_weight_kernel(
    G, P, Parts, pairs, pairs_per_part, length, out,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum ``G^T P`` over a range of pairs, for BM output channels z and BN channels (c, d)."""
    cd = tl.program_id(0) * BN + tl.arange(0, BN)
    z = tl.program_id(1) * BM + tl.arange(0, BM)
    keep_z, keep_cd = (z < out)[None, :], (cd < H * H)[None, :]
    channels = channel_offset(cd, length, H)
    start = tl.program_id(2) * pairs_per_part
    last = tl.minimum(start + pairs_per_part, pairs)
    total = tl.zeros([BM, BN], tl.float32)
    for first in tl.range(start, last, BK, num_stages=STAGES):
        pair = first + tl.arange(0, BK)
        keep = (pair < last)[:, None]
        at = G + pair.to(tl.int64)[:, None] * out + z[None, :]
        g = tl.load(at, mask=keep & keep_z, other=0.0)  # [BK, BM]
        at = P + pair_offset(pair, length, H)[:, None] + channels[None, :]
        p = tl.load(at, mask=keep & keep_cd, other=0.0)  # [BK, BN]
        total = tl.dot(tl.trans(g), p, total, input_precision=PRECISION)  # [BM, BN]
    part = Parts + tl.program_id(2).to(tl.int64) * out * (H * H)
    tl.store(part + z[:, None] * (H * H) + cd[None, :], total, mask=(z < out)[:, None] & keep_cd)


@triton.jit
def scaled_kernel(
    X, Scale, Y, Partials, rows, x_stride, y_stride,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, WANTS_SUM: tl.constexpr,
):  # fmt: skip
    """Multiply each row of X by its scale; write this program's partial sum over rows to Partials.

    A program computes every num_programs-th block of rows.
    """
    col = tl.arange(0, C_PAD)
    total = tl.zeros([BLOCK, C_PAD], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        keep = (row < rows)[:, None] & (col < C)[None, :]
        # [BLOCK, C_PAD]
        x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=keep, other=0.0)
        scale = tl.load(Scale + row, mask=row < rows, other=0.0).to(tl.float32)  # [BLOCK]
        y = x.to(tl.float32) * scale[:, None]
        tl.store(Y + row[:, None] * y_stride + col[None, :], y.to(Y.dtype.element_ty), mask=keep)
        if WANTS_SUM:
            total += y
    if WANTS_SUM:
        at = Partials + tl.program_id(0) * C + col
        tl.store(at, tl.sum(total, 0), mask=col < C)  # [C_PAD]
