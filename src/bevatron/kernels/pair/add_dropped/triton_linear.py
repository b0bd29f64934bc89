"""A linear layer whose result is dropped and added, ``y = x + mask (W u + b)``, and its gradients.

- `add_linear_kernel`: a program multiplies BLOCK rows by the weight and adds them.
- `linear_gradients_kernel`: its programs loop over all blocks; both factors of the weight's
  gradient are read once, for the gradient of u too. They write partial sums of dW and db.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.pair.add_dropped.tiles import TILES
from bevatron.kernels.shared.autograd import empty_gradients
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import contiguous, num_sms, pointers
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.rows import as_rows
from bevatron.kernels.shared.triton_launch import Launch
from bevatron.kernels.shared.triton_math import load_vector, row_offsets
from bevatron.kernels.shared.triton_partial_sums import sum_partials

WIDTHS = (16, 32, 64, 128)


def fits(update: Tensor, weight: Tensor) -> bool:
    """Whether the kernels support these rows and this layer."""
    count = update.shape[:-1].numel()
    return (
        update.element_size() == 2
        and weight.shape[0] in WIDTHS
        and weight.shape[1] in WIDTHS
        and 0 < count < 2**31 - 1024
    )


def _new_result(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("add_dropped_linear", fake=_new_result)
def add_linear(
    x: Tensor,
    update: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    columns: bool,
) -> Tensor:
    """Return ``x + mask * (weight update + bias)``, laid out as x."""
    y = _new_result(x)
    launch, readable = _forward(y, x, update, weight, bias, mask, columns)
    given = (x, update) if readable else (x.contiguous(), update.contiguous())
    to = y if readable else torch.empty_like(x, memory_format=torch.contiguous_format)
    vectors = contiguous(bias), contiguous(mask)
    launch(*given, weight.contiguous(), *pointers(x, *vectors), to)
    return y if readable else y.copy_(to)


def _new_gradients(
    update: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    du, dweight, dbias = empty_gradients(update, update, weight, bias)
    return du, dweight, dbias


@custom_op("add_dropped_linear_backward", fake=_new_gradients)
def linear_gradients(
    dy: Tensor,
    update: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the update, the weight and the bias."""
    du, dweight, dbias = _new_gradients(update, weight, bias)
    launch, readable, programs = _backward(dy, update, weight, bias, mask, columns)
    if not readable:
        dy, update = dy.contiguous(), update.contiguous()
    C, H = weight.shape
    parts = update.new_empty((programs, C * (H + 1)), dtype=torch.float32)
    sums = parts.new_empty(C * (H + 1))
    launch(dy, update, weight.contiguous(), *pointers(dy, contiguous(mask)), du, parts)
    sum_partials(parts, sums)
    dweight.view(-1).copy_(sums[: C * H])
    if bias is not None:
        dbias.copy_(sums[C * H :])
    return du, dweight, dbias


def _gradients(
    dy: Tensor,
    update: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    columns: bool,
) -> tuple[Tensor, ...]:
    return dy, *linear_gradients(dy, update, weight, bias, mask, columns)


add_linear.gradients("x update weight bias", _gradients)


