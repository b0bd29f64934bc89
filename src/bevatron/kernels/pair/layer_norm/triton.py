"""Layer normalisation in Triton: two custom operators and their launches."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bevatron.kernels.pair.layer_norm.triton_kernels import backward_kernel, forward_kernel
from bevatron.kernels.shared.autograd import empty_gradients
from bevatron.kernels.shared.checks import check_width
from bevatron.kernels.shared.chunked_linear import chunk_of
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import contiguous, num_sms, pointers
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.rows import as_rows
from bevatron.kernels.shared.triton_launch import Launch
from bevatron.kernels.shared.triton_partial_sums import sum_weight_and_bias_partials

__all__ = ["NormedRows", "launch_backward", "launch_forward", "layer_norm", "new_outputs"]
"""Names that other operators may use."""

FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 2048, 4096
"""Elements of a block, so that it fits the registers of four warps."""
PROGRAMS_PER_SM = 2
"""Of the backward kernel; each program writes one partial sum of the weight gradients."""


def layer_norm(x: Tensor, *vectors_and_eps: Any) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.layer_norm`."""
    check_width("layer_norm", x)
    y: Tensor = normalise(x, *vectors_and_eps)[0]
    return y


def add_norm(
    x: Tensor, update: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the same as the reference; see `bevatron.kernels.pair.layer_norm`."""
    check_width("add_norm", x)
    total, y, *_ = add_and_normalise(x, update, gate, scale, shift, eps)
    return total, y


@custom_op("layer_norm", outputs="y mean rstd", fake=lambda x: new_outputs(x, x.shape[-1]))
def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    sigmoid: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result and every row's mean and 1/sigma in float32."""
    y, mean, rstd = new_outputs(x, x.shape[-1])
    launch_forward(x, weight, bias, scale, shift, y, mean, rstd, eps, sigmoid)
    return y, mean, rstd


@custom_op("layer_norm_backward", fake="x weight bias scale")
def normalise_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    sigmoid: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of x, weight, bias and scale; empty for what is not given."""
    dx, dweight, dbias, dscale = empty_gradients(x, x, weight, bias, scale)
    launch_backward(
        dy, x, weight, bias, scale, mean, rstd, dx, dweight, dbias, dscale, sigmoid=sigmoid
    )
    return dx, dweight, dbias, dscale


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    sigmoid: bool,
) -> tuple[Tensor, ...]:
    # The shift is added last, so its gradient is the result's.
    return *normalise_backward(dy, x, weight, bias, scale, mean, rstd, sigmoid), dy


normalise.gradients("x weight bias scale shift", _gradients)


@custom_op(
    "add_norm",
    outputs="total y mean rstd",
    fake=lambda x: (x.new_empty(x.shape), *new_outputs(x, x.shape[-1])),
)
def add_and_normalise(
    x: Tensor, update: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum, its normalised rows and every row's mean and 1/sigma in float32."""
    total, (y, mean, rstd) = x.new_empty(x.shape), new_outputs(x, x.shape[-1])
    added = update, gate, total
    launch_forward(x, None, None, scale, shift, y, mean, rstd, eps, True, added)
    return total, y, mean, rstd


def _gradients_of_both(
    dtotal: Tensor | None,
    dy: Tensor | None,
    total: Tensor,
    update: Tensor,
    gate: Tensor,
    scale: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, ...]:
    dy = torch.zeros_like(total) if dy is None else dy
    dx, _, _, dscale = normalise_backward(dy, total, None, None, scale, mean, rstd, True)
    dx = dx if dtotal is None else dx + dtotal
    return dx, dx * gate, dx * update, dscale, dy


add_and_normalise.gradients("x update gate scale shift", _gradients_of_both)


def launch_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    y: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    sigmoid: bool = False,
    added: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> None:
    """Write the normalised rows into ``y`` and their statistics into ``mean`` and ``rstd``.

    ``added`` is an update of the rows, its gate, and where their sum is written.
    """
    update, gate, total = added
    launch, readable = _forward(x, weight, bias, scale, shift, update, gate, eps, sigmoid)
    if not readable:
        x, scale, shift = x.contiguous(), contiguous(scale), contiguous(shift)
        update, gate = contiguous(update), contiguous(gate)
    vectors = contiguous(weight), contiguous(bias)
    launch(*pointers(x, x, *vectors, scale, shift, update, gate, total), y, mean, rstd)


@per_layout
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    update: Tensor | None,
    gate: Tensor | None,
    eps: float,
    sigmoid: bool,
) -> tuple[Launch, bool]:
    """Prepare the launch; return whether the kernel reads the rows in place."""
    width, width_pad, block = _block(x, FORWARD_ELEMENTS)
    all_rows = (x, scale, shift, update, gate)
    rows = as_rows(*(tensor for tensor in all_rows if tensor is not None))
    steps = iter(rows.strides)
    of_each = [(0,) * 4 if tensor is None else next(steps) for tensor in all_rows]
    made = Launch(
        forward_kernel,
        (-(-rows.count // block),),
        (rows.count, *rows.sizes, *(step for each in of_each for step in each), eps),
        C=width,
        C_PAD=width_pad,
        BLOCK=block,
        AXES=rows.axes,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        HAS_SCALE=scale is not None,
        HAS_SHIFT=shift is not None,
        SIGMOID=sigmoid,
        HAS_UPDATE=update is not None,
        num_warps=_warps(block * width_pad),
    )
    return made, rows.in_place


def launch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    dscale: Tensor,
    *,
    sigmoid: bool = False,
) -> None:
    """Write all gradients; ``dweight`` and ``dbias`` from one partial sum per program.

    ``dscale`` may alias ``scale``; its rows are one stride apart.
    """
    launch, readable, shape = _backward(dy, x, weight, bias, scale, dscale, sigmoid)
    if x.numel() == 0:
        dweight.zero_()
        dbias.zero_()
        return
    if not readable:
        dy, x, scale = dy.contiguous(), x.contiguous(), contiguous(scale)
    parts = x.new_empty(shape, dtype=torch.float32)
    vectors = pointers(x, contiguous(weight), contiguous(bias), scale)
    launch(dy, x, *vectors, mean, rstd, dx, dscale, parts)
    sum_weight_and_bias_partials(parts, weight, bias, dweight, dbias)


@per_layout
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    dscale: Tensor,
    sigmoid: bool,
) -> tuple[Launch, bool, tuple[int, ...]]:
    """Prepare the launch; return whether it reads rows in place, and its partial sums' shape."""
    width, width_pad, block = _block(x, BACKWARD_ELEMENTS)
    rows = as_rows(dy, x) if scale is None else as_rows(dy, x, scale)
    wants_vectors = weight is not None or bias is not None
    programs = min(-(-rows.count // block), PROGRAMS_PER_SM * num_sms(x.device))
    strides = [step for tensor in rows.strides for step in tensor]
    strides += [0] * (12 - len(strides))
    made = Launch(
        backward_kernel,
        (programs,),
        (rows.count, *rows.sizes, *strides, dscale.stride(-2) if dscale.ndim > 1 else 0),
        C=width,
        C_PAD=width_pad,
        BLOCK=block,
        AXES=rows.axes,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        HAS_SCALE=scale is not None,
        SIGMOID=sigmoid,
        WANTS_VECTORS=wants_vectors,
        num_warps=_warps(block * width_pad),
    )
    return made, rows.in_place, (programs, 2, width) if wants_vectors else (0,)


class NormedRows(NamedTuple):
    """Rows of a matrix that an operator normalises itself, chunk by chunk.

    Attributes
    ----------
    rows : [n, C]
    weight, bias : [C]
    mean, rstd : every row's mean and 1/sigma in float32, contiguous, of n elements
    """

    rows: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    rstd: Tensor
    eps: float

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        eps: float,
    ) -> "NormedRows":
        """Take a tensor of any shape [..., C] with statistics [...]."""
        rows = x.reshape(-1, x.shape[-1])
        return cls(rows, weight, bias, mean, rstd, eps)

    def make(self, part: slice = slice(None)) -> Tensor:
        """Return the normalised rows of a chunk; write their statistics."""
        rows, mean, rstd = chunk_of(self.rows, part), self.mean, self.rstd
        if rows is not self.rows:
            mean, rstd = mean.view(-1)[part], rstd.view(-1)[part]
        normed = torch.empty_like(rows, memory_format=torch.contiguous_format)
        launch_forward(rows, self.weight, self.bias, None, None, normed, mean, rstd, self.eps)
        return normed

    def backward(self, dnormed: Tensor, dx: Tensor, dweight: Tensor, dbias: Tensor) -> None:
        """Write all gradients, from known statistics; ``dx`` may alias ``dnormed``."""
        launch_backward(
            *(dnormed, self.rows, self.weight, self.bias, None, self.mean, self.rstd),
            *(dx, dweight, dbias, self.rows.new_empty(0)),
        )


def new_outputs(x: Tensor, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate a result with ``channels`` channels, and the statistics of the rows of ``x``."""
    *rows, _ = x.shape
    mean = x.new_empty(rows, dtype=torch.float32)
    return x.new_empty((*rows, channels)), mean, torch.empty_like(mean)


def _block(x: Tensor, elements: int) -> tuple[int, int, int]:
    """Return the width of a row, the width padded to a power of two, and the rows of a block."""
    width = x.shape[-1]
    width_pad = 1 << (width - 1).bit_length()
    return width, width_pad, max(1, elements // width_pad)


def _warps(elements: int) -> int:
    return 4 if elements <= BACKWARD_ELEMENTS else 8
