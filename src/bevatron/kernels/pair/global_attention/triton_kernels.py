"""Kernels of attention with one query per column: a column's rows are normalised where they lie.

Queries meet normalised rows without keys and values in between: ``q (W_k n) = (W_k^T q) n``, and
the values' layer acts on the sum of rows. A program takes a column, or a part of its rows, BLOCK
at a time; an item is such a part.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import LOG2E, load_vector, logistic


@triton.jit
def part_of(item, S, N, parts):
    """Return an item's column, its sample, its residue and its rows' first and last."""
    column, part = item // parts, item % parts
    size = tl.cdiv(S, parts)
    sample = tl.cast(column // N, tl.int64)
    first = part * size
    return column, sample, tl.cast(column % N, tl.int64), first, tl.minimum(first + size, S)


@triton.jit
def load_block(X, sample, n, s, last, x_0, x_1, x_2, C: tl.constexpr):
    """Load rows s of a column as [BLOCK, C], zero behind the last."""
    at = X + sample * x_0 + n * x_2 + s.to(tl.int64)[:, None] * x_1 + tl.arange(0, C)[None, :]
    return tl.load(at, mask=(s < last)[:, None], other=0.0)


@triton.jit
def load_each(X, sample, n, s, last, S, N):
    """Load one number for each of the rows s of a column, zero behind the last."""
    at = X + (sample * S + s) * N + n
    return tl.load(at, mask=s < last, other=0.0).to(tl.float32)


@triton.jit
def load_scaled(X, Mean, Rstd, sample, n, s, last, x_0, x_1, x_2, S, N, C: tl.constexpr):
    """Load rows normalised, without weight and bias; zero behind the last."""
    x = load_block(X, sample, n, s, last, x_0, x_1, x_2, C).to(tl.float32)
    mean = load_each(Mean, sample, n, s, last, S, N)
    rstd = load_each(Rstd, sample, n, s, last, S, N)
    return (x - mean[:, None]) * rstd[:, None], rstd


@triton.jit
def load_matrix(base, R: tl.constexpr, C: tl.constexpr):
    """Load a whole [R, C] matrix."""
    return tl.load(base + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def load_heads(base, column, H: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    """Load a column's H rows of [column, H, C] as [HEADS, C], zero behind the last."""
    head = tl.arange(0, HEADS)
    at = base + (tl.cast(column, tl.int64) * H + head)[:, None] * C + tl.arange(0, C)[None, :]
    return tl.load(at, mask=(head < H)[:, None], other=0.0)


@triton.jit
def load_per_head(base, column, H: tl.constexpr, HEADS: tl.constexpr):
    """Load a column's H numbers of [column, H], zero behind the last."""
    head = tl.arange(0, HEADS)
    return tl.load(base + tl.cast(column, tl.int64) * H + head, mask=head < H, other=0.0)


