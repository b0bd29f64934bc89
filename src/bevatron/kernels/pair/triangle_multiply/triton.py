"""The triangle multiplication in Triton: two custom operators.

Projections, norms and gates are kernels (`triton_launch`); the contraction is a batched cuBLAS
matmul, one matrix per channel.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.errors import KernelError
from bevatron.kernels.pair import LARGE_PAIR
from bevatron.kernels.pair.triangle_multiply.contraction import Contraction
from bevatron.kernels.pair.triangle_multiply.triton_launch import (
    LARGEST_WIDTH,
    Multiplication,
    padded,
)
from bevatron.kernels.shared.autograd import empty_gradients, needs_grad
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import on_device

Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Ten = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
WITH_GRADIENTS = (
    "z norm_in_weight norm_in_bias a_weight a_gate_weight b_weight b_gate_weight joint_bias "
    "norm_out_weight norm_out_bias out_weight gate_weight out_bias"
)


def triangle_multiply(
    z: Tensor,
    mask: Tensor | None,
    drop: Tensor | None,
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
    residual: bool,
    contraction: Contraction | None,
) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.triangle_multiply`."""
    width = max(out_weight.shape)
    if width > LARGEST_WIDTH:
        raise KernelError(
            f"triangle_multiply: {width} channels do not fit the registers of the Triton kernels, "
            f"which take up to {LARGEST_WIDTH}; use('reference') takes any"
        )
    joint = [a_weight, a_gate_weight, b_weight, b_gate_weight]
    if len({weight.dtype for weight in joint}) > 1:  # their gradients lie in one tensor
        joint = [weight.float() for weight in joint]
    joint_bias = _joint((a_bias, a_gate_bias, b_bias, b_gate_bias), norm_out_bias)
    out_biases = _joint((out_bias, out_gate_bias), norm_in_bias)
    given = (
        *(z, *(m.detach() if m is not None and m.requires_grad else m for m in (mask, drop))),
        *(norm_in_weight, norm_in_bias),
        *(*joint, joint_bias, norm_out_weight, norm_out_bias, out_weight, out_gate_weight),
        out_biases,
    )
    # Otherwise a, b and the normalised pair would take three times its memory.
    keeps = needs_grad(*given) and z.nbytes < LARGE_PAIR
    if contraction is None:
        y: Tensor = multiply(*given, outgoing, eps, residual, keeps)[0]
    else:
        y = _Contracted.apply(contraction, outgoing, eps, residual, keeps, *given)
    return y


def _new_outputs(
    z: Tensor,
    a_weight: Tensor,
    out_weight: Tensor,
    gate_weight: Tensor,
    keeps: bool,
) -> Six:
    R, N = z.shape[-3:-1]
    matrices = a_weight.shape[0] * z.shape[:-3].numel()
    y = torch.empty_like(z, memory_format=torch.contiguous_format)
    x = z.new_empty((matrices, R, padded(N)))
    ab = z.new_empty((2 * matrices if keeps else 0, R, padded(N)))
    statistics = z.new_empty((4, z.shape[:-1].numel()), dtype=torch.float32)
    rounded = z.new_empty(4 * a_weight.numel() + out_weight.numel() + gate_weight.numel())
    normed = z.new_empty(z.shape if keeps else 0)
    return y, x, ab, normed, statistics, rounded


