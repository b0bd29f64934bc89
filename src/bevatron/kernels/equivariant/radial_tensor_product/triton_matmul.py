# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Matmuls of the last radial layer: at most 128 hidden features, very many edges.

In float32 each operand is split into a high and a low TF32 part and three of the four partial
products are summed (3xTF32): float32 errors, faster than float32 arithmetic. cuBLAS float32 matmuls
reach half their peak at these shapes. If torch allows TF32, a single matmul is used. Float64 goes
to cuBLAS.

`_expand` keeps N columns of the weight on chip and strides over blocks of M rows; `_contract`
accumulates an [M, N] tile over blocks of K columns; `_outer` sums one part of the rows into an
[M, N] tile of partial sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.launch import on_gpu
from bevatron.kernels.shared.tiles import Tiles
from bevatron.kernels.shared.triton_math import allows_tf32, product, split

PROGRAMS = {"expand": 264, "outer": 396}
"""Programs that share the rows: one or two waves of a GPU."""


EXPAND = Tiles(128, 128, 8, 3, depth=64)
EXPAND_SMALL = Tiles(64, 64, 4, 1, depth=64)
"""For more hidden features, or GPUs other than Hopper."""
ROOMY = 9
"""Compute capability with enough shared memory for `EXPAND`: 192 KiB, on Blackwell up to 240."""
CONTRACT = Tiles(64, 64, 4, 3, depth=32)
OUTER = Tiles(64, 32, 4, 3, depth=64)
SPLIT_COLUMNS = 32
WIDEST = 128
"""Most hidden features; programs hold whole rows, which then fit into any GPU's 99 KiB."""


class Layer:
    """A weight [H, W] with few rows, prepared for matmuls with tensors of edges.

    Parameters
    ----------
    weight : contiguous
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.hidden, self.width = weight.shape
        self.split = weight.dtype == torch.float32 and self.hidden <= WIDEST
        if self.split:
            self.high, self.low = torch.empty_like(weight), torch.empty_like(weight)
            self.high_t, self.low_t = (weight.new_empty(self.width, self.hidden) for _ in range(2))
            if weight.numel():
                _split_weight[(triton.cdiv(self.width, SPLIT_COLUMNS),)](
                    weight, self.high, self.low, self.high_t, self.low_t,
                    WIDTH=self.width, HIDDEN=self.hidden,
                    K=_filled(self.hidden), N=SPLIT_COLUMNS, EXACT=_exact(),
                )  # fmt: skip

    def expand(self, rows: Tensor, out: Tensor, add: bool = False) -> None:
        """Compute out = rows @ weight, or add it."""
        if not self.split:
            torch.addmm(out, rows, self.weight, beta=float(add), out=out)
            return
        inner = _filled(self.hidden)
        major = torch.cuda.get_device_capability(rows.device)[0] if rows.is_cuda else 0
        tiles = expand_tiles(major, inner)
        across = triton.cdiv(self.width, tiles.columns)
        parts = _shares("expand", across) if rows.is_cuda else 1
        _expand[(across, parts)](
            rows, self.high_t, self.low_t, out, len(rows),
            WIDTH=self.width, HIDDEN=self.hidden, ADD=add, PARTS=parts,
            M=tiles.rows, N=tiles.columns, K=inner, EXACT=_exact(),
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

    def contract(self, rows: Tensor, out: Tensor, add: bool = False) -> None:
        """Compute out = rows @ weight.T, or add it."""
        if not self.split:
            torch.addmm(out, rows, self.weight.mT, beta=float(add), out=out)
            return
        _contract[(triton.cdiv(len(rows), CONTRACT.rows),)](
            rows, self.high, self.low, out, len(rows),
            WIDTH=self.width, HIDDEN=self.hidden, ADD=add,
            M=CONTRACT.rows, N=_filled(self.hidden), K=CONTRACT.depth, EXACT=_exact(),
            num_warps=CONTRACT.warps, num_stages=CONTRACT.stages,
        )  # fmt: skip


class OuterSum:
    """The sum of left.T @ right over chunks of rows, [R, H] and [R, W].

    Parameters
    ----------
    out : [H, W] zeros; complete after `finish`
    """

    def __init__(self, out: Tensor) -> None:
        self.out = out
        self.parts = None
        if out.dtype == torch.float32 and out.numel() and len(out) <= WIDEST:
            across = triton.cdiv(out.shape[1], OUTER.columns)
            splits = min(_shares("outer", across), 64) if on_gpu(out) else 2
            self.parts = out.new_zeros(splits, *out.shape)

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add the matmul of a chunk."""
        if self.parts is None:
            self.out.addmm_(left.mT, right)
            return
        num_rows, width = right.shape
        splits = len(self.parts)
        step = triton.cdiv(triton.cdiv(num_rows, splits), OUTER.depth) * OUTER.depth
        _outer[(splits, triton.cdiv(width, OUTER.columns))](
            left, right, self.parts, num_rows, step,
            WIDTH=width, HIDDEN=left.shape[1],
            M=_filled(left.shape[1]), N=OUTER.columns, K=OUTER.depth, EXACT=_exact(),
            num_warps=OUTER.warps, num_stages=OUTER.stages,
        )  # fmt: skip

    def finish(self) -> None:
        """Complete ``out``."""
        if self.parts is not None:
            torch.sum(self.parts, 0, out=self.out)