@triton.jit
def mean_kernel(
    X, NormWeight, NormBias, Mask, Mean, Rstd, Sums, Counts, S, N, x_0, x_1, x_2, parts, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute rows' statistics, and the sum of the rows that the mask keeps and their number."""
    item = tl.program_id(0)
    _, sample, n, first, last = part_of(item, S, N, parts)
    weight = load_vector(NormWeight, tl.arange(0, C), C)
    bias = load_vector(NormBias, tl.arange(0, C), C)
    total = tl.zeros([BLOCK, C], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        s = start + tl.arange(0, BLOCK)
        x = load_block(X, sample, n, s, last, x_0, x_1, x_2, C).to(tl.float32)
        mean = tl.sum(x, 1) / C
        centred = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(centred * centred, 1) / C + eps)
        at = (sample * S + s) * N + n
        tl.store(Mean + at, mean, mask=s < last)
        tl.store(Rstd + at, rstd, mask=s < last)
        kept = load_each(Mask, sample, n, s, last, S, N)
        total += kept[:, None] * (centred * rstd[:, None] * weight + bias)
        count += kept
    tl.store(Sums + item * C + tl.arange(0, C), tl.sum(total, 0))
    tl.store(Counts + item, tl.sum(count, 0))


@triton.jit
def attend_kernel(
    X, NormWeight, NormBias, Mask, Mean, Rstd, Query, Largest, Total, Sums,
    S, N, x_0, x_1, x_2, parts,
    C: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a part's largest logits, sums of exponentials and sums of rows with these.

    Query is [column, H, C], of the type of the rows; logits are in units of log 2.
    """
    item = tl.program_id(0)
    column, sample, n, first, last = part_of(item, S, N, parts)
    weight = load_vector(NormWeight, tl.arange(0, C), C)
    bias = load_vector(NormBias, tl.arange(0, C), C)
    query = tl.trans(load_heads(Query, column, H, HEADS, C))
    largest = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, C], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        s = start + tl.arange(0, BLOCK)
        xhat, _ = load_scaled(X, Mean, Rstd, sample, n, s, last, x_0, x_1, x_2, S, N, C)
        normed = (xhat * weight + bias).to(X.dtype.element_ty)
        kept = load_each(Mask, sample, n, s, last, S, N) > 0
        logits = tl.dot(normed, query) * LOG2E
        logits = tl.where(kept[:, None], logits, float("-inf"))
        before, largest = largest, tl.maximum(largest, tl.max(logits, 0))
        p = tl.exp2(logits - largest[None, :])
        shrink = tl.exp2(before - largest)
        total = total * shrink + tl.sum(p, 0)
        sums = tl.dot(tl.trans(p.to(normed.dtype)), normed, sums * shrink[:, None])
    head, c = tl.arange(0, HEADS), tl.arange(0, C)
    tl.store(Largest + item * HEADS + head, largest)
    tl.store(Total + item * HEADS + head, total)
    tl.store(Sums + (item * HEADS + head)[:, None] * C + c[None, :], sums)


@triton.jit
def combine_kernel(
    Largest, Total, Sums, VWeight, Attended, LogSum, Value, parts,
    C: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Combine a column's parts, and make values of them.

    A column without rows gets zeros, and a log sum that makes zeros.
    """
    column, head, c = tl.program_id(0), tl.arange(0, HEADS), tl.arange(0, C)
    largest = tl.full([HEADS], -1e30, tl.float32)
    # Four parts are on their way at once.
    for first in range(0, parts, 4):
        for i in tl.static_range(4):
            at = Largest + (column * parts + first + i) * HEADS + head
            largest = tl.maximum(largest, tl.load(at, mask=first + i < parts, other=-1e30))
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, C], tl.float32)
    for first in range(0, parts, 4):
        for i in tl.static_range(4):
            here, item = first + i < parts, column * parts + first + i
            at = item * HEADS + head
            share = tl.exp2(tl.load(Largest + at, mask=here, other=-1e30) - largest)
            total += share * tl.load(Total + at, mask=here, other=0.0)
            at = Sums + at[:, None] * C + c[None, :]
            sums += share[:, None] * tl.load(at, mask=here, other=0.0)
    some = total > 0
    total = tl.where(some, total, 1.0)
    log_sum = tl.where(some, largest + tl.log2(total), float("inf"))
    tl.store(LogSum + column * H + head, log_sum, mask=head < H)
    attended = tl.where(some[:, None], sums / total[:, None], 0.0)
    at = Attended + (column * H + head).to(tl.int64)[:, None] * C + c[None, :]
    tl.store(at, attended, mask=(head < H)[:, None])
    d = tl.arange(0, D_PAD)
    weight = tl.load(VWeight + d[:, None] * C + c[None, :], mask=(d < D)[:, None], other=0.0)
    weight = tl.trans(weight.to(DTYPE).to(tl.float32))
    value = tl.dot(attended, weight, input_precision="ieee")
    at = Value + (column * H + head)[:, None] * D + d[None, :]
    tl.store(at, value, mask=(head < H)[:, None] & (d < D)[None, :])


