"""The gated unit in Triton: two custom operators and their launches."""

from torch import Tensor

from bevatron.kernels.pair.gated import gate_and_value
from bevatron.kernels.pair.swiglu import triton_products as fused
from bevatron.kernels.pair.swiglu.triton_kernels import backward_kernel, forward_kernel
from bevatron.kernels.shared.chunked_linear import linear
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.rows import as_rows
from bevatron.kernels.shared.triton_launch import launch

__all__ = ["hidden_gradients", "hidden_rows", "launch_backward", "launch_forward", "swiglu"]
"""Names that other operators may use."""

ELEMENTS, LARGEST_BLOCK_C = 4096, 1024
"""Elements of a block, and the most channels it spans."""


def swiglu(gate: Tensor, value: Tensor | None) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.swiglu`."""
    result: Tensor = gated(gate, value)
    return result


@custom_op(
    "swiglu",
    fake=lambda gate, value: gate.new_empty(
        gate.shape if value is not None else gate_and_value(gate)[0].shape
    ),
)
def gated(gate: Tensor, value: Tensor | None) -> Tensor:
    """Return silu(gate) * value, with both in ``gate`` if value is not given."""
    if value is None:
        gate, value = gate_and_value(gate)
    y = gate.new_empty(gate.shape)
    launch_forward(gate, value, y)
    return y


@gated.backward()
def gated_backward(dy: Tensor, gate: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both gradients; without ``value`` a joint one and an empty one."""
    dgate = gate.new_empty(gate.shape)
    if value is None:
        launch_backward(dy, *gate_and_value(gate), *gate_and_value(dgate))
        return dgate, gate.new_empty(0)
    dvalue = gate.new_empty(gate.shape)
    launch_backward(dy, gate, value, dgate, dvalue)
    return dgate, dvalue


def launch_forward(gate: Tensor, value: Tensor, y: Tensor, silu: bool = True) -> None:
    """Write the result into ``y``, whose rows are one stride apart; it may alias an input.

    Without ``silu`` the gate is a sigmoid.
    """
    rows = as_rows(gate, value)
    if rows.count == 0:
        return
    row_stride = y.stride(-2) if y.ndim > 1 else 0
    block, block_c, grid = _grid(gate, rows.count)
    launch(
        forward_kernel,
        grid,
        (*rows.tensors, y),
        (rows.count, *rows.sizes, *rows.strides[0], *rows.strides[1], row_stride),
        C=gate.shape[-1],
        BLOCK=block,
        BLOCK_C=block_c,
        AXES=rows.axes,
        SILU=silu,
    )


def launch_backward(
    dy: Tensor,
    gate: Tensor,
    value: Tensor,
    dgate: Tensor,
    dvalue: Tensor,
    y: Tensor | None = None,
    silu: bool = True,
) -> None:
    """Write both gradients, and the result again into ``y`` if given.

    Rows of the outputs are one stride apart, the same for both gradients.
    """
    rows = as_rows(dy, gate, value)
    if rows.count == 0:
        return
    row_stride = dgate.stride(-2) if dgate.ndim > 1 else 0
    block, block_c, grid = _grid(gate, rows.count)
    strides = (*rows.strides[0], *rows.strides[1], *rows.strides[2], row_stride)
    launch(
        backward_kernel,
        grid,
        (*rows.tensors, dgate, dvalue, dgate if y is None else y),
        (rows.count, *rows.sizes, *strides),
        C=gate.shape[-1],
        BLOCK=block,
        BLOCK_C=block_c,
        AXES=rows.axes,
        SILU=silu,
        WANTS_Y=y is not None,
    )


def hidden_rows(x: Tensor, wide: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return silu(gates) * values [n, H] of rows [n, C].

    ``wide`` [2 H, C] computes gates, then values, with a bias [2 H].
    """
    if bias is None and fused.fits("forward", x, wide):
        return fused.hidden_rows(x, wide)
    gates, values = gate_and_value(linear(x, wide, bias))
    # In place: hidden rows overwrite their gates.
    launch_forward(gates, values, gates)
    return gates


def hidden_gradients(
    x: Tensor, wide: Tensor, dhidden: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return the gradients of gates, then values [n, 2 H], from that of `hidden_rows` [n, H].

    The recomputed hidden rows overwrite their gradient.
    """
    if bias is None and fused.fits("backward", x, wide):
        return fused.hidden_gradients(x, wide, dhidden)
    both = linear(x, wide, bias)
    launch_backward(dhidden, *gate_and_value(both), *gate_and_value(both), dhidden)
    return both


def _grid(gate: Tensor, count: int) -> tuple[int, int, tuple[int, int]]:
    """Return the rows and channels of a block, and the number of blocks along both."""
    width = gate.shape[-1]
    block_c = min(1 << (width - 1).bit_length(), LARGEST_BLOCK_C)
    block = ELEMENTS // block_c
    return block, block_c, (-(-count // block), -(-width // block_c))
