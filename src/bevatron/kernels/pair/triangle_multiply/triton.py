"""The triangle multiplication in Triton: two custom operators.

Projections, norms and gates are kernels (`triton_launch`); the contraction is a batch of the device
library's matrix products, one for every channel.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.errors import KernelError
from bevatron.kernels.pair.triangle_multiply.contraction import Contraction
from bevatron.kernels.pair.triangle_multiply.triton_launch import (
    LARGEST_WIDTH,
    Multiplication,
    padded,
    round_weights,
    rounds,
)
from bevatron.kernels.shared.autograd import empty_gradients, needs_grad
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import on_device

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
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
    contraction: Contraction | None,
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
    given = (
        *(z, None if mask is None else mask.detach(), norm_in_weight, norm_in_bias),
        *(joint, joint_bias, norm_out_weight, norm_out_bias, out_weight, out_gate_weight),
        out_biases,
    )
    keeps = needs_grad(*given)
    if contraction is None:
        y: Tensor = multiply(*given, outgoing, eps, keeps)[0]
    else:
        y = _Contracted.apply(contraction, outgoing, eps, keeps, *given)
    return y


def _new_outputs(
    z: Tensor,
    joint_weight: Tensor,
    norm_out_weight: Tensor,
    out_weight: Tensor,
    gate_weight: Tensor,
    keeps: bool,
) -> Five:
    R, N = z.shape[-3:-1]
    matrices = norm_out_weight.shape[0] * z.shape[:-3].numel()
    ab = z.new_empty((2 * matrices if keeps else 0, R, padded(N)))
    statistics = z.new_empty((4, z.shape[:-1].numel()), dtype=torch.float32)
    weights = joint_weight, out_weight, gate_weight
    rounded = z.new_empty(sum(w.numel() for w in weights) if rounds(z, *weights) else 0)
    return z.new_empty(z.shape), z.new_empty((matrices, R, padded(N))), ab, statistics, rounded


@custom_op(
    "triangle_multiply",
    outputs="y x ab statistics rounded",
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
    keeps: bool,
) -> Five:
    """Return the result and what the backward pass takes.

    The contraction [H batch, N, N padded]; a and b, [2 H batch, N, N padded], if a backward pass is
    to come; the statistics [4, M]; the matrices in the type of z, if theirs is another.
    ``joint_weight`` is [4 H, C], of a, its gates, b and its gates, ``out_bias`` [2 C], of result
    and gate.
    """
    return _multiply(
        *(z, mask, norm_in_weight, norm_in_bias, joint_weight, joint_bias, norm_out_weight),
        *(norm_out_bias, out_weight, gate_weight, out_bias),
        eps=eps,
        keeps=keeps,
        contraction=_Products(),
        outgoing=outgoing,
    )[0]


def _multiply(
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
    *,
    eps: float,
    keeps: bool,
    contraction: Contraction,
    outgoing: bool,
) -> tuple[Five, Sequence[Tensor]]:
    """Return what `multiply` does, and what the contraction keeps."""
    weights = joint_weight, norm_out_weight, out_weight, gate_weight
    y, x, ab, statistics, rounded = found = _new_outputs(z, *weights, keeps)
    round_weights(joint_weight, out_weight, gate_weight, rounded)
    run = Multiplication(
        *(z, mask, norm_in_weight, norm_in_bias, joint_weight, joint_bias, norm_out_weight),
        *(norm_out_bias, out_weight, gate_weight, out_bias, rounded, eps),
    )
    # Without rows too: a contraction may meet those of other processes.
    pair, of_rows = run.pair, statistics.unbind()
    made = ab if keeps else pair.planes(z, 2 * pair.H)
    run.project(made, of_rows[:2])
    a, b = (pair.matrices(planes) for planes in made.chunk(2))
    kept = contraction.contract(a, b, pair.matrices(x), outgoing)
    del made, a, b
    run.output(x, y, of_rows)
    return found, kept if keeps else ()


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
    ab: Tensor,
    statistics: Tensor,
    rounded: Tensor,
    outgoing: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of all tensors but the mask, without elements for biases not given."""
    return _multiply_backward(
        *(dy, z, mask, norm_in_weight, norm_in_bias, joint_weight, joint_bias, norm_out_weight),
        *(norm_out_bias, out_weight, gate_weight, out_bias, x, ab, statistics, rounded),
        eps=eps,
        contraction=_Products(),
        outgoing=outgoing,
    )


