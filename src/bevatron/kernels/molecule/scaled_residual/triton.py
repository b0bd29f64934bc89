"""A residual stream in Triton: two custom operators, their kernels and launches.

Both kernels are elementwise; a program owns BLOCK consecutive elements. The forward writes the sum
in the stream's type and, if TWO, also rounded to the narrow type; the backward adds both gradients.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import contiguous
from bevatron.kernels.shared.triton_math import accumulator

BLOCK = 1024


def scaled_residual(stream: Tensor, update: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the same as the reference; see `bevatron.kernels.molecule.scaled_residual`."""
    scale = None if scale is None else scale.detach()
    wide, narrow = add(stream.contiguous(), update.contiguous(), contiguous(scale))
    return wide, wide if stream.dtype == update.dtype else narrow


@custom_op(
    "scaled_residual",
    fake=lambda stream, update: (stream.new_empty(stream.shape), _second(stream, update)),
)
def add(stream: Tensor, update: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum in both types; the second is empty if the types are equal."""
    wide = stream.new_empty(stream.shape)
    narrow = _second(stream, update)
    if stream.numel():
        scaled_residual_forward[(triton.cdiv(stream.numel(), BLOCK),)](
            *(stream, update, update if scale is None else scale, wide, narrow), stream.numel(),
            C=stream.shape[1], BLOCK=BLOCK, SCALED=scale is not None, TWO=narrow.numel() > 0,
            WIDE=accumulator(stream),
            num_warps=4,
        )  # fmt: skip
    return wide, narrow


@custom_op(
    "scaled_residual_backward",
    fake=lambda dwide, dnarrow, like, other: tuple(
        each.new_empty((dnarrow if dwide is None else dwide).shape) for each in (like, other)
    ),
)
def add_backward(
    dwide: Tensor | None, dnarrow: Tensor | None, scale: Tensor | None, like: Tensor, other: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of the stream and the update; ``like`` and ``other`` give their types."""
    given = dwide if dwide is not None else dnarrow
    assert given is not None
    dstream, dupdate = like.new_empty(given.shape), other.new_empty(given.shape)
    if given.numel():
        scaled_residual_backward[(triton.cdiv(given.numel(), BLOCK),)](
            given if dwide is None else dwide, given if dnarrow is None else dnarrow,
            *(given if scale is None else scale, dstream, dupdate), given.numel(),
            C=given.shape[1], BLOCK=BLOCK, SCALED=scale is not None, HAS_WIDE=dwide is not None,
            HAS_NARROW=dnarrow is not None, WIDE=accumulator(dstream),
            num_warps=4,
        )  # fmt: skip
    return dstream, dupdate


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    del output
    stream, update, scale = inputs
    ctx.save_for_backward(scale, stream.new_empty(0), update.new_empty(0))
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dwide: Tensor | None, dnarrow: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None]:
    if dnarrow is not None and not dnarrow.numel():
        dnarrow = None
    if dwide is None and dnarrow is None:
        return None, None, None
    scale, like, other = ctx.saved_tensors
    dstream, dupdate = add_backward(contiguous(dwide), contiguous(dnarrow), scale, like, other)
    return dstream, dupdate, None


# Not by name, which would save the stream and the update only for their types.
add.register_autograd(_backward, setup_context=_save)


@triton.jit
def scaled_residual_forward(
    Stream, Update, Scale, Out, Narrow, count, C: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, TWO: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute out = stream + scale update for BLOCK elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    u = tl.load(Update + offsets, mask=mask, other=0.0).to(WIDE)  # [BLOCK]
    if SCALED:
        u *= tl.load(Scale + offsets // C, mask=mask, other=0.0).to(WIDE)  # [BLOCK]
    z = tl.load(Stream + offsets, mask=mask, other=0.0).to(WIDE) + u  # [BLOCK]
    tl.store(Out + offsets, z.to(Out.dtype.element_ty), mask=mask)
    if TWO:
        tl.store(Narrow + offsets, z.to(Narrow.dtype.element_ty), mask=mask)


@triton.jit
def scaled_residual_backward(
    DOut, DNarrow, Scale, DStream, DUpdate, count, C: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, HAS_WIDE: tl.constexpr, HAS_NARROW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add both gradients; the gradient of the update is scaled."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    total = tl.zeros([BLOCK], WIDE)
    if HAS_WIDE:
        total += tl.load(DOut + offsets, mask=mask, other=0.0).to(WIDE)  # [BLOCK]
    if HAS_NARROW:
        total += tl.load(DNarrow + offsets, mask=mask, other=0.0).to(WIDE)  # [BLOCK]
    tl.store(DStream + offsets, total.to(DStream.dtype.element_ty), mask=mask)
    if SCALED:
        total *= tl.load(Scale + offsets // C, mask=mask, other=0.0).to(WIDE)  # [BLOCK]
    tl.store(DUpdate + offsets, total.to(DUpdate.dtype.element_ty), mask=mask)


def _second(stream: Tensor, update: Tensor) -> Tensor:
    return update.new_empty(0 if stream.dtype == update.dtype else stream.shape)
