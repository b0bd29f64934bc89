"""Global attention: the small layers that act on columns, not on rows, in float32.

A column has one query of H heads of D channels (HD = H D); keys and values have one head. A program
owns BLOCK columns and one head; it computes the head's slice as a matmul with all HD channels,
those of other heads set to zero, as D may be smaller than a tensor core tile. `add_kernel`
sums the partial weight gradients of the row kernels in a fixed order.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def load_tiled(
    base, C: tl.constexpr, D: tl.constexpr, HD: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Load a [D, C] matrix repeated for every head, rounded to DTYPE."""
    at = base + (tl.arange(0, HD) % D)[:, None] * C + tl.arange(0, C)[None, :]
    return tl.load(at).to(DTYPE).to(tl.float32)  # [HD, C]


@triton.jit
def load_columns(base, column, columns, stride, C: tl.constexpr):
    """Load C elements of each of BLOCK columns in float32, zero past the last."""
    at = base + column.to(tl.int64)[:, None] * stride + tl.arange(0, C)[None, :]
    # [BLOCK, C]
    return tl.load(at, mask=(column < columns)[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_columns(base, column, columns, stride, block, C: tl.constexpr):
    """Store a block [BLOCK, C] where `load_columns` loads it."""
    at = base + column.to(tl.int64)[:, None] * stride + tl.arange(0, C)[None, :]
    tl.store(at, block.to(base.dtype.element_ty), mask=(column < columns)[:, None])


@triton.jit
def sum_of_parts(base, column, columns, parts, step, C: tl.constexpr, BLOCK: tl.constexpr):
    """Add a column's partial sums [BLOCK, C], ``step`` elements apart, in order, 8 in flight."""
    total = tl.zeros([BLOCK, C], tl.float32)
    at = base + (column.to(tl.int64) * parts * step)[:, None] + tl.arange(0, C)[None, :]
    for first in range(0, parts, 8):
        for i in tl.static_range(8):
            here = ((column < columns) & (first + i < parts))[:, None]
            # [BLOCK, C]
            total += tl.load(at + tl.cast(first + i, tl.int64) * step, mask=here, other=0.0)
    return total


@triton.jit
def query_kernel(
    Sums, Counts, QWeight, KWeight, Mean, Q, Query, columns, parts, mask_eps, scale,
    C: tl.constexpr, D: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Compute queries Q [columns, HD] and Query = W_k^T q [columns, H, C], which meets the rows.

    Mean [columns, C + 1] holds the mean of a column's rows, then one over their number. It is read,
    or, if FIRST, computed from the partial Sums and Counts and written.
    """
    HD: tl.constexpr = H * D
    column, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    dtype: tl.constexpr = Query.dtype.element_ty
    if FIRST:
        count = sum_of_parts(Counts, column, columns, parts, 1, 1, BLOCK)  # [BLOCK, 1]
        inverse_count = 1.0 / (mask_eps + count)
        # [BLOCK, C]
        mean = sum_of_parts(Sums, column, columns, parts, C, C, BLOCK) * inverse_count
        if head == 0:
            store_columns(Mean, column, columns, C + 1, mean, C)
            store_columns(Mean + C, column, columns, C + 1, inverse_count, 1)
    else:
        mean = load_columns(Mean, column, columns, C + 1, C)  # [BLOCK, C]
    channel = tl.arange(0, HD)
    weight = tl.load(QWeight + channel[:, None] * C + tl.arange(0, C)[None, :])  # [HD, C]
    weight = tl.trans(weight.to(dtype).to(tl.float32))
    q = tl.dot(mean, weight, input_precision="ieee") * scale  # [BLOCK, HD]
    if head == 0:
        store_columns(Q, column, columns, HD, q, HD)
    of_head = tl.where((channel // D == head)[None, :], q, 0.0)  # [BLOCK, HD]
    # [BLOCK, C]
    query = tl.dot(of_head, load_tiled(KWeight, C, D, HD, dtype), input_precision="ieee")
    store_columns(Query + head * C, column, columns, H * C, query, C)


@triton.jit
def value_back_kernel(
    DValueParts, VWeight, Attended, DValue, DAttended, Delta, columns, parts,
    C: tl.constexpr, D: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the partial gradients of o; compute the gradient of attended rows, and delta.

    Delta [columns, H] is the sum over channels of attended rows times their gradient.
    """
    HD: tl.constexpr = H * D
    column, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    dtype: tl.constexpr = DAttended.dtype.element_ty
    do = sum_of_parts(DValueParts, column, columns, parts, HD, HD, BLOCK)  # [BLOCK, HD]
    if head == 0:
        store_columns(DValue, column, columns, HD, do, HD)
    of_head = tl.where((tl.arange(0, HD) // D == head)[None, :], do, 0.0)  # [BLOCK, HD]
    # Rounded before it enters delta: what delta is subtracted from is computed from rounded values.
    weight = load_tiled(VWeight, C, D, HD, dtype)  # [HD, C]
    dattended = tl.dot(of_head, weight, input_precision="ieee").to(dtype)  # [BLOCK, C]
    store_columns(DAttended + head * C, column, columns, H * C, dattended, C)
    attended = load_columns(Attended + head * C, column, columns, H * C, C)  # [BLOCK, C]
    delta = tl.sum(dattended.to(tl.float32) * attended, 1)  # [BLOCK]
    tl.store(Delta + column.to(tl.int64) * H + head, delta, mask=column < columns)


@triton.jit
def query_grad_kernel(
    DQueryParts, Mean, QWeight, KWeight, DQuery, DQ, DMean, columns, parts, scale,
    C: tl.constexpr, D: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Sum the partial gradients of Query; compute those of the queries and of the sum of rows.

    DMean [columns, H, C]: each head writes its own contribution to the gradient of the sum.
    """
    HD: tl.constexpr = H * D
    column, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    channel = tl.arange(0, HD)
    # [BLOCK, C]
    dquery = sum_of_parts(DQueryParts + head * C, column, columns, parts, H * C, C, BLOCK)
    store_columns(DQuery + head * C, column, columns, H * C, dquery, C)
    key = tl.trans(load_tiled(KWeight, C, D, HD, DTYPE))  # [C, HD]
    own = (channel // D == head)[None, :]
    dq = tl.where(own, tl.dot(dquery, key, input_precision="ieee") * scale, 0.0)  # [BLOCK, HD]
    at = DQ + column.to(tl.int64)[:, None] * HD + channel[None, :]
    tl.store(at, dq, mask=own & (column < columns)[:, None])
    weight = tl.load(QWeight + channel[:, None] * C + tl.arange(0, C)[None, :])  # [HD, C]
    dmean = tl.dot(dq, weight.to(DTYPE).to(tl.float32), input_precision="ieee")  # [BLOCK, C]
    inverse_count = load_columns(Mean + C, column, columns, C + 1, 1)  # [BLOCK, 1]
    store_columns(DMean + head * C, column, columns, H * C, dmean * inverse_count, C)


@triton.jit
def add_kernel(
    Partials, DGate, DOut, DGateBias, DOutBias, partials,
    C: tl.constexpr, HD: tl.constexpr, Z: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add the programs' partial sums of four gradients, which are consecutive, in order."""
    GATE: tl.constexpr = HD * C
    OUT: tl.constexpr = GATE + Z * HD
    BIAS: tl.constexpr = OUT + HD
    END: tl.constexpr = BIAS + Z
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, partials, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            here = (at < END) & (first + i < partials)
            start = Partials + tl.cast(first + i, tl.int64) * END
            total += tl.load(start + at, mask=here, other=0.0)  # [BLOCK]
    tl.store(DGate + at, total.to(DGate.dtype.element_ty), mask=at < GATE)
    out = (at >= GATE) & (at < OUT)
    tl.store(DOut + at - GATE, total.to(DOut.dtype.element_ty), mask=out)
    bias = (at >= OUT) & (at < BIAS)
    tl.store(DGateBias + at - OUT, total.to(DGateBias.dtype.element_ty), mask=bias)
    bias = (at >= BIAS) & (at < END)
    tl.store(DOutBias + at - BIAS, total.to(DOutBias.dtype.element_ty), mask=bias)
