"""Global attention, one query per column: the kernels that read the rows of the alignment.

No keys or values are formed: ``q (W_k n) = (W_k^T q) n``, so H queries of C channels meet the
normalised rows n directly, and the value layer acts on the weighted sum of rows. A column's S rows
are split into `parts` ranges; such an item is the work of a program, which loops over it in
blocks [BLOCK, C] and normalises them again in registers each time.

- `mean_kernel` writes the rows' statistics and partial masked sums of rows;
- `attend_kernel` an online softmax over the item's rows; `combine_kernel` merges a column's items;
- `output_kernel` the gated output layer;
- `output_back_kernel`, `query_back_kernel` and `rows_back_kernel` the gradients, with persistent
  programs where weight gradients are accumulated in registers. Nothing is atomic.

Dimensions: S rows and N columns of a sample, C channels, H heads (HEADS: padded to a tensor core
tile) of D channels, HD = H D, Z output channels.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import LOG2E, load_vector, logistic


@triton.jit
def part_of(item, S, N, parts):
    """Return an item's column, sample and residue, its first row and the end of its rows."""
    column, part = item // parts, item % parts
    size = tl.cdiv(S, parts)
    sample = tl.cast(column // N, tl.int64)
    first = part * size
    return column, sample, tl.cast(column % N, tl.int64), first, tl.minimum(first + size, S)


@triton.jit
def load_block(X, sample, n, s, last, x_0, x_1, x_2, C: tl.constexpr):
    """Load rows s of a column, zero from ``last`` on."""
    at = X + sample * x_0 + n * x_2 + s.to(tl.int64)[:, None] * x_1 + tl.arange(0, C)[None, :]
    return tl.load(at, mask=(s < last)[:, None], other=0.0)  # [BLOCK, C]


@triton.jit
def load_per_row(X, sample, n, s, last, S, N):
    """Load one element per row s of a column in float32, zero from ``last`` on."""
    at = X + (sample * S + s) * N + n
    return tl.load(at, mask=s < last, other=0.0).to(tl.float32)  # [BLOCK]


@triton.jit
def load_normalised(X, Mean, Rstd, sample, n, s, last, x_0, x_1, x_2, S, N, C: tl.constexpr):
    """Load rows, normalised without weight and bias, and 1/sigma; zero from ``last`` on."""
    x = load_block(X, sample, n, s, last, x_0, x_1, x_2, C).to(tl.float32)  # [BLOCK, C]
    mean = load_per_row(Mean, sample, n, s, last, S, N)  # [BLOCK]
    rstd = load_per_row(Rstd, sample, n, s, last, S, N)  # [BLOCK]
    return (x - mean[:, None]) * rstd[:, None], rstd


@triton.jit
def load_matrix(base, R: tl.constexpr, C: tl.constexpr):
    """Load a whole matrix."""
    return tl.load(base + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])  # [R, C]


