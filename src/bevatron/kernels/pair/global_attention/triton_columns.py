"""Kernels of what concerns columns only: a program takes BLOCK of them and one head, in float32.

A column has one query, of H heads of D channels, HD together; keys and values have one head. What
a head does is a product with all channels of which those of other heads are zero.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def load_tiled(
    base, C: tl.constexpr, D: tl.constexpr, HD: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Load a [D, C] matrix once for every head, as [HD, C], rounded to a type."""
    at = base + (tl.arange(0, HD) % D)[:, None] * C + tl.arange(0, C)[None, :]
    return tl.load(at).to(DTYPE).to(tl.float32)


@triton.jit
def load_columns(base, column, columns, stride, C: tl.constexpr):
    """Load numbers of BLOCK columns, zero behind the last."""
    at = base + column.to(tl.int64)[:, None] * stride + tl.arange(0, C)[None, :]
    return tl.load(at, mask=(column < columns)[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_columns(base, column, columns, stride, block, C: tl.constexpr):
    """Store what `load_columns` would load."""
    at = base + column.to(tl.int64)[:, None] * stride + tl.arange(0, C)[None, :]
    tl.store(at, block.to(base.dtype.element_ty), mask=(column < columns)[:, None])


@triton.jit
def sum_of_parts(base, column, columns, parts, step, C: tl.constexpr, BLOCK: tl.constexpr):
    """Add a column's parts, ``step`` numbers apart, in their order; eight are on their way."""
    total = tl.zeros([BLOCK, C], tl.float32)
    at = base + (column.to(tl.int64) * parts * step)[:, None] + tl.arange(0, C)[None, :]
    for first in range(0, parts, 8):
        for i in tl.static_range(8):
            here = ((column < columns) & (first + i < parts))[:, None]
            total += tl.load(at + tl.cast(first + i, tl.int64) * step, mask=here, other=0.0)
    return total


@triton.jit
def query_kernel(
    Sums, Counts, QWeight, KWeight, Mean, Q, Query, columns, parts, mask_eps, scale,
    C: tl.constexpr, D: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Compute queries Q [column, HD] and what meets rows, Query [column, H, C].

    Mean [column, C + 1] is read, or with FIRST made of the parts' Sums and Counts: the mean of the
    rows, then one over their number.
    """
    HD: tl.constexpr = H * D
    column, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    dtype: tl.constexpr = Query.dtype.element_ty
    if FIRST:
        count = sum_of_parts(Counts, column, columns, parts, 1, 1, BLOCK)
        share = 1.0 / (mask_eps + count)
        mean = sum_of_parts(Sums, column, columns, parts, C, C, BLOCK) * share
        if head == 0:
            store_columns(Mean, column, columns, C + 1, mean, C)
            store_columns(Mean + C, column, columns, C + 1, share, 1)
    else:
        mean = load_columns(Mean, column, columns, C + 1, C)
    channel = tl.arange(0, HD)
    weight = tl.load(QWeight + channel[:, None] * C + tl.arange(0, C)[None, :])
    weight = tl.trans(weight.to(dtype).to(tl.float32))
    q = tl.dot(mean, weight, input_precision="ieee") * scale
    if head == 0:
        store_columns(Q, column, columns, HD, q, HD)
    of_head = tl.where((channel // D == head)[None, :], q, 0.0)
    query = tl.dot(of_head, load_tiled(KWeight, C, D, HD, dtype), input_precision="ieee")
    store_columns(Query + head * C, column, columns, H * C, query, C)


@triton.jit
def value_back_kernel(
    DValueParts, VWeight, Attended, DValue, DAttended, Delta, columns, parts,
    C: tl.constexpr, D: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From parts of the gradient of o: their sum, that of attended rows, its product with them."""
    HD: tl.constexpr = H * D
    column, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    dtype: tl.constexpr = DAttended.dtype.element_ty
    do = sum_of_parts(DValueParts, column, columns, parts, HD, HD, BLOCK)
    if head == 0:
        store_columns(DValue, column, columns, HD, do, HD)
    of_head = tl.where((tl.arange(0, HD) // D == head)[None, :], do, 0.0)
    # Rounded before the sum over rows is made of it: what it is taken from is rounded too.
    value = load_tiled(VWeight, C, D, HD, dtype)
    dattended = tl.dot(of_head, value, input_precision="ieee").to(dtype)
    store_columns(DAttended + head * C, column, columns, H * C, dattended, C)
    attended = load_columns(Attended + head * C, column, columns, H * C, C)
    delta = tl.sum(dattended.to(tl.float32) * attended, 1)
    tl.store(Delta + column.to(tl.int64) * H + head, delta, mask=column < columns)


@triton.jit
def query_grad_kernel(
    DQueryParts, Mean, QWeight, KWeight, DQuery, DQ, DMean, columns, parts, scale,
    C: tl.constexpr, D: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """From parts of the gradient of what meets rows: their sum, that of queries and of the sum.

    Of the last one, DMean [column, H, C], every head has its part.
    """
    HD: tl.constexpr = H * D
    column, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    channel = tl.arange(0, HD)
    dquery = sum_of_parts(DQueryParts + head * C, column, columns, parts, H * C, C, BLOCK)
    store_columns(DQuery + head * C, column, columns, H * C, dquery, C)
    key = tl.trans(load_tiled(KWeight, C, D, HD, DTYPE))
    own = (channel // D == head)[None, :]
    dq = tl.where(own, tl.dot(dquery, key, input_precision="ieee") * scale, 0.0)
    at = DQ + column.to(tl.int64)[:, None] * HD + channel[None, :]
    tl.store(at, dq, mask=own & (column < columns)[:, None])
    weight = tl.load(QWeight + channel[:, None] * C + tl.arange(0, C)[None, :])
    dmean = tl.dot(dq, weight.to(DTYPE).to(tl.float32), input_precision="ieee")
    share = load_columns(Mean + C, column, columns, C + 1, 1)
    store_columns(DMean + head * C, column, columns, H * C, dmean * share, C)


@triton.jit
def add_kernel(
    Shares, DGate, DOut, DGateBias, DOutBias, shares,
    C: tl.constexpr, HD: tl.constexpr, Z: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add programs' shares of four gradients, which lie one behind the other, in their order."""
    GATE: tl.constexpr = HD * C
    OUT: tl.constexpr = GATE + Z * HD
    BIAS: tl.constexpr = OUT + HD
    END: tl.constexpr = BIAS + Z
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, shares, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            here = (at < END) & (first + i < shares)
            start = Shares + tl.cast(first + i, tl.int64) * END
            total += tl.load(start + at, mask=here, other=0.0)
    tl.store(DGate + at, total.to(DGate.dtype.element_ty), mask=at < GATE)
    out = (at >= GATE) & (at < OUT)
    tl.store(DOut + at - GATE, total.to(DOut.dtype.element_ty), mask=out)
    bias = (at >= OUT) & (at < BIAS)
    tl.store(DGateBias + at - OUT, total.to(DGateBias.dtype.element_ty), mask=bias)
    bias = (at >= BIAS) & (at < END)
    tl.store(DOutBias + at - BIAS, total.to(DOutBias.dtype.element_ty), mask=bias)