@triton.jit
def output_kernel(
    X, NormWeight, NormBias, Mean, Rstd, Value, Gate, GateBias, Out, OutBias, Y,
    S, N, x_0, x_1, x_2, parts,
    C: tl.constexpr, HD: tl.constexpr, Z: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute ``out(sigmoid(gate(n)) * o)`` for the rows of a part."""
    column, sample, n, first, last = part_of(tl.program_id(0), S, N, parts)
    weight = load_vector(NormWeight, tl.arange(0, C), C)
    bias = load_vector(NormBias, tl.arange(0, C), C)
    gate_weight, out_weight = tl.trans(load_matrix(Gate, HD, C)), tl.trans(load_matrix(Out, Z, HD))
    gate_bias = load_vector(GateBias, tl.arange(0, HD), HD)
    out_bias = load_vector(OutBias, tl.arange(0, Z), Z)
    o = load_vector(Value + column * HD, tl.arange(0, HD), HD)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        s = start + tl.arange(0, BLOCK)
        xhat, _ = load_scaled(X, Mean, Rstd, sample, n, s, last, x_0, x_1, x_2, S, N, C)
        normed = (xhat * weight + bias).to(X.dtype.element_ty)
        gated = logistic(tl.dot(normed, gate_weight) + gate_bias) * o
        y = tl.dot(gated.to(normed.dtype), out_weight) + out_bias
        at = Y + ((sample * S + s) * N + n)[:, None] * Z + tl.arange(0, Z)[None, :]
        tl.store(at, y.to(Y.dtype.element_ty), mask=(s < last)[:, None])


@triton.jit
def output_back_kernel(
    DY, X, NormWeight, NormBias, Mean, Rstd, Value, Gate, GateBias, Out, DN, DValue,
    Shares, S, N, x_0, x_1, x_2, parts, items,
    C: tl.constexpr, HD: tl.constexpr, Z: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gate's part of the normalised rows' gradient, and parts of that of o.

    A program walks over every so many items and leaves its shares of the gradients of the gate's
    weight, the output's weight and of their biases one behind the other in Shares.
    """
    weight = load_vector(NormWeight, tl.arange(0, C), C)
    bias = load_vector(NormBias, tl.arange(0, C), C)
    gate_weight, out_weight = load_matrix(Gate, HD, C), load_matrix(Out, Z, HD)
    gate_bias = load_vector(GateBias, tl.arange(0, HD), HD)
    dgate_weight = tl.zeros([HD, C], tl.float32)
    dout_weight = tl.zeros([Z, HD], tl.float32)
    dgate_bias = tl.zeros([HD], tl.float32)
    dout_bias = tl.zeros([Z], tl.float32)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        column, sample, n, first, last = part_of(item, S, N, parts)
        o = load_vector(Value + column * HD, tl.arange(0, HD), HD)
        do = tl.zeros([BLOCK, HD], tl.float32)
        for start in tl.range(first, last, BLOCK, num_stages=STAGES):
            s = start + tl.arange(0, BLOCK)
            xhat, _ = load_scaled(X, Mean, Rstd, sample, n, s, last, x_0, x_1, x_2, S, N, C)
            normed = (xhat * weight + bias).to(X.dtype.element_ty)
            sigma = logistic(tl.dot(normed, tl.trans(gate_weight)) + gate_bias)
            dy = load_block(DY, sample, n, s, last, tl.cast(S, tl.int64) * N * Z, N * Z, Z, Z)
            g = tl.dot(dy, out_weight) * sigma
            do += g
            gated = sigma * o
            dgate = g * (o - gated)
            dgate_bias += tl.sum(dgate, 0)
            dout_bias += tl.sum(dy.to(tl.float32), 0)
            dgate = dgate.to(normed.dtype)
            dout_weight = tl.dot(tl.trans(dy), gated.to(normed.dtype), dout_weight)
            dgate_weight = tl.dot(tl.trans(dgate), normed, dgate_weight)
            dn = tl.dot(dgate, gate_weight)
            at = DN + ((sample * S + s) * N + n)[:, None] * C + tl.arange(0, C)[None, :]
            tl.store(at, dn.to(DN.dtype.element_ty), mask=(s < last)[:, None])
        tl.store(DValue + item * HD + tl.arange(0, HD), tl.sum(do, 0))
    h, c, z = tl.arange(0, HD), tl.arange(0, C), tl.arange(0, Z)
    share = Shares + tl.program_id(0).to(tl.int64) * (HD * C + Z * HD + HD + Z)
    tl.store(share + h[:, None] * C + c[None, :], dgate_weight)
    share += HD * C
    tl.store(share + z[:, None] * HD + h[None, :], dout_weight)
    share += Z * HD
    tl.store(share + h, dgate_bias)
    tl.store(share + HD + z, dout_bias)


@triton.jit
def weights_back(normed, query, dattended, log_sum, delta, kept):
    """Return the softmax's weights, and their logits' gradients, as [BLOCK, HEADS]."""
    logits = tl.dot(normed, tl.trans(query)) * LOG2E
    p = tl.where(kept[:, None], tl.exp2(logits - log_sum[None, :]), 0.0)
    return p, p * (tl.dot(normed, tl.trans(dattended)) - delta[None, :])


@triton.jit
def query_back_kernel(
    X, NormWeight, NormBias, Mask, Mean, Rstd, Query, DAttended, LogSum, Delta, DQuery,
    S, N, x_0, x_1, x_2, parts,
    C: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a part's share of the gradient of the queries, [item, H, C]."""
    item, head, c = tl.program_id(0), tl.arange(0, HEADS), tl.arange(0, C)
    column, sample, n, first, last = part_of(item, S, N, parts)
    weight, bias = load_vector(NormWeight, c, C), load_vector(NormBias, c, C)
    query = load_heads(Query, column, H, HEADS, C)
    dattended = load_heads(DAttended, column, H, HEADS, C)
    log_sum = load_per_head(LogSum, column, H, HEADS)
    delta = load_per_head(Delta, column, H, HEADS)
    dquery = tl.zeros([HEADS, C], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        s = start + tl.arange(0, BLOCK)
        xhat, _ = load_scaled(X, Mean, Rstd, sample, n, s, last, x_0, x_1, x_2, S, N, C)
        normed = (xhat * weight + bias).to(X.dtype.element_ty)
        kept = load_each(Mask, sample, n, s, last, S, N) > 0
        _, dlogits = weights_back(normed, query, dattended, log_sum, delta, kept)
        dquery = tl.dot(tl.trans(dlogits.to(normed.dtype)), normed, dquery)
    at = DQuery + (item * H + head).to(tl.int64)[:, None] * C + c[None, :]
    tl.store(at, dquery, mask=(head < H)[:, None])


@triton.jit
def rows_back_kernel(
    X, NormWeight, NormBias, Mask, Mean, Rstd, Query, DAttended, LogSum, Delta, DMean, DX,
    NormShares, S, N, x_0, x_1, x_2, parts, items,
    C: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Turn the gate's part of the normalised rows' gradient in DX into dx.

    DMean [column, H, C] is the gradient of a column's sum of rows, by heads. A program walks over
    every so many items and leaves its share of the norm's gradients in NormShares [program, 2, C].
    """
    c = tl.arange(0, C)
    weight, bias = load_vector(NormWeight, c, C), load_vector(NormBias, c, C)
    dweight = tl.zeros([C], tl.float32)
    dbias = tl.zeros([C], tl.float32)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        column, sample, n, first, last = part_of(item, S, N, parts)
        query = load_heads(Query, column, H, HEADS, C)
        dattended = load_heads(DAttended, column, H, HEADS, C)
        log_sum = load_per_head(LogSum, column, H, HEADS)
        delta = load_per_head(Delta, column, H, HEADS)
        dmean = tl.sum(load_heads(DMean, column, H, HEADS, C), 0)
        for start in tl.range(first, last, BLOCK, num_stages=STAGES):
            s = start + tl.arange(0, BLOCK)
            xhat, rstd = load_scaled(X, Mean, Rstd, sample, n, s, last, x_0, x_1, x_2, S, N, C)
            normed = (xhat * weight + bias).to(X.dtype.element_ty)
            kept = load_each(Mask, sample, n, s, last, S, N)
            p, dlogits = weights_back(normed, query, dattended, log_sum, delta, kept > 0)
            g = load_block(DX, sample, n, s, last, tl.cast(S, tl.int64) * N * C, N * C, C, C)
            g = tl.dot(p.to(normed.dtype), dattended, g.to(tl.float32))
            g = tl.dot(dlogits.to(normed.dtype), query, g)
            g += kept[:, None] * dmean
            g = tl.where((s < last)[:, None], g, 0.0)
            dweight += tl.sum(g * xhat, 0)
            dbias += tl.sum(g, 0)
            g *= weight
            mean_g, mean_gx = tl.sum(g, 1) / C, tl.sum(g * xhat, 1) / C
            dx = (g - mean_g[:, None] - xhat * mean_gx[:, None]) * rstd[:, None]
            at = DX + ((sample * S + s) * N + n)[:, None] * C + c[None, :]
            tl.store(at, dx.to(DX.dtype.element_ty), mask=(s < last)[:, None])
    tl.store(NormShares + tl.program_id(0) * 2 * C + c, dweight)
    tl.store(NormShares + tl.program_id(0) * 2 * C + C + c, dbias)
