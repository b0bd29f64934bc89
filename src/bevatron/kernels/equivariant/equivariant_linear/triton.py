# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The equivariant linear map in Triton: the matmuls of all degrees in one launch.

A row of a matmul is one component of one atom. Two operators are closed under differentiation,
since each is bilinear:

    mix(x, W):   y[n, l, m, j] = s_l * sum_k x[n, l, m, k] W_l[k, j]
    outer(x, g): W_l[k, j] = s_l * sum over n and m of x[n, l, m, k] g[n, l, m, j]

The gradient of ``mix`` with respect to x is ``mix`` with W transposed, that of W is ``outer``; the
gradients of ``outer`` are two ``mix``.

A program of ``mix`` computes one [ROWS, COLUMNS] tile of one degree, accumulated in registers over
blocks of ``DEPTH`` input channels. A program of ``outer`` sums one part of the rows into a 64 x 64
tile of one weight's gradient; the parts are then summed in order: no atomics. Float32 matmuls use
3xTF32, as in `radial_tensor_product`.
"""

import linecache
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import sqrt
from operator import index
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import on_gpu
from bevatron.kernels.shared.triton_math import multiply, precision

ROWS = {torch.float32: 128, torch.float64: 64}
COLUMNS, DEPTH, WARPS, STAGES = 64, 32, 4, 3
"""Block of ``mix``, its warps and stages."""
SUMMED, OUTER_WARPS, OUTER_STAGES = 32, 4, 3
"""Rows that a program of ``outer`` adds at once, its warps and stages; its block is 64 x 64."""
PARTS = 24
"""Parts of the rows that are summed separately, to keep all SMs busy."""


class Side(NamedTuple):
    """Layout of each degree's channels in a row of features.

    Attributes
    ----------
    width : channels of all blocks of the degree
    block : channels of one block
    start : start of the degree in a row
    row : length of a row
    """

    width: tuple[int, ...]
    block: tuple[int, ...]
    start: tuple[int, ...]
    row: int

    @classmethod
    def of(cls, width: Sequence[int], blocks: Sequence[int]) -> "Side":
        """Lay out degree after degree."""
        sizes = [(2 * degree + 1) * n for degree, n in enumerate(width)]
        block = tuple(n // number for n, number in zip(width, blocks, strict=True))
        return cls(tuple(width), block, (0, *accumulate(sizes))[:-1], sum(sizes))


def equivariant_linear(
    x: Tensor, weights: Sequence[Tensor], blocks: Sequence[int], scale: float
) -> Tensor:
    """Compute the same as the reference."""
    flat = torch.cat([weight.flatten() for weight in weights])
    if scale != 1.0:
        flat = flat * scale
    shapes = [(number, *weight.shape) for number, weight in zip(blocks, weights, strict=True)]
    # index: if torch.compile treats a width as symbolic, this specialises it.
    spec = " ".join(",".join(str(index(number)) for number in shape) for shape in shapes)
    result: Tensor = mix(x, flat, spec, False)
    return result


@cache
def sides(spec: str) -> tuple[Side, Side]:
    """Lay out the inputs and results of the maps (blocks, K, J) of each degree."""
    shapes = [tuple(map(int, part.split(","))) for part in spec.split(" ")]
    blocks, width_in, width_out = zip(*shapes, strict=True)
    return Side.of(width_in, blocks), Side.of(width_out, [1] * len(shapes))


@custom_op(
    "equivariant_linear",
    fake=lambda x, spec, back: x.new_empty(x.shape[0], sides(spec)[not back].row),
)
def mix(x: Tensor, weights: Tensor, spec: str, back: bool) -> Tensor:
    """[N, D_out] from [N, D_in] and all weights one after the other; ``back`` is transposed."""
    made = sides(spec)[not back]
    y = x.new_empty(x.shape[0], made.row)
    if y.numel():
        rows = ROWS[x.dtype]
        tiles = [
            triton.cdiv(x.shape[0] * (2 * degree + 1), rows) * triton.cdiv(width, COLUMNS)
            for degree, width in enumerate(made.width)
        ]
        _kernel("mix", spec, back)[(sum(tiles),)](
            y, x.contiguous(), weights.contiguous(), x.shape[0],
            ROWS=rows, COLUMNS=COLUMNS, DEPTH=DEPTH, PRECISION=precision(x),
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return y


@custom_op("equivariant_linear_outer", fake=lambda x, spec: x.new_empty(_num_weights(spec)))
def outer(x: Tensor, g: Tensor, spec: str) -> Tensor:
    """Sum [N, D_in] times [N, D_out] over atoms and components; all matrices in a row."""
    given, made = sides(spec)
    size = _num_weights(spec)
    parts = PARTS if on_gpu(x) else 2
    sums = x.new_empty(parts, size)
    if size:
        tiles = [
            triton.cdiv(k, 64) * triton.cdiv(j, 64)
            for k, j in zip(given.width, made.width, strict=True)
        ]
        _kernel("outer", spec, False)[parts, sum(tiles)](
            sums, x.contiguous(), g.contiguous(), x.shape[0],
            SIZE=size, PARTS=parts, DEPTH=SUMMED, PRECISION=precision(x),
            num_warps=OUTER_WARPS, num_stages=OUTER_STAGES,
        )  # fmt: skip
    return torch.sum(sums, 0)


def _num_weights(spec: str) -> int:
    """Count the elements of all matrices."""
    given, made = sides(spec)
    return sum(k * j for k, j in zip(given.width, made.width, strict=True))


def _mix_gradients(
    g: Tensor, x: Tensor, weights: Tensor, spec: str, back: bool, needs: list[bool]
) -> tuple[Tensor | None, ...]:
    dx = mix(g, weights, spec, not back) if needs[0] else None
    factors = (g, x) if back else (x, g)
    return dx, outer(*factors, spec) if needs[1] else None


def _outer_gradients(
    v: Tensor, x: Tensor, g: Tensor, spec: str, needs: list[bool]
) -> tuple[Tensor | None, ...]:
    dx = mix(g, v, spec, True) if needs[0] else None
    return dx, mix(x, v, spec, False) if needs[1] else None


mix.gradients("x weights", _mix_gradients)
outer.gradients("x g", _outer_gradients)


@cache
def _kernel(kind: str, spec: str, back: bool) -> Any:
    """Compile the kernel of these degrees and register its source for tracebacks."""
    given, made = sides(spec)[::-1] if back else sides(spec)
    source = mix_source(given, made, back) if kind == "mix" else outer_source(given, made)
    name = f"<bevatron equivariant_linear {kind} {len(linecache.cache)}>"
    # An entry without a modification time is never checked against the disk.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"tl": tl, "mix_tile": mix_tile, "outer_tile": outer_tile}
    namespace["__name__"] = __name__
    exec(compile(source, name, "exec"), namespace)  # noqa: S102  our own generated source
    return triton.jit(do_not_specialize=["num_atoms"])(namespace[f"equivariant_{kind}"])


def mix_source(given: Side, made: Side, back: bool) -> str:
    """Write the kernel that maps program ids to the tiles of each degree."""
    lines = [
        "def equivariant_mix(y_ptr, x_ptr, w_ptr, num_atoms,",
        "                    ROWS: tl.constexpr, COLUMNS: tl.constexpr,",
        "                    DEPTH: tl.constexpr, PRECISION: tl.constexpr):",
        "    tile = tl.program_id(0)",
    ]
    first = 0
    for degree, (k, j) in enumerate(zip(given.width, made.width, strict=True)):
        dim, size = 2 * degree + 1, k * j
        strides = f"W_K={1 if back else j}, W_J={k if back else 1}"
        scale = 1 / sqrt(j if back else k)
        lines += [
            f"    across = ({j} + COLUMNS - 1) // COLUMNS",
            f"    tiles = (num_atoms * {dim} + ROWS - 1) // ROWS * across",
            "    if (tile >= 0) & (tile < tiles):",
            f"        mix_tile(y_ptr + {made.start[degree]}, x_ptr + {given.start[degree]},",
            f"                 w_ptr + {first}, tile, num_atoms, DIM={dim}, K={k}, J={j},",
            f"                 X_ROW={given.row}, X_BLOCK={given.block[degree]}, Y_ROW={made.row},",
            f"                 Y_BLOCK={made.block[degree]}, {strides}, SCALE={scale!r},",
            "                 ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, PRECISION=PRECISION)",
            "    tile -= tiles",
        ]
        first += size
    return "\n".join(lines) + "\n"


def outer_source(given: Side, made: Side) -> str:
    """Write the kernel that maps program ids to tiles, degrees with the most rows first."""
    lines = [
        "def equivariant_outer(sums_ptr, x_ptr, g_ptr, num_atoms,",
        "                      SIZE: tl.constexpr, PARTS: tl.constexpr,",
        "                      DEPTH: tl.constexpr, PRECISION: tl.constexpr):",
        "    tile = tl.program_id(1)",
        "    sums_ptr += tl.program_id(0).to(tl.int64) * SIZE",
    ]
    shapes = list(zip(given.width, made.width, strict=True))
    first, before = sum(k * j for k, j in shapes), 0
    for degree, (k, j) in reversed(list(enumerate(shapes))):
        first -= k * j
        tiles = -(-k // 64) * -(-j // 64)
        lines += [
            f"    if (tile >= {before}) & (tile < {before + tiles}):",
            f"        outer_tile(sums_ptr + {first}, x_ptr + {given.start[degree]},",
            f"                   g_ptr + {made.start[degree]}, tile - {before}, num_atoms,",
            f"                   DIM={2 * degree + 1}, K={k}, J={j}, X_ROW={given.row},",
            f"                   X_BLOCK={given.block[degree]}, G_ROW={made.row},",
            f"                   SCALE={1 / sqrt(k)!r}, PARTS=PARTS, DEPTH=DEPTH,",
            "                   PRECISION=PRECISION)",
        ]
        before += tiles
    return "\n".join(lines) + "\n"


@triton.jit
def mix_tile(
    y_ptr, x_ptr, w_ptr, tile, num_atoms,
    DIM: tl.constexpr, K: tl.constexpr, J: tl.constexpr, X_ROW: tl.constexpr,
    X_BLOCK: tl.constexpr, Y_ROW: tl.constexpr, Y_BLOCK: tl.constexpr, W_K: tl.constexpr,
    W_J: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of one degree by COLUMNS columns of its matrix."""
    T: tl.constexpr = tl.float64 if PRECISION == "float64" else tl.float32
    across: tl.constexpr = (J + COLUMNS - 1) // COLUMNS
    row = tile // across * ROWS + tl.arange(0, ROWS)
    atom, m = (row // DIM).to(tl.int64), row % DIM
    valid = atom < num_atoms
    j = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    x_row = x_ptr + atom * X_ROW + m * X_BLOCK
    total = tl.zeros([ROWS, COLUMNS], dtype=T)
    for first in range(0, K, DEPTH):
        k = first + tl.arange(0, DEPTH)
        column = k // X_BLOCK * (DIM * X_BLOCK) + k % X_BLOCK
        x = tl.load(
            x_row[:, None] + column[None, :], mask=valid[:, None] & (k < K)[None, :], other=0.0
        ).to(T)  # [ROWS, DEPTH]
        w = tl.load(
            w_ptr + (k * W_K)[:, None] + (j * W_J)[None, :],
            mask=(k < K)[:, None] & (j < J)[None, :], other=0.0,
        ).to(T)  # [DEPTH, COLUMNS]  # fmt: skip
        total += multiply(x, w, PRECISION)  # [ROWS, COLUMNS]
    y_row = y_ptr + atom * Y_ROW + m * Y_BLOCK
    column = j // Y_BLOCK * (DIM * Y_BLOCK) + j % Y_BLOCK
    mask = valid[:, None] & (j < J)[None, :]
    tl.store(y_row[:, None] + column[None, :], total * SCALE, mask=mask)


@triton.jit
def outer_tile(
    sums_ptr, x_ptr, g_ptr, tile, num_atoms,
    DIM: tl.constexpr, K: tl.constexpr, J: tl.constexpr, X_ROW: tl.constexpr,
    X_BLOCK: tl.constexpr, G_ROW: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum x^T g over one part of the rows of a degree, one 64 x 64 tile of the matrix."""
    T: tl.constexpr = tl.float64 if PRECISION == "float64" else tl.float32
    across: tl.constexpr = (J + 63) // 64
    k = tile // across * 64 + tl.arange(0, 64)
    j = tile % across * 64 + tl.arange(0, 64)
    column = k // X_BLOCK * (DIM * X_BLOCK) + k % X_BLOCK
    step = (num_atoms * DIM + PARTS * DEPTH - 1) // (PARTS * DEPTH) * DEPTH
    begin = tl.program_id(0) * step
    end = tl.minimum(begin + step, num_atoms * DIM)
    total = tl.zeros([64, 64], dtype=T)
    for first in range(begin, end, DEPTH):
        row = first + tl.arange(0, DEPTH)
        atom, m = (row // DIM).to(tl.int64), row % DIM
        x = tl.load(
            x_ptr + (atom * X_ROW + m * X_BLOCK)[:, None] + column[None, :],
            mask=(row < end)[:, None] & (k < K)[None, :], other=0.0,
        ).to(T)  # [DEPTH, 64]  # fmt: skip
        g = tl.load(
            g_ptr + (atom * G_ROW + m * J)[:, None] + j[None, :],
            mask=(row < end)[:, None] & (j < J)[None, :], other=0.0,
        ).to(T)  # [DEPTH, 64]  # fmt: skip
        total += multiply(tl.trans(x), g, PRECISION)  # [64, 64]
    mask = (k < K)[:, None] & (j < J)[None, :]
    tl.store(sums_ptr + k[:, None] * J + j[None, :], total * SCALE, mask=mask)