@custom_op("triangle_multiply", outputs="y x ab normed statistics rounded", fake=_new_outputs)
def multiply(
    z: Tensor,
    mask: Tensor | None,
    drop: Tensor | None,
    norm_in_weight: Tensor,
    norm_in_bias: Tensor,
    a_weight: Tensor,
    a_gate_weight: Tensor,
    b_weight: Tensor,
    b_gate_weight: Tensor,
    joint_bias: Tensor | None,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    gate_weight: Tensor,
    out_bias: Tensor | None,
    outgoing: bool,
    eps: float,
    residual: bool,
    keeps: bool,
) -> Six:
    """Return the result and what the backward pass reads.

    That is the contraction [H batch, N, N padded]; a and b, [2 H batch, N, N padded], and the
    normalised pair if it ``keeps`` them; the statistics [4, M]; the matrices one after another, in
    the type of z.
    ``joint_bias`` [4 H] holds the biases of a, its gates, b and its gates; ``out_bias`` [2 C] those
    of result and gate.
    """
    given = (
        *(z, mask, drop, norm_in_weight, norm_in_bias, a_weight, a_gate_weight, b_weight),
        *(b_gate_weight, joint_bias, norm_out_weight, norm_out_bias, out_weight, gate_weight),
    )
    how: dict[str, Any] = {"eps": eps, "residual": residual, "contraction": _Products()}
    return _multiply(*given, out_bias, keeps=keeps, outgoing=outgoing, **how)[0]


def _multiply(
    *given: Any, eps: float, residual: bool, keeps: bool, contraction: Contraction, outgoing: bool
) -> tuple[Six, Sequence[Tensor]]:
    """Take the tensors of `multiply`; return its results, and what the contraction saved."""
    z, mask, drop, *norm_in, a_weight, a_gate, b_weight, b_gate, joint_bias = given[:10]
    *norm_out, out_weight, gate_weight, out_bias = given[10:]
    found = _new_outputs(z, a_weight, out_weight, gate_weight, keeps)
    y, x, ab, normed, statistics, rounded = found
    normed = normed if keeps else y  # programs read its rows before they write y
    biases = norm_in, joint_bias, norm_out, out_bias
    run = Multiplication(z, mask, drop, *biases, rounded, eps, residual)
    run.round_weights(a_weight, a_gate, b_weight, b_gate, out_weight, gate_weight)
    # Even without rows: a contraction may involve those of other processes.
    pair, of_rows = run.pair, statistics.unbind()
    made = ab if keeps else pair.planes(z, 2 * pair.H)
    run.project(made, normed, of_rows[:2])
    a, b = (pair.matrices(planes) for planes in made.chunk(2))
    kept = contraction.contract(a, b, pair.matrices(x), outgoing)
    del made, a, b
    run.output(x, normed, y, of_rows)
    return found, kept


def _new_gradients(
    z: Tensor,
    norm_in_weight: Tensor,
    norm_in_bias: Tensor,
    a_weight: Tensor,
    joint_bias: Tensor | None,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    gate_weight: Tensor,
    out_bias: Tensor | None,
) -> Ten:
    H, C = a_weight.shape
    behind = norm_out_weight, norm_out_bias, out_weight, gate_weight, out_bias
    dz, dweight, dbias, *rest = empty_gradients(
        z, z, norm_in_weight, norm_in_bias, joint_bias, *behind
    )
    return cast("Ten", (dz, dweight, dbias, a_weight.new_empty(4 * H, C), *rest))


def _of_each(dz: Tensor, dweight: Tensor, dbias: Tensor, djoint: Tensor, *rest: Tensor) -> Any:
    """Split the joint weight's gradient, in the order of `WITH_GRADIENTS`."""
    return dz, dweight, dbias, *djoint.chunk(4), *rest


@multiply.backward(WITH_GRADIENTS, fake=_new_gradients, unpack=_of_each)
def multiply_backward(
    dy: Tensor,
    z: Tensor,
    mask: Tensor | None,
    drop: Tensor | None,
    norm_in_weight: Tensor,
    norm_in_bias: Tensor,
    a_weight: Tensor,
    joint_bias: Tensor | None,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    gate_weight: Tensor,
    out_bias: Tensor | None,
    x: Tensor,
    ab: Tensor,
    normed: Tensor,
    statistics: Tensor,
    rounded: Tensor,
    outgoing: bool,
    eps: float,
    residual: bool,
) -> Ten:
    """Return gradients of all tensors but the mask, without elements for biases not given.

    The weights of a, its gates, b and its gates have one gradient, [4 H, C].
    """
    given = (
        *(z, mask, drop, norm_in_weight, norm_in_bias, a_weight, joint_bias, norm_out_weight),
        *(norm_out_bias, out_weight, gate_weight, out_bias, x, ab, normed),
        *(statistics, rounded),
    )
    how: dict[str, Any] = {"eps": eps, "residual": residual, "contraction": _Products()}
    return _multiply_backward(dy, *given, outgoing=outgoing, **how)


