"""Matmul with the gated unit as its epilogue: ``silu(x gate^T) * (x up^T)`` for 16-bit types.

A persistent program computes blocks [BLOCK, BLOCK_H] of the hidden rows. The gate and value weights
of BLOCK_H hidden channels are interleaved in memory, so one matmul [BLOCK, 2 BLOCK_H] produces
both in registers; only their product is written. Loads and stores are TMA.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bevatron.kernels.pair.layer_norm.triton import on_device
from bevatron.kernels.pair.layer_norm.triton_kernels import logistic
from bevatron.kernels.shared.rows import processors


@dataclass(frozen=True)
class Tiles:
    """How a product is cut.

    Attributes
    ----------
    rows, columns, depth
        Of a block: rows, columns of the result, and what is summed at a time.
    warps, stages
        Of a program, and how many blocks its loads run ahead.
    shared
        Bytes of shared memory that a program takes.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    shared: int

    def fit(self, *matrices: Tensor) -> bool:
        """Say whether the device and matrices of a 16-bit type are as the kernels need them."""
        device = matrices[0].device
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            if getattr(properties, "shared_memory_per_block_optin", 0) < self.shared:
                return False
        return all(
            matrix.element_size() == 2
            and matrix.is_contiguous()
            and matrix.shape[1] * 2 % ALIGNED == 0
            and matrix.data_ptr() % ALIGNED == 0
            and 0 < len(matrix) < 2**31 - 1024
            for matrix in matrices
        )


ALIGNED = 16
"""Rows must begin at multiples of so many bytes."""
TILES = Tiles(128, 128, 64, 8, 3, 180 * 1024)
GROUP = 8
"""Blocks of rows that are worked on together, so that weights are read from the cache."""


def fits(x: Tensor, gate: Tensor) -> bool:
    """Say whether `hidden_rows` takes rows and weights like these, and has blocks for a device."""
    return (
        len(gate) % TILES.columns == 0
        and TILES.fit(x, gate)
        and _blocks(x, gate) >= processors(x.device)
    )


def hidden_rows(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(x gate^T) * (x up^T)``.

    Parameters
    ----------
    x
        [n, C].
    gate, up
        [H, C].

    Returns
    -------
    Tensor
        [n, H].
    """
    (n, width), H = x.shape, len(gate)
    hidden, weights = x.new_empty((n, H)), interleaved(gate, up, TILES.columns)
    with on_device(x):
        hidden_kernel[(min(_blocks(x, gate), processors(x.device)),)](
            TensorDescriptor.from_tensor(x, [TILES.rows, TILES.depth]),
            TensorDescriptor.from_tensor(weights, [2 * TILES.columns, TILES.depth]),
            TensorDescriptor.from_tensor(hidden, [TILES.rows, TILES.columns]),
            n,
            C=width,
            H=H,
            BLOCK=TILES.rows,
            BLOCK_H=TILES.columns,
            BLOCK_C=TILES.depth,
            ROWS=GROUP,
            STAGES=TILES.stages,
            num_warps=TILES.warps,
        )
    return hidden


def _blocks(x: Tensor, gate: Tensor) -> int:
    return -(-len(x) // TILES.rows) * (len(gate) // TILES.columns)


def interleaved(gate: Tensor, up: Tensor, block: int) -> Tensor:
    """Put the gates of every ``block`` hidden channels before their values: [2 H, C]."""
    blocks = (up.shape[0] // block, block, up.shape[1])
    return torch.cat([gate.view(blocks), up.view(blocks)], dim=1).view(-1, up.shape[1])


@triton.jit
def place(program, count, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Map a program to its (row block, column block); ROWS row blocks share weights in the L2."""
    blocks = tl.cdiv(count, BLOCK)
    first = program // (ROWS * COLUMNS) * ROWS
    together = tl.minimum(blocks - first, ROWS)
    within = program % (ROWS * COLUMNS)
    return first + within % together, within // together


@triton.jit
def hidden_kernel(
    X, Weights, Hidden, count, C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute blocks of hidden rows; the flattened loop loads the next during the epilogue."""
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
        hidden = gate * logistic(gate) * value
        Hidden.store([row * BLOCK, column * BLOCK_H], hidden.to(Hidden.dtype))
