"""Gated unit ``act(gate) * value``, act = silu or sigmoid: elementwise forward and backward.

A program computes one block [BLOCK, BLOCK_C] of rows and channels; the input strides are arbitrary.
The forward kernel writes y; the backward kernel writes dgate and dvalue and recomputes y if asked.
The transitions launch both kernels in place on chunks of rows.
"""
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
    """Compute y of one block; the activation is silu if SILU, else the sigmoid."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < count)[:, None] & (col < C)[None, :]
    at = Gate + row_offsets(row, n1, n2, gate_0, gate_1, gate_2, AXES)[:, None]
    # [BLOCK, BLOCK_C]
    g = tl.load(at + (col * gate_C)[None, :], mask=inside, other=0.0).to(tl.float32)
    at = Value + row_offsets(row, n1, n2, value_0, value_1, value_2, AXES)[:, None]
    # [BLOCK, BLOCK_C]
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
    """Compute dgate and dvalue of one block, and y if WANTS_Y.

    Every element is read before it is written, so outputs may alias inputs: DGate may be Gate,
    DValue Value and Y DY.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < count)[:, None] & (col < C)[None, :]
    at = DY + row_offsets(row, n1, n2, dy_0, dy_1, dy_2, AXES)[:, None]
    # [BLOCK, BLOCK_C]
    dy = tl.load(at + (col * dy_C)[None, :], mask=inside, other=0.0).to(tl.float32)
    at = Gate + row_offsets(row, n1, n2, gate_0, gate_1, gate_2, AXES)[:, None]
    # [BLOCK, BLOCK_C]
    g = tl.load(at + (col * gate_C)[None, :], mask=inside, other=0.0).to(tl.float32)
    at = Value + row_offsets(row, n1, n2, value_0, value_1, value_2, AXES)[:, None]
    # [BLOCK, BLOCK_C]
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
