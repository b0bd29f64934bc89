# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Silu followed by a matmul in Triton: one pass over the rows per order of derivative.

With s the activation: ``forward`` s(x) W; ``backward`` dx = s'(x) dy W^T; ``outer`` dW = s(x)^T dy.
``double_backward`` takes a gradient u of dx and returns those of dy, (u s'(x)) W, of x,
u s''(x) dy W^T, and of W, (u s'(x))^T dy; it is not differentiable. ``outer`` is linear in dy and
does not depend on W: its gradients are a ``forward`` and a ``backward``.

Each program keeps the whole weight on chip and strides over blocks of ``ROWS`` rows (persistent
kernels); H and J are padded to powers of two (``FULL_H``, ``FULL_J``). ``outer`` accumulates one
[H, J] tile per part of the rows in registers; torch sums the parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.equivariant.silu import silu
from bevatron.kernels.shared.autograd import empty_gradients
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import on_gpu
from bevatron.kernels.shared.triton_math import multiply, precision, sigmoids

ROWS = {torch.float32: 64, torch.float64: 32}
"""Rows of a block; with 128 the double backward runs out of registers."""
WARPS = {"forward": 4, "backward": 4, "double_backward": 8}
PROGRAMS = {"forward": 396, "backward": 264, "double_backward": 132}
"""Programs that share the rows, as many as the registers of a GPU hold."""
STAGES = 2
"""Pipeline stages."""
WIDEST = 64
"""Most columns; a program holds whole rows and the whole weight."""
PARTS = 256
"""Partial sums of the gradient with respect to W."""
SUMMED = 32
"""Rows that a program of such a partial sum adds at once."""


def silu_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the same as the reference; wide layers go to cuBLAS.

    So does float64 on a GPU, for which a program has too few registers.
    """
    if max(weight.shape) > WIDEST or (on_gpu(x) and x.dtype == torch.float64):
        return silu(x) @ weight
    result: Tensor = forward(x, weight)
    return result


@custom_op("silu_linear", fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[1]))
def forward(x: Tensor, weight: Tensor) -> Tensor:
    """[E, J] from [E, H] and [H, J]."""
    x = x.contiguous()
    y = x.new_empty(x.shape[0], weight.shape[1])
    _by_rows("forward", weight, (x,), (y,))
    return y


@custom_op("silu_linear_backward", fake="x")
def backward(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Gradient with respect to x."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    _by_rows("backward", weight, (dy, x), (dx,))
    return dx


@custom_op("silu_linear_outer", fake=lambda dy, x: x.new_empty(x.shape[1], dy.shape[1]))
def outer(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient with respect to W."""
    return _summed(x.contiguous(), dy.contiguous())


@backward.backward(
    fake=lambda dy, x, weight, by_weight: (
        *empty_gradients(x, dy, x),
        x.new_empty(weight.shape if by_weight else 0),
    ),
    asks={"by_weight": "weight"},
)
def double_backward(
    u: Tensor, dy: Tensor, x: Tensor, weight: Tensor, by_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of dy, x and W from that of `backward`'s result, u; W's is empty if not needed."""
    u, dy, x = u.contiguous(), dy.contiguous(), x.contiguous()
    by_dy, by_x = torch.empty_like(dy), torch.empty_like(x)
    _by_rows("double_backward", weight, (u, dy, x), (by_dy, by_x))
    return by_dy, by_x, _summed(x, dy, u) if by_weight else x.new_empty(0)


def _forward_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, needs: list[bool]
) -> tuple[Tensor | None, ...]:
    return backward(dy, x, weight) if needs[0] else None, outer(dy, x) if needs[1] else None


def _outer_gradients(
    v: Tensor, dy: Tensor, x: Tensor, needs: list[bool]
) -> tuple[Tensor | None, ...]:
    return forward(x, v) if needs[0] else None, backward(dy, x, v) if needs[1] else None


forward.gradients("x weight", _forward_gradients)
outer.gradients("dy x", _outer_gradients)


def _by_rows(
    kind: str, weight: Tensor, given: tuple[Tensor, ...], made: tuple[Tensor, ...]
) -> None:
    """Launch a kernel over blocks of rows."""
    count = given[0].shape[0]
    if not count or not weight.numel():
        for result in made:
            result.zero_()
        return
    kernels = {
        "forward": silu_linear_forward,
        "backward": silu_linear_backward,
        "double_backward": silu_linear_double_backward,
    }
    rows = ROWS[weight.dtype]
    blocks = int(triton.cdiv(count, rows))
    kernels[kind][(min(blocks, PROGRAMS[kind] if weight.is_cuda else 2),)](
        *given, *made, weight.contiguous(), count,
        H=weight.shape[0], J=weight.shape[1],
        ROWS=rows, **_filled(*weight.shape), PRECISION=precision(weight),
        num_warps=WARPS[kind], num_stages=STAGES,
    )  # fmt: skip


def _summed(x: Tensor, dy: Tensor, u: Tensor | None = None) -> Tensor:
    """Sum the outer products of s(x), or u s'(x), and dy over parts of the rows, then the parts."""
    parts = PARTS if on_gpu(x) else 2
    sums = x.new_zeros(parts, x.shape[1], dy.shape[1])
    if x.numel() and dy.numel():
        silu_linear_outer[(parts,)](
            x, dy, u if u is not None else x, sums, x.shape[0],
            triton.cdiv(x.shape[0], parts * SUMMED) * SUMMED,
            H=x.shape[1], J=dy.shape[1], ALONG=u is not None,
            ROWS=SUMMED, **_filled(x.shape[1], dy.shape[1]), PRECISION=precision(x),
            num_warps=4,
        )  # fmt: skip
    return torch.sum(sums, 0)


def _filled(hidden: int, width: int) -> dict[str, int]:
    """Pad rows and columns to a tensor core tile."""
    sizes = (max(16, int(triton.next_power_of_2(n))) for n in (hidden, width))
    return dict(zip(("FULL_H", "FULL_J"), sizes, strict=True))


@triton.jit
def _rows(ptr, row, column, count, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """Load a block of rows up-cast to the accumulator type, zero where masked."""
    T: tl.constexpr = tl.float64 if PRECISION == "float64" else tl.float32
    mask = (row < count)[:, None] & (column < WIDTH)[None, :]
    rows_ptr = ptr + row[:, None] * WIDTH + column[None, :]
    return tl.load(rows_ptr, mask=mask, other=0.0).to(T)  # [len(row), len(column)]


@triton.jit
def _store_rows(ptr, value, row, column, count, WIDTH: tl.constexpr):
    """Store a block of rows."""
    mask = (row < count)[:, None] & (column < WIDTH)[None, :]
    tl.store(ptr + row[:, None] * WIDTH + column[None, :], value, mask=mask)


@triton.jit
def _transposed(w_ptr, h, j, H: tl.constexpr, J: tl.constexpr, PRECISION: tl.constexpr):
    """Load W transposed, padded with zeros."""
    T: tl.constexpr = tl.float64 if PRECISION == "float64" else tl.float32
    mask = (h < H)[None, :] & (j < J)[:, None]
    w_t_ptr = w_ptr + h[None, :] * J + j[:, None]
    return tl.load(w_t_ptr, mask=mask, other=0.0).to(T)  # [FULL_J, FULL_H]


@triton.jit(do_not_specialize=["count"])
def silu_linear_forward(
    x_ptr, y_ptr, w_ptr, count, H: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr,
    FULL_H: tl.constexpr, FULL_J: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y = s(x) W for blocks of ROWS rows."""
    h, j = tl.arange(0, FULL_H), tl.arange(0, FULL_J)
    w = _rows(w_ptr, h, j, H, J, PRECISION)  # [FULL_H, FULL_J]
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        x = _rows(x_ptr, row, h, count, H, PRECISION)  # [ROWS, FULL_H]
        s, _ = sigmoids(x)
        y = multiply(x * s, w, PRECISION)  # [ROWS, FULL_J]
        _store_rows(y_ptr, y, row, j, count, J)


@triton.jit(do_not_specialize=["count"])
def silu_linear_backward(
    dy_ptr, x_ptr, dx_ptr, w_ptr, count, H: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr,
    FULL_H: tl.constexpr, FULL_J: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx = s'(x) dy W^T for blocks of ROWS rows."""
    h, j = tl.arange(0, FULL_H), tl.arange(0, FULL_J)
    w_t = _transposed(w_ptr, h, j, H, J, PRECISION)  # [FULL_J, FULL_H]
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        dy = _rows(dy_ptr, row, j, count, J, PRECISION)  # [ROWS, FULL_J]
        x = _rows(x_ptr, row, h, count, H, PRECISION)  # [ROWS, FULL_H]
        ds = multiply(dy, w_t, PRECISION)  # [ROWS, FULL_H]
        s, t = sigmoids(x)
        _store_rows(dx_ptr, ds * s * (1.0 + x * t), row, h, count, H)


@triton.jit(do_not_specialize=["count"])
def silu_linear_double_backward(
    u_ptr, dy_ptr, x_ptr, grad_dy_ptr, grad_x_ptr, w_ptr, count,
    H: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr,
    FULL_H: tl.constexpr, FULL_J: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients (u s') W of dy and u s'' dy W^T of x for blocks of ROWS rows."""
    h, j = tl.arange(0, FULL_H), tl.arange(0, FULL_J)
    w = _rows(w_ptr, h, j, H, J, PRECISION)  # [FULL_H, FULL_J]
    w_t = _transposed(w_ptr, h, j, H, J, PRECISION)  # [FULL_J, FULL_H]
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        dy = _rows(dy_ptr, row, j, count, J, PRECISION)  # [ROWS, FULL_J]
        x = _rows(x_ptr, row, h, count, H, PRECISION)  # [ROWS, FULL_H]
        u = _rows(u_ptr, row, h, count, H, PRECISION)  # [ROWS, FULL_H]
        ds = multiply(dy, w_t, PRECISION)  # [ROWS, FULL_H]
        s, t = sigmoids(x)
        _store_rows(grad_x_ptr, u * ds * s * t * (2.0 + x * (t - s)), row, h, count, H)
        grad_dy = multiply(u * s * (1.0 + x * t), w, PRECISION)  # [ROWS, FULL_J]
        _store_rows(grad_dy_ptr, grad_dy, row, j, count, J)


@triton.jit(do_not_specialize=["count", "step"])
def silu_linear_outer(
    x_ptr, dy_ptr, u_ptr, sums_ptr, count, step,
    H: tl.constexpr, J: tl.constexpr, ALONG: tl.constexpr, ROWS: tl.constexpr,
    FULL_H: tl.constexpr, FULL_J: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum s(x)^T dy, or (u s'(x))^T dy if ALONG, over one part of the rows."""
    T: tl.constexpr = tl.float64 if PRECISION == "float64" else tl.float32
    part = tl.program_id(0).to(tl.int64)
    h, j = tl.arange(0, FULL_H), tl.arange(0, FULL_J)
    end = tl.minimum((part + 1) * step, count)
    total = tl.zeros([FULL_H, FULL_J], dtype=T)
    for first in range(part * step, end, ROWS):
        row = first + tl.arange(0, ROWS)
        x = _rows(x_ptr, row, h, end, H, PRECISION)  # [ROWS, FULL_H]
        dy = _rows(dy_ptr, row, j, end, J, PRECISION)  # [ROWS, FULL_J]
        s, t = sigmoids(x)
        a = x * s
        if ALONG:
            a = _rows(u_ptr, row, h, end, H, PRECISION) * s * (1.0 + x * t)  # [ROWS, FULL_H]
        total += multiply(tl.trans(a), dy, PRECISION)  # [FULL_H, FULL_J]
    _store_rows(sums_ptr + part * (H * J), total, h, j, H, J)