def _multiply_backward(
    dy: Tensor,
    *given: Any,
    eps: float,
    residual: bool,
    contraction: Contraction,
    outgoing: bool,
) -> Ten:
    """Take the tensors of `multiply_backward` and what the contraction saved; return gradients.

    A and b that were not kept are computed again. Four buffers of the contraction's size are
    reused. The last holds the gradient of x until
    the gradients of a and b have been computed from it into the first and third; then all four
    hold those of values and gates. The first two are spare until a contraction writes; it
    may receive into the third before that.
    """
    z, mask, drop, *norm_in, _, joint_bias = given[:7]
    *norm_out, _, _, out_bias, x, ab, normed, statistics, rounded = given[7:17]
    found = _new_gradients(z, *given[3:12])
    biases = norm_in, joint_bias, norm_out, out_bias
    run = Multiplication(z, mask, drop, *biases, rounded, eps, residual)
    pair, of_rows, dz = run.pair, statistics.unbind(), found[0]
    if not normed.numel():
        ab, normed = pair.planes(z, 2 * pair.H), torch.empty_like(run.z)
        run.project(ab, normed, of_rows[:2])
    C, H, dy = pair.C, pair.H, dy.contiguous()
    d = pair.planes(z, 4 * H)
    (da, _, db, dx), (a, b) = d.chunk(4), ab.chunk(2)
    spare = d if C <= 2 * H else pair.planes(z, C)
    run.output_input_backward(dy, x, normed, of_rows, dx, dz, spare)
    dx, a, b, da, db = (pair.matrices(planes) for planes in (dx, a, b, da, db))
    shares: list[tuple[Tensor, Tensor]] = []

    def weigh_output() -> None:
        shares.append(run.weigh_output(x, of_rows, dz, spare, found[7:]))

    contraction.contract_backward(dx, a, b, given[17:], da, db, outgoing, weigh_output)
    del spare
    given = dy, d, normed, of_rows[:2], dz, shares[0], found[1:3], *found[3:5], found[5:7]
    run.project_backward(*given)
    return found


class _Products:
    """The contraction in cuBLAS, for a pair whose rows are all in this process."""

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
    """The operator with a caller's contraction, which torch cannot trace."""

    @staticmethod
    def forward(
        ctx: Any,
        contraction: Contraction,
        outgoing: bool,
        eps: float,
        residual: bool,
        keeps: bool,
        *given: Any,
    ) -> Tensor:
        ctx.how = {"eps": eps, "residual": residual}
        ctx.how |= {"contraction": contraction, "outgoing": outgoing}
        with on_device(given[0]):
            (y, *made), kept = _multiply(*given, keeps=keeps, **ctx.how)
        ctx.save_for_backward(*given[:6], *given[9:], *made, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        given = ctx.saved_tensors
        with on_device(dy):
            dz, *of_weights = _of_each(*_multiply_backward(dy, *given, **ctx.how))
        is_given = ctx.needs_input_grad[8:]
        weights = [dw if each else None for dw, each in zip(of_weights, is_given, strict=True)]
        return None, None, None, None, None, dz, None, None, *weights


def _joint(biases: tuple[Tensor | None, ...], like: Tensor) -> Tensor | None:
    """Concatenate biases, with zeros for any that is None; None if all are."""
    if all(bias is None for bias in biases):
        return None
    return torch.cat([torch.zeros_like(like) if bias is None else bias for bias in biases])