@per_layout
def _forward(
    y: Tensor,
    x: Tensor,
    update: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    columns: bool,
) -> tuple[Launch, bool]:
    """Prepare the launch; return whether it reads and writes rows in place."""
    numbers, readable, axes = _rows(x, update, y)
    tiles = TILES["forward"]
    made = Launch(
        add_linear_kernel,
        (-(-numbers[0] // tiles.rows),),
        numbers,
        **_constants(weight, bias, mask, columns, axes, tiles.rows),
        num_warps=tiles.warps,
    )
    return made, readable


@per_layout
def _backward(
    dy: Tensor,
    update: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    columns: bool,
) -> tuple[Launch, bool, int]:
    """Prepare the launch; return whether it reads rows in place, and its programs."""
    numbers, readable, axes = _rows(dy, update)
    tiles = TILES["backward"]
    programs = min(-(-numbers[0] // tiles.rows), tiles.per_sm * num_sms(dy.device))
    made = Launch(
        linear_gradients_kernel,
        (programs,),
        numbers,
        STAGES=tiles.stages,
        **_constants(weight, bias, mask, columns, axes, tiles.rows),
        num_warps=tiles.warps,
    )
    return made, readable, programs


def _rows(first: Tensor, update: Tensor, *others: Tensor) -> tuple[tuple[int, ...], bool, int]:
    """Return sizes and strides of rows, whether kernels read them in place, and their axes."""
    alike = update[..., :1].expand(first.shape)
    rows = as_rows(first, alike, *others)
    readable = rows.tensors[0] is first
    readable &= all(each.stride(-1) == 1 for each in (first, update, *others))
    strides = [step for each in rows.strides for step in each[:3]]
    if not readable:
        widths = first.shape[-1], update.shape[-1], *(each.shape[-1] for each in others)
        strides = [step for width in widths for step in (0, 0, width)]
    R, N = first.shape[-3:-1]
    return (rows.count, R, N, *rows.sizes, *strides), readable, rows.axes if readable else 1


def _constants(
    weight: Tensor, bias: Tensor | None, mask: Tensor | None, columns: bool, axes: int, block: int
) -> dict[str, Any]:
    C, H = weight.shape
    return {
        "C": C,
        "H": H,
        "BLOCK": block,
        "AXES": axes,
        "COLUMNS": columns,
        "MASKED": mask is not None,
        "HAS_BIAS": bias is not None,
    }


@triton.jit
def _load_mask(Mask, row, inside, R, N, C: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the mask of rows [BLOCK], which rows or columns of a pair share."""
    place = row // N if COLUMNS else row // (R * N) * N + row % N
    at = Mask + (place * C)[:, None] + tl.arange(0, C)[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, C]


@triton.jit
def add_linear_kernel(
    X, U, Weight, Bias, Mask, Y,
    count, R, N, n1, n2, x_0, x_1, x_2, u_0, u_1, u_2, y_0, y_1, y_2,
    C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, AXES: tl.constexpr,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK rows of y."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < count)[:, None]
    wide = row.to(tl.int64)
    c, h = tl.arange(0, C), tl.arange(0, H)
    at = U + row_offsets(wide, n1, n2, u_0, u_1, u_2, AXES)[:, None] + h[None, :]
    u = tl.load(at, mask=inside, other=0.0)  # [BLOCK, H]
    at = X + row_offsets(wide, n1, n2, x_0, x_1, x_2, AXES)[:, None] + c[None, :]
    x = tl.load(at, mask=inside, other=0.0)  # [BLOCK, C]
    # [C, H]
    weight = tl.load(Weight + c[:, None] * H + h[None, :]).to(u.dtype)
    y = tl.dot(u, tl.trans(weight))  # [BLOCK, C]
    if HAS_BIAS:
        y += load_vector(Bias, c, C)  # [BLOCK, C]
    if MASKED:
        y *= _load_mask(Mask, row, inside, R, N, C, COLUMNS)  # [BLOCK, C]
    at = Y + row_offsets(wide, n1, n2, y_0, y_1, y_2, AXES)[:, None] + c[None, :]
    tl.store(at, (x + y).to(Y.dtype.element_ty), mask=inside)


@triton.jit
def linear_gradients_kernel(
    DY, U, Weight, Mask, DU, Parts,
    count, R, N, n1, n2, dy_0, dy_1, dy_2, u_0, u_1, u_2,
    C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, AXES: tl.constexpr,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute du of every num_programs-th block; write sums of dW [C, H] and db [C] to Parts."""
    c, h = tl.arange(0, C), tl.arange(0, H)
    weight = tl.load(Weight + c[:, None] * H + h[None, :]).to(U.dtype.element_ty)  # [C, H]
    dweight = tl.zeros([C, H], tl.float32)
    dbias = tl.zeros([C], tl.float32)
    for block in tl.range(
        tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0), num_stages=STAGES
    ):
        row = block * BLOCK + tl.arange(0, BLOCK)
        inside = (row < count)[:, None]
        wide = row.to(tl.int64)
        at = DY + row_offsets(wide, n1, n2, dy_0, dy_1, dy_2, AXES)[:, None] + c[None, :]
        d = tl.load(at, mask=inside, other=0.0)  # [BLOCK, C]
        at = U + row_offsets(wide, n1, n2, u_0, u_1, u_2, AXES)[:, None] + h[None, :]
        u = tl.load(at, mask=inside, other=0.0)  # [BLOCK, H]
        if MASKED:
            d = (d * _load_mask(Mask, row, inside, R, N, C, COLUMNS)).to(u.dtype)  # [BLOCK, C]
        if HAS_BIAS:
            dbias += tl.sum(d.to(tl.float32), 0)
        dweight = tl.dot(tl.trans(d), u, dweight)  # [C, H]
        du = tl.dot(d, weight)  # [BLOCK, H]
        tl.store(DU + (wide * H)[:, None] + h[None, :], du.to(DU.dtype.element_ty), mask=inside)
    part = Parts + tl.program_id(0).to(tl.int64) * C * (H + 1)
    tl.store(part + c[:, None] * H + h[None, :], dweight)
    tl.store(part + C * H + c, dbias)
