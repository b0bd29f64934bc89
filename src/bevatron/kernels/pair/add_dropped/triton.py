"""The dropped residual update in Triton: one kernel for both passes.

The gradient of x is the result's gradient; no kernel runs for it. The gradient of the update has
the update's layout, so that nothing copies it if the update was transposed.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.pair.add_dropped import triton_linear
from bevatron.kernels.pair.add_dropped.reference import linear
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.triton_launch import Launch

ELEMENTS, LARGEST_BLOCK_C = 4096, 1024
"""Elements of a block, and the most channels it spans."""


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
    if weight is not None and triton_linear.fits(update, weight):
        result = triton_linear.add_linear(x, update, weight, bias, mask, columns)
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
