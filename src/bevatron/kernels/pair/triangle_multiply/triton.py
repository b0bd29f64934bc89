"""The triangle multiplication in Triton: two custom operators.

Projections, norms and gates are kernels (`triton_launch`); the contraction is a batch of the device
library's matrix products, one for every channel.
"""

from typing import cast

import torch
from torch import Tensor

from bevatron.errors import KernelError
from bevatron.kernels.pair.triangle_multiply.triton_launch import (
    LARGEST_WIDTH,
    Multiplication,
    Pair,
    padded,
)
from bevatron.kernels.shared.autograd import empty_gradients
from bevatron.kernels.shared.custom_op import custom_op

Ten = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def triangle_multiply(
    z: Tensor,
    mask: Tensor | None,
    norm_in_weight: Tensor,
    norm_in_bias: Tensor,
    a_weight: Tensor,
    a_gate_weight: Tensor,
    b_weight: Tensor,
    b_gate_weight: Tensor,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    out_gate_weight: Tensor,
    a_bias: Tensor | None,
    a_gate_bias: Tensor | None,
    b_bias: Tensor | None,
    b_gate_bias: Tensor | None,
    out_bias: Tensor | None,
    out_gate_bias: Tensor | None,
    outgoing: bool,
    eps: float,
) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.triangle_multiply`."""
    width = max(out_weight.shape)
    if width > LARGEST_WIDTH:
        raise KernelError(
            f"triangle_multiply: {width} channels do not fit the registers of the Triton kernels, "
            f"which take up to {LARGEST_WIDTH}; use('reference') takes any"
        )
    joint = torch.cat([a_weight, a_gate_weight, b_weight, b_gate_weight])
    joint_bias = _joint((a_bias, a_gate_bias, b_bias, b_gate_bias), norm_out_bias)
    out_biases = _joint((out_bias, out_gate_bias), norm_in_bias)
    y: Tensor = multiply(
        *(z, None if mask is None else mask.detach().to(z.dtype), norm_in_weight, norm_in_bias),
        *(joint, joint_bias, norm_out_weight, norm_out_bias, out_weight, out_gate_weight),
        *(out_biases, outgoing, eps),
    )[0]
    return y


def _new_outputs(z: Tensor, norm_out_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    N = z.shape[-2]
    matrices = norm_out_weight.shape[0] * z.shape[:-3].numel()
    statistics = z.new_empty((4, z.shape[:-1].numel()), dtype=torch.float32)
    return z.new_empty(z.shape), z.new_empty((matrices, N, padded(N))), statistics


@custom_op(
    "triangle_multiply",
    outputs="y x statistics",
    fake=_new_outputs,
)
def multiply(
    z: Tensor,
    mask: Tensor | None,
    norm_in_weight: Tensor,
    norm_in_bias: Tensor,
    joint_weight: Tensor,
    joint_bias: Tensor | None,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    gate_weight: Tensor,
    out_bias: Tensor | None,
    outgoing: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the contraction [H batch, N, N padded] and the rows' statistics [4, M].

    ``joint_weight`` is [4 H, C], of a, its gates, b and its gates, ``out_bias`` [2 C], of result
    and gate.
    """
    run = Multiplication(
        *(z, mask, norm_in_weight, norm_in_bias, joint_weight, joint_bias, norm_out_weight),
        *(norm_out_bias, out_weight, gate_weight, out_bias, eps),
    )
    y, x, statistics = _new_outputs(z, norm_out_weight)
    if z.numel():
        pair, of_rows = run.pair, statistics.unbind()
        ab = pair.planes(z, 2 * pair.H)
        run.project(ab, of_rows[:2])
        a, b = ab.chunk(2)
        _contract(pair, a, b, x, outgoing)
        del ab, a, b
        run.output(x, y, of_rows)
    return y, x, statistics


@multiply.backward(
    "z norm_in_weight norm_in_bias joint_weight joint_bias norm_out_weight norm_out_bias "
    "out_weight gate_weight out_bias"
)
def multiply_backward(
    dy: Tensor,
    z: Tensor,
    mask: Tensor | None,
    norm_in_weight: Tensor,
    norm_in_bias: Tensor,
    joint_weight: Tensor,
    joint_bias: Tensor | None,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    gate_weight: Tensor,
    out_bias: Tensor | None,
    x: Tensor,
    statistics: Tensor,
    outgoing: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of all tensors but the mask, without elements for biases not given.

    Four tensors of the contraction's size take turns: the gradient of x lies in the last until
    those of a and b have been made from it, that of b takes the place of b, and then those of
    values and gates lie in all four.
    """
    found = _new_gradients(
        *(z, norm_in_weight, norm_in_bias, joint_weight, joint_bias, norm_out_weight),
        *(norm_out_bias, out_weight, gate_weight, out_bias),
    )
    if not z.numel():
        for gradient in found:
            gradient.zero_()
        return found
    run = Multiplication(
        *(z, mask, norm_in_weight, norm_in_bias, joint_weight, joint_bias, norm_out_weight),
        *(norm_out_bias, out_weight, gate_weight, out_bias, eps),
    )
    pair, of_rows, dz = run.pair, statistics.unbind(), found[0]
    C, H = pair.C, pair.H
    d = pair.planes(z, 4 * H)
    da, a, b, dx = d.chunk(4)
    spare = d if 2 * C <= 3 * H else pair.planes(z, 2 * C)
    before = run.output_backward(dy.contiguous(), x, of_rows, dx, dz, spare, found[5:])
    del spare
    again = d.narrow(0, H * pair.batch, 2 * H * pair.batch)
    run.project(again, torch.empty_like(statistics[:2]).unbind())
    _contract_backward(pair, dx, a, b, da, outgoing)
    run.project_backward(d, of_rows[:2], dz, before, found[1:5])
    return found


def _contract(pair: Pair, a: Tensor, b: Tensor, x: Tensor, outgoing: bool) -> None:
    a, b, x = (pair.matrices(tensor) for tensor in (a, b, x))
    if outgoing:
        torch.bmm(a, b.mT, out=x)
    else:
        torch.bmm(a.mT, b, out=x)


def _contract_backward(
    pair: Pair, dx: Tensor, a: Tensor, b: Tensor, da: Tensor, outgoing: bool
) -> None:
    """Write the gradient of b on b."""
    dx, a, b, da = (pair.matrices(tensor) for tensor in (dx, a, b, da))
    if outgoing:
        torch.bmm(dx, b, out=da)
        torch.bmm(dx.mT, a, out=b)
    else:
        torch.bmm(b, dx.mT, out=da)
        torch.bmm(a, dx, out=b)


def _joint(biases: tuple[Tensor | None, ...], like: Tensor) -> Tensor | None:
    """Concatenate biases, zero where one is not given; None if none is."""
    if all(bias is None for bias in biases):
        return None
    return torch.cat([torch.zeros_like(like) if bias is None else bias for bias in biases])


def _new_gradients(z: Tensor, *weights: Tensor | None) -> Ten:
    return cast("Ten", tuple(empty_gradients(z, z, *weights)))
