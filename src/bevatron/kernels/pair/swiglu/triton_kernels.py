"""The kernels of the gated unit; they also serve the transitions, chunk by chunk."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import logistic, row_offsets


@triton.jit
def forward_kernel(
    Gate, Value, Y, count, n1, n2, gate_0, gate_1, gate_2, gate_C,
    value_0, value_1, value_2, value_C, y_N,
    C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, AXES: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK rows of BLOCK_C channels; without SILU the gate is a sigmoid."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < count)[:, None] & (col < C)[None, :]
    at = Gate + row_offsets(row, n1, n2, gate_0, gate_1, gate_2, AXES)[:, None]
    g = tl.load(at + (col * gate_C)[None, :], mask=inside, other=0.0).to(tl.float32)
    at = Value + row_offsets(row, n1, n2, value_0, value_1, value_2, AXES)[:, None]
    v = tl.load(at + (col * value_C)[None, :], mask=inside, other=0.0).to(tl.float32)
    y = (g * logistic(g) if SILU else logistic(g)) * v
    tl.store(Y + (row * y_N)[:, None] + col[None, :], y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    DY, Gate, Value, DGate, DValue, Y, count, n1, n2, dy_0, dy_1, dy_2, dy_C,
    gate_0, gate_1, gate_2, gate_C, value_0, value_1, value_2, value_C, d_N,
    C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, AXES: tl.constexpr,
    SILU: tl.constexpr, WANTS_Y: tl.constexpr,
):  # fmt: skip
    """Compute both gradients, and the result again if wanted.

    Every number is read before it is written, so outputs may lie on inputs: DGate on Gate, DValue
    on Value, Y on DY.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < count)[:, None] & (col < C)[None, :]
    at = DY + row_offsets(row, n1, n2, dy_0, dy_1, dy_2, AXES)[:, None]
    dy = tl.load(at + (col * dy_C)[None, :], mask=inside, other=0.0).to(tl.float32)
    at = Gate + row_offsets(row, n1, n2, gate_0, gate_1, gate_2, AXES)[:, None]
    g = tl.load(at + (col * gate_C)[None, :], mask=inside, other=0.0).to(tl.float32)
    at = Value + row_offsets(row, n1, n2, value_0, value_1, value_2, AXES)[:, None]
    v = tl.load(at + (col * value_C)[None, :], mask=inside, other=0.0).to(tl.float32)
    s = logistic(g)
    a = g * s if SILU else s
    da = s + a * (1.0 - s) if SILU else s * (1.0 - s)
    dg = dy * v * da
    out = (row * d_N)[:, None] + col[None, :]
    tl.store(DGate + out, dg.to(DGate.dtype.element_ty), mask=inside)
    tl.store(DValue + out, (dy * a).to(DValue.dtype.element_ty), mask=inside)
    if WANTS_Y:
        y = a * v
        tl.store(Y + row[:, None] * C + col[None, :], y.to(Y.dtype.element_ty), mask=inside)