@triton.jit
def load_heads(base, column, H: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    """Load a column's H rows of [columns, H, C], zero from H on."""
    head = tl.arange(0, HEADS)
    at = base + (tl.cast(column, tl.int64) * H + head)[:, None] * C + tl.arange(0, C)[None, :]
    return tl.load(at, mask=(head < H)[:, None], other=0.0)  # [HEADS, C]


@triton.jit
def load_per_head(base, column, H: tl.constexpr, HEADS: tl.constexpr):
    """Load a column's H elements of [columns, H], zero from H on."""
    head = tl.arange(0, HEADS)
    # [HEADS]
    return tl.load(base + tl.cast(column, tl.int64) * H + head, mask=head < H, other=0.0)


@triton.jit
def mean_kernel(
    X, NormWeight, NormBias, Mask, Mean, Rstd, Sums, Counts, S, N, x_0, x_1, x_2, parts, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the rows' mean and 1/sigma, and the sum and number of an item's unmasked rows."""
    item = tl.program_id(0)
    _, sample, n, first, last = part_of(item, S, N, parts)
    weight = load_vector(NormWeight, tl.arange(0, C), C)  # [1, C]
    bias = load_vector(NormBias, tl.arange(0, C), C)  # [1, C]
    total = tl.zeros([BLOCK, C], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        s = start + tl.arange(0, BLOCK)
        x = load_block(X, sample, n, s, last, x_0, x_1, x_2, C).to(tl.float32)  # [BLOCK, C]
        mean = tl.sum(x, 1) / C  # [BLOCK]
        centred = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(centred * centred, 1) / C + eps)  # [BLOCK]
        at = (sample * S + s) * N + n
        tl.store(Mean + at, mean, mask=s < last)
        tl.store(Rstd + at, rstd, mask=s < last)
        kept = load_per_row(Mask, sample, n, s, last, S, N)  # [BLOCK]
        total += kept[:, None] * (centred * rstd[:, None] * weight + bias)
        count += kept
    tl.store(Sums + item * C + tl.arange(0, C), tl.sum(total, 0))  # [C]
    tl.store(Counts + item, tl.sum(count, 0))  # []


@triton.jit
def attend_kernel(
    X, NormWeight, NormBias, Mask, Mean, Rstd, Query, Largest, Total, Sums,
    S, N, x_0, x_1, x_2, parts,
    C: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute an item's maximum logits, sums of exponentials and weighted sums of rows.

    Query is [columns, H, C], in the type of the rows; logits are in units of log 2.
    """
    item = tl.program_id(0)
    column, sample, n, first, last = part_of(item, S, N, parts)
    weight = load_vector(NormWeight, tl.arange(0, C), C)  # [1, C]
    bias = load_vector(NormBias, tl.arange(0, C), C)  # [1, C]
    query = tl.trans(load_heads(Query, column, H, HEADS, C))  # [C, HEADS]
    max_logit = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, C], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        s = start + tl.arange(0, BLOCK)
        # xhat [BLOCK, C]
        xhat, _ = load_normalised(X, Mean, Rstd, sample, n, s, last, x_0, x_1, x_2, S, N, C)
        normed = (xhat * weight + bias).to(X.dtype.element_ty)
        kept = load_per_row(Mask, sample, n, s, last, S, N) > 0  # [BLOCK]
        logits = tl.dot(normed, query) * LOG2E  # [BLOCK, HEADS]
        logits = tl.where(kept[:, None], logits, float("-inf"))
        before, max_logit = max_logit, tl.maximum(max_logit, tl.max(logits, 0))  # [HEADS]
        p = tl.exp2(logits - max_logit[None, :])
        rescale = tl.exp2(before - max_logit)
        total = total * rescale + tl.sum(p, 0)  # [HEADS]
        # [HEADS, C]
        sums = tl.dot(tl.trans(p.to(normed.dtype)), normed, sums * rescale[:, None])
    head, c = tl.arange(0, HEADS), tl.arange(0, C)
    tl.store(Largest + item * HEADS + head, max_logit)
    tl.store(Total + item * HEADS + head, total)
    tl.store(Sums + (item * HEADS + head)[:, None] * C + c[None, :], sums)


@triton.jit
def combine_kernel(
    Largest, Total, Sums, VWeight, Attended, LogSum, Value, parts,
    C: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Merge a column's items into attended rows and their logsumexp; apply the value layer.

    A column whose rows are all masked gets zeros, and a logsumexp of +inf, for weights of zero.
    """
    column, head, c = tl.program_id(0), tl.arange(0, HEADS), tl.arange(0, C)
    max_logit = tl.full([HEADS], -1e30, tl.float32)
    # Four loads are in flight at once.
    for first in range(0, parts, 4):
        for i in tl.static_range(4):
            at = Largest + (column * parts + first + i) * HEADS + head
            # [HEADS]
            max_logit = tl.maximum(max_logit, tl.load(at, mask=first + i < parts, other=-1e30))
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, C], tl.float32)
    for first in range(0, parts, 4):
        for i in tl.static_range(4):
            here, item = first + i < parts, column * parts + first + i
            at = item * HEADS + head
            # [HEADS]
            rescale = tl.exp2(tl.load(Largest + at, mask=here, other=-1e30) - max_logit)
            total += rescale * tl.load(Total + at, mask=here, other=0.0)  # [HEADS]
            at = Sums + at[:, None] * C + c[None, :]
            sums += rescale[:, None] * tl.load(at, mask=here, other=0.0)  # [HEADS, C]
    some = total > 0
    total = tl.where(some, total, 1.0)
    log_sum = tl.where(some, max_logit + tl.log2(total), float("inf"))
    tl.store(LogSum + column * H + head, log_sum, mask=head < H)
    attended = tl.where(some[:, None], sums / total[:, None], 0.0)
    at = Attended + (column * H + head).to(tl.int64)[:, None] * C + c[None, :]
    tl.store(at, attended, mask=(head < H)[:, None])
    d = tl.arange(0, D_PAD)
    # [D_PAD, C]
    weight = tl.load(VWeight + d[:, None] * C + c[None, :], mask=(d < D)[:, None], other=0.0)
    weight = tl.trans(weight.to(DTYPE).to(tl.float32))
    value = tl.dot(attended, weight, input_precision="ieee")  # [HEADS, D_PAD]
    at = Value + (column * H + head)[:, None] * D + d[None, :]
    tl.store(at, value, mask=(head < H)[:, None] & (d < D)[None, :])


@triton.jit
def output_kernel(
    X, NormWeight, NormBias, Mean, Rstd, Value, Gate, GateBias, Out, OutBias, Y,
    S, N, x_0, x_1, x_2, parts,
    C: tl.constexpr, HD: tl.constexpr, Z: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute ``out(sigmoid(gate(n)) * o)`` for the rows of an item."""
    column, sample, n, first, last = part_of(tl.program_id(0), S, N, parts)
    weight = load_vector(NormWeight, tl.arange(0, C), C)  # [1, C]
    bias = load_vector(NormBias, tl.arange(0, C), C)  # [1, C]
    # [C, HD] and [HD, Z]
    gate_weight, out_weight = tl.trans(load_matrix(Gate, HD, C)), tl.trans(load_matrix(Out, Z, HD))
    gate_bias = load_vector(GateBias, tl.arange(0, HD), HD)  # [1, HD]
    out_bias = load_vector(OutBias, tl.arange(0, Z), Z)  # [1, Z]
    o = load_vector(Value + column * HD, tl.arange(0, HD), HD)  # [1, HD]
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        s = start + tl.arange(0, BLOCK)
        # xhat [BLOCK, C]
        xhat, _ = load_normalised(X, Mean, Rstd, sample, n, s, last, x_0, x_1, x_2, S, N, C)
        normed = (xhat * weight + bias).to(X.dtype.element_ty)
        gated = logistic(tl.dot(normed, gate_weight) + gate_bias) * o  # [BLOCK, HD]
        y = tl.dot(gated.to(normed.dtype), out_weight) + out_bias  # [BLOCK, Z]
        at = Y + ((sample * S + s) * N + n)[:, None] * Z + tl.arange(0, Z)[None, :]
        tl.store(at, y.to(Y.dtype.element_ty), mask=(s < last)[:, None])


@triton.jit
def output_back_kernel(
    DY, X, NormWeight, NormBias, Mean, Rstd, Value, Gate, GateBias, Out, DN, DValue,
    Partials, S, N, x_0, x_1, x_2, parts, items,
    C: tl.constexpr, HD: tl.constexpr, Z: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gate's part of dn, and per item the sum of the gradient of o over its rows.

    A program computes every num_programs-th item. It writes its partial gradients of the gate's
    weight, the output's weight and their biases, consecutively, to Partials.
    """
    weight = load_vector(NormWeight, tl.arange(0, C), C)  # [1, C]
    bias = load_vector(NormBias, tl.arange(0, C), C)  # [1, C]
    # [HD, C] and [Z, HD]
    gate_weight, out_weight = load_matrix(Gate, HD, C), load_matrix(Out, Z, HD)
    gate_bias = load_vector(GateBias, tl.arange(0, HD), HD)  # [1, HD]
    dgate_weight = tl.zeros([HD, C], tl.float32)
    dout_weight = tl.zeros([Z, HD], tl.float32)
    dgate_bias = tl.zeros([HD], tl.float32)
    dout_bias = tl.zeros([Z], tl.float32)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        column, sample, n, first, last = part_of(item, S, N, parts)
        o = load_vector(Value + column * HD, tl.arange(0, HD), HD)  # [1, HD]
        do = tl.zeros([BLOCK, HD], tl.float32)
        for start in tl.range(first, last, BLOCK, num_stages=STAGES):
            s = start + tl.arange(0, BLOCK)
            # xhat [BLOCK, C]
            xhat, _ = load_normalised(X, Mean, Rstd, sample, n, s, last, x_0, x_1, x_2, S, N, C)
            normed = (xhat * weight + bias).to(X.dtype.element_ty)
            sigma = logistic(tl.dot(normed, tl.trans(gate_weight)) + gate_bias)  # [BLOCK, HD]
            # [BLOCK, Z]
            dy = load_block(DY, sample, n, s, last, tl.cast(S, tl.int64) * N * Z, N * Z, Z, Z)
            g = tl.dot(dy, out_weight) * sigma  # [BLOCK, HD]
            do += g
            gated = sigma * o
            dgate = g * (o - gated)
            dgate_bias += tl.sum(dgate, 0)  # [HD]
            dout_bias += tl.sum(dy.to(tl.float32), 0)  # [Z]
            dgate = dgate.to(normed.dtype)
            dout_weight = tl.dot(tl.trans(dy), gated.to(normed.dtype), dout_weight)  # [Z, HD]
            dgate_weight = tl.dot(tl.trans(dgate), normed, dgate_weight)  # [HD, C]
            dn = tl.dot(dgate, gate_weight)  # [BLOCK, C]
            at = DN + ((sample * S + s) * N + n)[:, None] * C + tl.arange(0, C)[None, :]
            tl.store(at, dn.to(DN.dtype.element_ty), mask=(s < last)[:, None])
        tl.store(DValue + item * HD + tl.arange(0, HD), tl.sum(do, 0))  # [HD]
    h, c, z = tl.arange(0, HD), tl.arange(0, C), tl.arange(0, Z)
    partial = Partials + tl.program_id(0).to(tl.int64) * (HD * C + Z * HD + HD + Z)
    tl.store(partial + h[:, None] * C + c[None, :], dgate_weight)
    partial += HD * C
    tl.store(partial + z[:, None] * HD + h[None, :], dout_weight)
    partial += Z * HD
    tl.store(partial + h, dgate_bias)
    tl.store(partial + HD + z, dout_bias)


@triton.jit
def softmax_backward(normed, query, dattended, log_sum, delta, kept):
    """Recompute the softmax weights of a block, and return them and the gradient of the logits."""
    logits = tl.dot(normed, tl.trans(query)) * LOG2E  # [BLOCK, HEADS]
    p = tl.where(kept[:, None], tl.exp2(logits - log_sum[None, :]), 0.0)
    dp = tl.dot(normed, tl.trans(dattended))  # [BLOCK, HEADS]
    return p, p * (dp - delta[None, :])


@triton.jit
def query_back_kernel(
    X, NormWeight, NormBias, Mask, Mean, Rstd, Query, DAttended, LogSum, Delta, DQuery,
    S, N, x_0, x_1, x_2, parts,
    C: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of Query, summed over an item's rows, [items, H, C]."""
    item, head, c = tl.program_id(0), tl.arange(0, HEADS), tl.arange(0, C)
    column, sample, n, first, last = part_of(item, S, N, parts)
    weight, bias = load_vector(NormWeight, c, C), load_vector(NormBias, c, C)  # [1, C]
    query = load_heads(Query, column, H, HEADS, C)  # [HEADS, C]
    dattended = load_heads(DAttended, column, H, HEADS, C)  # [HEADS, C]
    log_sum = load_per_head(LogSum, column, H, HEADS)  # [HEADS]
    delta = load_per_head(Delta, column, H, HEADS)  # [HEADS]
    dquery = tl.zeros([HEADS, C], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        s = start + tl.arange(0, BLOCK)
        # xhat [BLOCK, C]
        xhat, _ = load_normalised(X, Mean, Rstd, sample, n, s, last, x_0, x_1, x_2, S, N, C)
        normed = (xhat * weight + bias).to(X.dtype.element_ty)
        kept = load_per_row(Mask, sample, n, s, last, S, N) > 0  # [BLOCK]
        # [BLOCK, HEADS]
        _, dlogits = softmax_backward(normed, query, dattended, log_sum, delta, kept)
        dquery = tl.dot(tl.trans(dlogits.to(normed.dtype)), normed, dquery)  # [HEADS, C]
    at = DQuery + (item * H + head).to(tl.int64)[:, None] * C + c[None, :]
    tl.store(at, dquery, mask=(head < H)[:, None])


@triton.jit
def rows_back_kernel(
    X, NormWeight, NormBias, Mask, Mean, Rstd, Query, DAttended, LogSum, Delta, DMean, DX,
    NormPartials, S, N, x_0, x_1, x_2, parts, items,
    C: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add all other contributions to the gate's part of dn, in DX, and turn it into dx.

    DMean [columns, H, C] is the gradient of a column's sum of rows, per head. A program computes
    every num_programs-th item; NormPartials [programs, 2, C] takes partial gradients of the norm.
    """
    c = tl.arange(0, C)
    weight, bias = load_vector(NormWeight, c, C), load_vector(NormBias, c, C)  # [1, C]
    dweight = tl.zeros([C], tl.float32)
    dbias = tl.zeros([C], tl.float32)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        column, sample, n, first, last = part_of(item, S, N, parts)
        query = load_heads(Query, column, H, HEADS, C)  # [HEADS, C]
        dattended = load_heads(DAttended, column, H, HEADS, C)  # [HEADS, C]
        log_sum = load_per_head(LogSum, column, H, HEADS)  # [HEADS]
        delta = load_per_head(Delta, column, H, HEADS)  # [HEADS]
        dmean = tl.sum(load_heads(DMean, column, H, HEADS, C), 0)  # [C]
        for start in tl.range(first, last, BLOCK, num_stages=STAGES):
            s = start + tl.arange(0, BLOCK)
            # xhat [BLOCK, C], rstd [BLOCK]
            xhat, rstd = load_normalised(X, Mean, Rstd, sample, n, s, last, x_0, x_1, x_2, S, N, C)
            normed = (xhat * weight + bias).to(X.dtype.element_ty)
            kept = load_per_row(Mask, sample, n, s, last, S, N)  # [BLOCK]
            # [BLOCK, HEADS]
            p, dlogits = softmax_backward(normed, query, dattended, log_sum, delta, kept > 0)
            # [BLOCK, C]
            g = load_block(DX, sample, n, s, last, tl.cast(S, tl.int64) * N * C, N * C, C, C)
            g = tl.dot(p.to(normed.dtype), dattended, g.to(tl.float32))  # [BLOCK, C]
            g = tl.dot(dlogits.to(normed.dtype), query, g)  # [BLOCK, C]
            g += kept[:, None] * dmean
            g = tl.where((s < last)[:, None], g, 0.0)
            dweight += tl.sum(g * xhat, 0)  # [C]
            dbias += tl.sum(g, 0)  # [C]
            g *= weight
            mean_g, mean_gx = tl.sum(g, 1) / C, tl.sum(g * xhat, 1) / C  # [BLOCK]
            dx = (g - mean_g[:, None] - xhat * mean_gx[:, None]) * rstd[:, None]
            at = DX + ((sample * S + s) * N + n)[:, None] * C + c[None, :]
            tl.store(at, dx.to(DX.dtype.element_ty), mask=(s < last)[:, None])
    tl.store(NormPartials + tl.program_id(0) * 2 * C + c, dweight)
    tl.store(NormPartials + tl.program_id(0) * 2 * C + C + c, dbias)
