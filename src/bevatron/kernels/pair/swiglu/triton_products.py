"""Matmul with the gated unit, or its backward, as its epilogue: ``silu(x gate^T) * (x up^T)``.

For 16-bit types. A persistent program computes blocks [BLOCK, BLOCK_H] of the hidden rows. One load
brings the gate and the value weights of BLOCK_H hidden channels, so one matmul [BLOCK, 2 BLOCK_H]
produces both in registers. Forward only their product is written; backward the gradient of the
hidden rows is read, and gates and values are not written either. Loads and stores are TMA.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bevatron.kernels.shared.launch import num_sms
from bevatron.kernels.shared.tiles import Tiles, TileTable
from bevatron.kernels.shared.triton_math import (
    GROUPED_ROWS,
    logistic,
    place,
    prefetch,
    split_columns,
)

TILES = TileTable(
    forward=Tiles(128, 64, 4, 3, depth=64, per_sm=2, shared_memory=113 * 1024),
    backward=Tiles(128, 64, 4, 3, depth=64, per_sm=2, shared_memory=113 * 1024),
)


def fits(which: str, x: Tensor, wide: Tensor) -> bool:
    """Whether a pass supports these rows and weights and gives every SM of the device a block."""
    tiles = TILES[which]
    return (
        len(wide) % (2 * tiles.columns) == 0
        and tiles.fits(x, wide)
        and _blocks(tiles, x, wide) >= tiles.per_sm * num_sms(x.device)
    )


def hidden_rows(x: Tensor, wide: Tensor) -> Tensor:
    """Compute ``silu(x gate^T) * (x up^T)`` [n, H]; ``wide`` [2 H, C] has gates before values."""
    hidden = x.new_empty((len(x), len(wide) // 2))
    _launch("forward", x, wide, hidden, hidden)
    return hidden


def hidden_gradients(x: Tensor, wide: Tensor, dhidden: Tensor) -> Tensor:
    """Return the gradients of gates, then values, [n, 2 H]; turn ``dhidden`` into hidden rows."""
    dwide = x.new_empty((len(x), len(wide)))
    _launch("backward", x, wide, dhidden, dwide)
    return dwide


def _launch(which: str, x: Tensor, wide: Tensor, hidden: Tensor, dwide: Tensor) -> None:
    tiles = TILES[which]
    programs = min(_blocks(tiles, x, wide), tiles.per_sm * num_sms(x.device))
    hidden_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(wide.view(2, -1, x.shape[1]), [2, tiles.columns, tiles.depth]),
        TensorDescriptor.from_tensor(hidden, [tiles.rows, tiles.columns // 2]),
        TensorDescriptor.from_tensor(dwide, [tiles.rows, tiles.columns // 2]),
        hidden,
        len(x),
        C=x.shape[1],
        H=hidden.shape[1],
        BLOCK=tiles.rows,
        BLOCK_H=tiles.columns,
        BLOCK_C=tiles.depth,
        ROWS=GROUPED_ROWS,
        STAGES=tiles.stages,
        BACKWARD=which == "backward",
        num_warps=tiles.warps,
    )


def _blocks(tiles: Tiles, x: Tensor, wide: Tensor) -> int:
    return -(-len(x) // tiles.rows) * (len(wide) // 2 // tiles.columns)


@triton.jit
def store_hidden(Hidden, DWide, gate, value, row, column, H: tl.constexpr, BACKWARD: tl.constexpr):
    """Store hidden rows; if BACKWARD, gradients of gates and values too, of that in their place."""
    s = logistic(gate)
    if BACKWARD:
        d = Hidden.load([row, column]).to(tl.float32)  # [BLOCK, HALF]
        DWide.store([row, column], (d * value * (s + gate * s * (1.0 - s))).to(DWide.dtype))
        DWide.store([row, H + column], (d * gate * s).to(DWide.dtype))
    Hidden.store([row, column], (gate * s * value).to(Hidden.dtype))


@triton.jit
def hidden_kernel(
    X, Weights, Hidden, DWide, Gradient, count, C: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Compute blocks of hidden rows; the flattened loop loads the next during the epilogue.

    If BACKWARD, they overwrite their gradient, and the gradients of gates, then values, are written
    to DWide [count, 2 H]. Gradient is the memory of Hidden, from which a block of the gradient is
    brought to the L2 during its matmul.
    """
    columns: tl.constexpr = H // BLOCK_H
    blocks = tl.cdiv(count, BLOCK) * columns
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=True):
        row, column = place(block, count, columns, BLOCK, ROWS)
        row, column = row * BLOCK, column * BLOCK_H
        if BACKWARD:
            rows = tl.minimum(row + tl.arange(0, BLOCK), count - 1)  # [BLOCK]
            prefetch(Gradient, rows, column, H, BLOCK_H)
        both = tl.zeros([BLOCK, 2 * BLOCK_H], tl.float32)  # gates, then values
        for c in tl.range(0, C, BLOCK_C, num_stages=STAGES):
            x = X.load([row, c])  # [BLOCK, BLOCK_C]
            weights = Weights.load([0, column, c])  # [2, BLOCK_H, BLOCK_C]
            weights = tl.reshape(weights, (2 * BLOCK_H, BLOCK_C))
            both = tl.dot(x, tl.trans(weights), both)  # [BLOCK, 2 * BLOCK_H]
        gate, value = split_columns(both, BLOCK, BLOCK_H)  # [BLOCK, BLOCK_H]
        # By halves, which take fewer registers and less shared memory: loads run further ahead.
        HALF: tl.constexpr = BLOCK_H // 2
        gate_0, gate_1 = split_columns(gate, BLOCK, HALF)  # [BLOCK, HALF]
        value_0, value_1 = split_columns(value, BLOCK, HALF)  # [BLOCK, HALF]
        store_hidden(Hidden, DWide, gate_0, value_0, row, column, H, BACKWARD)
        store_hidden(Hidden, DWide, gate_1, value_1, row, column + HALF, H, BACKWARD)
