"""Matmul with the gated unit, or its backward, as its epilogue: ``silu(x gate^T) * (x up^T)``.

For 16-bit types. A persistent program computes blocks [BLOCK, BLOCK_H] of the hidden rows. The gate
and value weights of BLOCK_H hidden channels are interleaved in memory, so one matmul
[BLOCK, 2 BLOCK_H] produces both in registers. Forward only their product is written; backward the
gradient of the hidden rows is read, and gates and values are not written either. Loads and stores
are TMA.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bevatron.kernels.pair.gated import interleaved
from bevatron.kernels.shared.launch import num_sms
from bevatron.kernels.shared.tiles import Tiles, TileTable
from bevatron.kernels.shared.triton_math import GROUPED_ROWS, logistic, place

TILES = TileTable(
    forward=Tiles(128, 64, 4, 3, depth=64, per_sm=2, shared_memory=113 * 1024),
    backward=Tiles(128, 128, 8, 3, depth=64, shared_memory=209 * 1024),
)


def fits(which: str, x: Tensor, gate: Tensor) -> bool:
    """Whether a pass supports these rows and weights and gives every SM of the device a block."""
    tiles = TILES[which]
    return (
        len(gate) % tiles.columns == 0
        and tiles.fits(x, gate)
        and _blocks(tiles, x, gate) >= tiles.per_sm * num_sms(x.device)
    )


def hidden_rows(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(x gate^T) * (x up^T)`` [n, H] of rows [n, C] and weights [H, C]."""
    hidden = x.new_empty((len(x), len(gate)))
    _launch("forward", x, gate, up, hidden, hidden)
    return hidden


def hidden_gradients(x: Tensor, gate: Tensor, up: Tensor, dhidden: Tensor) -> Tensor:
    """Return the gradients of gates, then values, [n, 2 H]; turn ``dhidden`` into hidden rows."""
    dwide = x.new_empty((len(x), 2 * len(gate)))
    _launch("backward", x, gate, up, dhidden, dwide)
    return dwide


def _launch(which: str, x: Tensor, gate: Tensor, up: Tensor, hidden: Tensor, dwide: Tensor) -> None:
    tiles = TILES[which]
    weights = interleaved(gate, up, tiles.columns)
    programs = min(_blocks(tiles, x, gate), tiles.per_sm * num_sms(x.device))
    hidden_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(weights, [2 * tiles.columns, tiles.depth]),
        TensorDescriptor.from_tensor(hidden, [tiles.rows, tiles.columns]),
        TensorDescriptor.from_tensor(dwide, [tiles.rows, tiles.columns]),
        len(x),
        C=x.shape[1],
        H=len(gate),
        BLOCK=tiles.rows,
        BLOCK_H=tiles.columns,
        BLOCK_C=tiles.depth,
        ROWS=GROUPED_ROWS,
        STAGES=tiles.stages,
        BACKWARD=which == "backward",
        num_warps=tiles.warps,
    )


def _blocks(tiles: Tiles, x: Tensor, gate: Tensor) -> int:
    return -(-len(x) // tiles.rows) * (len(gate) // tiles.columns)


@triton.jit
def hidden_kernel(
    X, Weights, Hidden, DWide, count, C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """Compute blocks of hidden rows; the flattened loop loads the next during the epilogue.

    If BACKWARD, they overwrite their gradient, and the gradients of gates, then values, are written
    to DWide [count, 2 H].
    """
    columns: tl.constexpr = H // BLOCK_H
    blocks = tl.cdiv(count, BLOCK) * columns
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=True):
        row, column = place(block, count, columns, BLOCK, ROWS)
        both = tl.zeros([BLOCK, 2 * BLOCK_H], tl.float32)  # gates, then values
        for c in tl.range(0, C, BLOCK_C, num_stages=STAGES):
            x = X.load([row * BLOCK, c])  # [BLOCK, BLOCK_C]
            weights = Weights.load([column * 2 * BLOCK_H, c])  # [2 * BLOCK_H, BLOCK_C]
            both = tl.dot(x, tl.trans(weights), both)  # [BLOCK, 2 * BLOCK_H]
        both = tl.permute(tl.reshape(both, (BLOCK, 2, BLOCK_H)), (0, 2, 1))
        gate, value = tl.split(both)  # [BLOCK, BLOCK_H]
        s = logistic(gate)
        if BACKWARD:
            d = Hidden.load([row * BLOCK, column * BLOCK_H]).to(tl.float32)  # [BLOCK, BLOCK_H]
            dgate = d * value * (s + gate * s * (1.0 - s))
            DWide.store([row * BLOCK, column * BLOCK_H], dgate.to(DWide.dtype))
            DWide.store([row * BLOCK, H + column * BLOCK_H], (d * gate * s).to(DWide.dtype))
        Hidden.store([row * BLOCK, column * BLOCK_H], (gate * s * value).to(Hidden.dtype))