def _multiply_backward(
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
    ab: Tensor,
    statistics: Tensor,
    rounded: Tensor,
    *kept: Tensor,
    eps: float,
    contraction: Contraction,
    outgoing: bool,
) -> Ten:
    """Return the gradients of `multiply_backward`.

    Four tensors of the contraction's size take turns: the gradient of x lies in the last until
    those of a and b, in the first and third, have been made from it, and then those of values and
    gates lie in all four. The first two are spare until a contraction writes, which may receive
    into the third before that.
    """
    found = _new_gradients(
        *(z, norm_in_weight, norm_in_bias, joint_weight, joint_bias, norm_out_weight),
        *(norm_out_bias, out_weight, gate_weight, out_bias),
    )
    run = Multiplication(
        *(z, mask, norm_in_weight, norm_in_bias, joint_weight, joint_bias, norm_out_weight),
        *(norm_out_bias, out_weight, gate_weight, out_bias, rounded, eps),
    )
    pair, of_rows, dz = run.pair, statistics.unbind(), found[0]
    C, H = pair.C, pair.H
    d = pair.planes(z, 4 * H)
    (da, _, db, dx), (a, b) = d.chunk(4), ab.chunk(2)
    spare = d if C <= 2 * H else pair.planes(z, C)
    run.output_input_backward(dy.contiguous(), x, of_rows, dx, dz, spare)
    dx, a, b, da, db = (pair.matrices(planes) for planes in (dx, a, b, da, db))
    shares: list[Tensor] = []

    def weigh_output() -> None:
        shares.append(run.weigh_output(x, of_rows, dz, spare, found[5:]))

    contraction.contract_backward(dx, a, b, kept, da, db, outgoing, weigh_output)
    del spare
    run.project_backward(d, of_rows[:2], dz, shares[0], found[1:5])
    return found


class _Products:
    """The contraction by the device library, of a pair whose rows are all here."""

    def contract(self, a: Tensor, b: Tensor, x: Tensor, outgoing: bool) -> Sequence[Tensor]:
        """Write x."""
        if outgoing:
            torch.bmm(a, b.mT, out=x)
        else:
            torch.bmm(a.mT, b, out=x)
        return ()

    def contract_backward(
        self,
        dx: Tensor,
        a: Tensor,
        b: Tensor,
        kept: Sequence[Tensor],  # noqa: ARG002
        da: Tensor,
        db: Tensor,
        outgoing: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        """Write the gradients of a and b."""
        meanwhile()
        if outgoing:
            torch.bmm(dx, b, out=da)
            torch.bmm(dx.mT, a, out=db)
        else:
            torch.bmm(b, dx.mT, out=da)
            torch.bmm(a, dx, out=db)


class _Contracted(torch.autograd.Function):
    """The operator with a contraction that was given, which torch cannot trace."""

    @staticmethod
    def forward(
        ctx: Any, contraction: Contraction, outgoing: bool, eps: float, keeps: bool, *given: Any
    ) -> Tensor:
        ctx.how = {"eps": eps, "contraction": contraction, "outgoing": outgoing}
        with on_device(given[0]):
            (y, *made), kept = _multiply(*given, keeps=keeps, **ctx.how)
        ctx.save_for_backward(*given, *made, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        given = ctx.saved_tensors
        with on_device(dy):
            dz, *rest = _multiply_backward(dy, *given, **ctx.how)
        weights = [None if w is None else dw for dw, w in zip(rest, given[2:], strict=False)]
        return None, None, None, None, dz, None, *weights


def _joint(biases: tuple[Tensor | None, ...], like: Tensor) -> Tensor | None:
    """Concatenate biases, zero where one is not given; None if none is."""
    if all(bias is None for bias in biases):
        return None
    return torch.cat([torch.zeros_like(like) if bias is None else bias for bias in biases])


def _new_gradients(z: Tensor, *weights: Tensor | None) -> Ten:
    return cast("Ten", tuple(empty_gradients(z, z, *weights)))
