"""The dropped residual update in Triton: one kernel for both passes.

The gradient of x is the result's gradient; no kernel runs for it. The gradient of the update has
the update's layout, so that nothing copies it if the update was transposed.

A linear layer of the update is multiplied in a kernel of its own, which also adds the rows. The
backward pass drops the gradient and leaves the products to cuBLAS.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.pair.add_dropped.reference import linear
from bevatron.kernels.shared.chunked_linear import BiasGradient, weight_gradient
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import contiguous, pointers
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.rows import as_rows
from bevatron.kernels.shared.triton_launch import Launch
from bevatron.kernels.shared.triton_math import load_vector, row_offsets

ELEMENTS, LARGEST_BLOCK_C = 2048, 1024
"""Elements of a block, and the most channels it spans."""
WIDTHS, BLOCK = (16, 32, 64, 128), 64
"""Channels of a linear layer, and rows of its blocks."""


def add_dropped(
    x: Tensor,
    update: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    columns: bool,
) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.add_dropped`."""
    result: Tensor
    if weight is not None and _fits(update, weight):
        result = add_linear(x, update, weight, bias, mask, columns)
        return result
    if weight is not None:
        update = linear(update, weight, bias)
    turned = update.stride(-2) > update.stride(-3)
    result = added(x, update, mask, columns, turned)
    return result


@custom_op("add_dropped", fake="x")
def added(x: Tensor, update: Tensor, mask: Tensor | None, columns: bool, turned: bool) -> Tensor:
    """Return ``x + mask * update``; ``turned``: the update's gradient is stored transposed."""
    del turned
    y = x.new_empty(x.shape)
    _launch(x.contiguous(), update, mask, y, columns)
    return y


def _new_gradient(dy: Tensor, turned: bool) -> Tensor:
    if not turned:
        return dy.new_empty(dy.shape)
    *batch, R, N, C = dy.shape
    return dy.new_empty((*batch, N, R, C)).transpose(-2, -3)


@custom_op("add_dropped_backward", fake=_new_gradient)
def dropped(dy: Tensor, mask: Tensor | None, columns: bool, turned: bool) -> Tensor:
    """Return ``mask * dy``."""
    du = _new_gradient(dy, turned)
    _launch(None, dy, mask, du, columns)
    return du


def _gradients(
    dy: Tensor, mask: Tensor | None, columns: bool, turned: bool
) -> tuple[Tensor, Tensor]:
    return dy, dy if mask is None and not turned else dropped(dy, mask, columns, turned)


added.gradients("x update", _gradients)


def _fits(update: Tensor, weight: Tensor) -> bool:
    """Whether the kernel supports these rows and this layer."""
    count = update.shape[:-1].numel()
    narrow = weight.shape[0] in WIDTHS and weight.shape[1] in WIDTHS
    return update.element_size() == 2 and narrow and 0 < count < 2**31 - 1024


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
    y = to = _new_result(x)
    launch, readable = _prepare_linear(y, x, update, weight, bias, mask, columns)
    if not readable:
        x, update, to = x.contiguous(), update.contiguous(), x.new_empty(x.shape)
    launch(x, update, weight.contiguous(), *pointers(x, contiguous(bias), contiguous(mask)), to)
    return y if to is y else y.copy_(to)


