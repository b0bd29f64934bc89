"""Matrix products of the last radial layer: a narrow hidden layer, very many edges.

In float32 a number is split into two that tensor cores take, and three of the four products are
summed (3xTF32): errors stay those of float32, at several times its speed. The library's float32
products reach half their peak at these shapes. Where torch allows TF32, one product is taken, and
float64 goes to the library.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

SPLITS = 16
"""Parts of the edges whose outer products are summed apart, to keep all multiprocessors busy."""


def expand(rows: Tensor, weight: Tensor, out: Tensor, add: bool = False) -> None:
    """Compute out = rows @ weight, or add it: [R, H] times [H, W], H small."""
    if out.dtype != torch.float32:
        torch.addmm(out, rows, weight, beta=float(add), out=out)
        return
    num_rows, width = rows.shape[0], weight.shape[1]
    grid = (triton.cdiv(num_rows, _EXPAND[0]), triton.cdiv(width, _EXPAND[1]))
    _expand[grid](
        rows, weight, out, num_rows,
        WIDTH=width, HIDDEN=weight.shape[0], ADD=add,
        M=_EXPAND[0], N=_EXPAND[1], K=_hidden_block(weight), PRECISION=_precision(),
        num_warps=_EXPAND[2],
    )  # fmt: skip


def contract(rows: Tensor, weight: Tensor, out: Tensor, add: bool = False) -> None:
    """Compute out = rows @ weight.T, or add it: [R, W] times [W, H], H small."""
    if out.dtype != torch.float32:
        torch.addmm(out, rows, weight.mT, beta=float(add), out=out)
        return
    num_rows = rows.shape[0]
    _contract[(triton.cdiv(num_rows, _CONTRACT[0]),)](
        rows, weight, out, num_rows,
        WIDTH=weight.shape[1], HIDDEN=weight.shape[0], ADD=add,
        M=_CONTRACT[0], N=_hidden_block(weight), K=_CONTRACT[1], PRECISION=_precision(),
        num_warps=_CONTRACT[2],
    )  # fmt: skip


class OuterSum:
    """A sum of products left.T @ right over many rows, [R, H] and [R, W], chunk after chunk.

    Parameters
    ----------
    out
        [H, W] zeros; complete after `finish`.
    """

    def __init__(self, out: Tensor) -> None:
        self.out = out
        self.parts = out.new_zeros(SPLITS, *out.shape) if out.dtype == torch.float32 else None

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add the product of a chunk."""
        if self.parts is None:
            self.out.addmm_(left.mT, right)
            return
        num_rows, width = right.shape
        step = triton.cdiv(triton.cdiv(num_rows, SPLITS), _OUTER[1]) * _OUTER[1]
        _outer[(SPLITS, triton.cdiv(width, _OUTER[0]))](
            left, right, self.parts, num_rows, step,
            WIDTH=width, HIDDEN=left.shape[1],
            M=_hidden_block(left.mT), N=_OUTER[0], K=_OUTER[1], PRECISION=_precision(),
            num_warps=_OUTER[2],
        )  # fmt: skip

    def finish(self) -> None:
        """Complete ``out``."""
        if self.parts is not None:
            torch.sum(self.parts, 0, out=self.out)


# Rows and columns of a tile (of what is multiplied and summed over in the last two), and warps.
_EXPAND = (128, 128, 8)
_CONTRACT = (128, 32, 4)
_OUTER = (128, 32, 4)


def _hidden_block(weight: Tensor) -> int:
    """Fill the hidden numbers up to what a matrix unit takes."""
    return max(16, int(triton.next_power_of_2(weight.shape[0])))


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


@triton.jit(do_not_specialize=["num_rows"])
def _expand(
    rows_ptr, weight_ptr, out_ptr, num_rows,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, ADD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)[:, None]
    column = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    k = tl.arange(0, K)
    inside = (row < num_rows) & (column < WIDTH)
    a = tl.load(
        rows_ptr + row * HIDDEN + k[None, :],
        mask=(row < num_rows) & (k[None, :] < HIDDEN), other=0.0,
    ).to(tl.float32)  # fmt: skip
    b = tl.load(
        weight_ptr + k[:, None] * WIDTH + column,
        mask=(k[:, None] < HIDDEN) & (column < WIDTH), other=0.0,
    ).to(tl.float32)  # fmt: skip
    total = tl.dot(a, b, input_precision=PRECISION)
    if ADD:
        total += tl.load(out_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, total, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _contract(
    rows_ptr, weight_ptr, out_ptr, num_rows,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, ADD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)[:, None]
    column = tl.arange(0, N)[None, :]
    inside = (row < num_rows) & (column < HIDDEN)
    total = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, WIDTH, K):
        k = start + tl.arange(0, K)
        a = tl.load(
            rows_ptr + row * WIDTH + k[None, :],
            mask=(row < num_rows) & (k[None, :] < WIDTH), other=0.0,
        ).to(tl.float32)  # fmt: skip
        b = tl.load(
            weight_ptr + column * WIDTH + k[:, None],
            mask=(column < HIDDEN) & (k[:, None] < WIDTH), other=0.0,
        ).to(tl.float32)  # fmt: skip
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if ADD:
        total += tl.load(out_ptr + row * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * HIDDEN + column, total, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "step"])
def _outer(
    left_ptr, right_ptr, parts_ptr, num_rows, step,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, M)[:, None]
    column = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    inside = (line < HIDDEN) & (column < WIDTH)
    where = parts_ptr + (split * HIDDEN + line) * WIDTH + column
    total = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    stop = tl.minimum((split + 1) * step, num_rows)
    for start in range(split * step, stop, K):
        row = start + tl.arange(0, K)
        a = tl.load(
            left_ptr + row[None, :] * HIDDEN + line,
            mask=(row[None, :] < stop) & (line < HIDDEN), other=0.0,
        ).to(tl.float32)  # fmt: skip
        b = tl.load(
            right_ptr + row[:, None] * WIDTH + column,
            mask=(row[:, None] < stop) & (column < WIDTH), other=0.0,
        ).to(tl.float32)  # fmt: skip
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(where, total, mask=inside)