def expand_tiles(major: int, inner: int) -> Tiles:
    """Choose tiles for a compute capability and a number of hidden features, padded."""
    return EXPAND if major == ROOMY and inner <= EXPAND.depth else EXPAND_SMALL


def _shares(product: str, across: int) -> int:
    """Return the number of programs that split the rows, given those that split the columns."""
    return max(1, PROGRAMS[product] // max(across, 1))


def _filled(hidden: int) -> int:
    """Pad the hidden features to a tensor core tile."""
    return max(16, int(triton.next_power_of_2(hidden)))


def _exact() -> bool:
    return not allows_tf32()


@triton.jit
def _split_weight(
    weight_ptr, high_ptr, low_ptr, high_t_ptr, low_t_ptr,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Split N columns of the weight, and write both parts as they are and transposed."""
    k = tl.arange(0, K)[:, None]
    column = tl.program_id(0) * N + tl.arange(0, N)[None, :]
    offsets, transposed = k * WIDTH + column, column * HIDDEN + k
    mask = (k < HIDDEN) & (column < WIDTH)
    high, low = split(tl.load(weight_ptr + offsets, mask=mask).to(tl.float32), EXACT)  # [K, N]
    tl.store(high_ptr + offsets, high, mask=mask)
    tl.store(low_ptr + offsets, low, mask=mask)
    tl.store(high_t_ptr + transposed, high, mask=mask)
    tl.store(low_t_ptr + transposed, low, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _expand(
    rows_ptr, high_ptr, low_ptr, out_ptr, num_rows,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute rows @ weight for N columns of the weight, over every PARTS-th block of M rows."""
    k = tl.arange(0, K)
    column = tl.program_id(0) * N + tl.arange(0, N)[None, :]
    offsets = column * HIDDEN + k[:, None]
    mask = (k[:, None] < HIDDEN) & (column < WIDTH)
    b_high = tl.load(high_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # [K, N]
    b_low = tl.load(low_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # [K, N]
    for block in range(tl.program_id(1), tl.cdiv(num_rows, M), PARTS):
        row = (block * M + tl.arange(0, M)).to(tl.int64)[:, None]
        a = tl.load(
            rows_ptr + row * HIDDEN + k[None, :],
            mask=(row < num_rows) & (k[None, :] < HIDDEN), other=0.0,
        ).to(tl.float32)  # [M, K]  # fmt: skip
        a_high, a_low = split(a, EXACT)
        total = product(a_high, a_low, b_high, b_low, EXACT)  # [M, N]
        out_mask = (row < num_rows) & (column < WIDTH)
        if ADD:
            out = out_ptr + row * WIDTH + column
            total += tl.load(out, mask=out_mask, other=0.0).to(tl.float32)  # [M, N]
        tl.store(out_ptr + row * WIDTH + column, total, mask=out_mask)


@triton.jit(do_not_specialize=["num_rows"])
def _contract(
    rows_ptr, high_ptr, low_ptr, out_ptr, num_rows,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, ADD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute a block of M rows times the transposed weight."""
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)[:, None]
    column = tl.arange(0, N)[None, :]
    out_mask = (row < num_rows) & (column < HIDDEN)
    total = tl.zeros([M, N], dtype=tl.float32)
    if ADD:
        out = out_ptr + row * HIDDEN + column
        total += tl.load(out, mask=out_mask, other=0.0).to(tl.float32)  # [M, N]
    for start in range(0, WIDTH, K):
        k = start + tl.arange(0, K)
        a = tl.load(
            rows_ptr + row * WIDTH + k[None, :],
            mask=(row < num_rows) & (k[None, :] < WIDTH), other=0.0,
        ).to(tl.float32)  # [M, K]  # fmt: skip
        offsets = column * WIDTH + k[:, None]
        mask = (column < HIDDEN) & (k[:, None] < WIDTH)
        b_high = tl.load(high_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # [K, N]
        b_low = tl.load(low_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # [K, N]
        a_high, a_low = split(a, EXACT)
        total += product(a_high, a_low, b_high, b_low, EXACT)  # [M, N]
    tl.store(out_ptr + row * HIDDEN + column, total, mask=out_mask)


@triton.jit(do_not_specialize=["num_rows", "step"])
def _outer(
    left_ptr, right_ptr, parts_ptr, num_rows, step,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add left^T @ right over one part of the rows, for N columns, to that part's sums."""
    part = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, M)[:, None]
    column = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    out_mask = (h < HIDDEN) & (column < WIDTH)
    out = parts_ptr + (part * HIDDEN + h) * WIDTH + column
    total = tl.load(out, mask=out_mask, other=0.0).to(tl.float32)  # [M, N]
    stop = tl.minimum((part + 1) * step, num_rows)
    for start in range(part * step, stop, K):
        row = start + tl.arange(0, K)
        a = tl.load(
            left_ptr + row[None, :] * HIDDEN + h,
            mask=(row[None, :] < stop) & (h < HIDDEN), other=0.0,
        ).to(tl.float32)  # [M, K]  # fmt: skip
        b = tl.load(
            right_ptr + row[:, None] * WIDTH + column,
            mask=(row[:, None] < stop) & (column < WIDTH), other=0.0,
        ).to(tl.float32)  # [K, N]  # fmt: skip
        a_high, a_low = split(a, EXACT)
        b_high, b_low = split(b, EXACT)
        total += product(a_high, a_low, b_high, b_low, EXACT)  # [M, N]
    tl.store(out, total, mask=out_mask)