@add_linear.backward("update weight bias", fake="update weight bias")
def add_linear_backward(
    dy: Tensor,
    update: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the update, the weight and the bias."""
    d = dy if mask is None and dy.is_contiguous() else dropped(dy, mask, columns, False)
    rows, dbias = d.view(-1, d.shape[-1]), BiasGradient(bias, d)
    dweight = weight_gradient(rows, update.reshape(-1, update.shape[-1]), weight)
    dbias.add(rows)
    return torch.mm(rows, weight.to(d.dtype)).view(update.shape), dweight, dbias.result()


def _linear_gradients(
    dy: Tensor,
    update: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    columns: bool,
) -> tuple[Tensor, ...]:
    return dy, *add_linear_backward(dy, update, weight, bias, mask, columns)


add_linear.gradients("x update weight bias", _linear_gradients)


@per_layout
def _prepare_linear(
    y: Tensor,
    x: Tensor,
    update: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    columns: bool,
) -> tuple[Launch, bool]:
    """Prepare the launch; return whether it reads and writes rows in place."""
    (C, H), (R, N) = weight.shape, x.shape[-3:-1]
    rows = as_rows(x, update[..., :1].expand(x.shape), y)
    readable = rows.in_place and x.stride(-1) == update.stride(-1) == 1
    strides = [step for each in rows.strides for step in each[:3]]
    made = Launch(
        add_linear_kernel,
        (-(-rows.count // BLOCK),),
        (rows.count, R, N, *rows.sizes, *(strides if readable else (0, 0, C, 0, 0, H, 0, 0, C))),
        C=C,
        H=H,
        BLOCK=BLOCK,
        AXES=rows.axes if readable else 1,
        COLUMNS=columns,
        MASKED=mask is not None,
        HAS_BIAS=bias is not None,
    )
    return made, readable


def _launch(
    x: Tensor | None, update: Tensor, mask: Tensor | None, y: Tensor, columns: bool
) -> None:
    launch, readable = _prepare(y, update, mask is not None, x is not None, columns)
    update = update if readable else update.contiguous()
    launch(y if x is None else x, update, y if mask is None else mask.contiguous(), y)


@per_layout
def _prepare(
    y: Tensor, update: Tensor, masked: bool, adds: bool, columns: bool
) -> tuple[Launch, bool]:
    """Prepare the launch; return whether the kernel reads the update in place."""
    R, N, C = y.shape[-3:]
    B, strides = y.shape[:-3].numel(), _strides(update)
    block_c = min(1 << (C - 1).bit_length(), LARGEST_BLOCK_C)
    rows = (ELEMENTS // block_c).bit_length() - 1
    block_r, block_n = 1 << rows // 2, 1 << (rows + 1) // 2
    made = Launch(
        kernel,
        (-(-N // block_n) * -(-R // block_r), -(-C // block_c), B),
        (R, N, *(strides or (R * N * C, N * C, C)), *(_strides(y) or ())),
        C=C,
        BLOCK_R=block_r,
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        COLUMNS=columns,
        MASKED=masked,
        ADDS=adds,
    )
    return made, strides is not None


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of batch, R and N; None if the batch does not fold into one axis."""
    if tensor.stride(-1) != 1 or tensor.numel() == 0:
        return None
    try:
        return tensor.view(-1, *tensor.shape[-3:]).stride()[:3]
    except RuntimeError:
        return None


@triton.jit
def kernel(
    X, Update, Mask, Y, R, N, update_B, update_R, update_N, y_B, y_R, y_N,
    C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows r and columns n, near each other in memory in either layout."""
    blocks_n = tl.cdiv(N, BLOCK_N)
    row = tl.arange(0, BLOCK_R * BLOCK_N)
    r = tl.program_id(0) // blocks_n * BLOCK_R + row // BLOCK_N
    n = tl.program_id(0) % blocks_n * BLOCK_N + row % BLOCK_N
    b = tl.program_id(2).to(tl.int64)
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = ((r < R) & (n < N))[:, None] & (col < C)[None, :]
    r, n = r.to(tl.int64), n.to(tl.int64)
    at = Update + (b * update_B + r * update_R + n * update_N)[:, None] + col[None, :]
    # [BLOCK_R * BLOCK_N, BLOCK_C]
    y = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if MASKED:
        place = b * R + r if COLUMNS else b * N + n
        # [BLOCK_R * BLOCK_N, BLOCK_C]
        m = tl.load(Mask + (place * C)[:, None] + col[None, :], mask=inside, other=0.0)
        y *= m.to(tl.float32)
    if ADDS:
        place = (b * R + r) * N + n
        # [BLOCK_R * BLOCK_N, BLOCK_C]
        x = tl.load(X + (place * C)[:, None] + col[None, :], mask=inside, other=0.0)
        y += x.to(tl.float32)
    at = Y + (b * y_B + r * y_R + n * y_N)[:, None] + col[None, :]
    tl.store(at, y.to(Y.dtype.element_ty), mask=inside)


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
