"""Normalisation and activation in Triton: two custom operators and their launches.

They serve `norm_gelu` and `bond_norm_gelu`, whose rows are sums of more terms.
"""

from typing import Any

import triton
from torch import Tensor

from bevatron.kernels.molecule.neighbour_sums.triton import launch_gather
from bevatron.kernels.molecule.norm_gelu.triton_kernels import norm_gelu_backward, norm_gelu_forward
from bevatron.kernels.molecule.segment_sum.triton import launch_sum
from bevatron.kernels.molecule.triton_norm_rows import (
    ELEMENTS_PER_WARP,
    shape_of_block,
)
from bevatron.kernels.shared.autograd import empty_gradients
from bevatron.kernels.shared.checks import check_width
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.launch import contiguous, num_sms, pointers
from bevatron.kernels.shared.triton_math import accumulator
from bevatron.kernels.shared.triton_partial_sums import new_sums, sum_partials

__all__ = ["norm_gelu", "normalise"]
"""Names that other operators may use."""

FEWER_ELEMENTS = 256
"""Elements per warp of the backward kernel without a norm; larger sums would delay programs."""
WARPS_PER_SM, MORE_WARPS = 16, 32
"""Warps per SM of the backward kernel, with and without a norm; each program writes a partial sum
of the vectors' gradients."""


def norm_gelu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    linear_bias: Tensor | None,
    rows: Tensor | None,
    index: Tensor | None,
    ptr: Tensor | None,
    eps: float,
    activation: str,
) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.molecule.norm_gelu`."""
    check_width("norm_gelu", x)
    nothing = (None,) * 4
    y: Tensor = normalise(
        *(contiguous(x), None, *map(contiguous, (rows, linear_bias, weight, bias))),
        *(*nothing, *map(contiguous, (index, ptr)), eps, activation == "relu"),
    )[0]
    return y


@custom_op(
    "norm_gelu",
    outputs="y mean rstd",
    fake=lambda x, weight: (x.new_empty(x.shape), *_new_statistics(x, weight)),
)
def normalise(
    x: Tensor,
    atoms: Tensor | None,
    rows: Tensor | None,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    receivers: Tensor | None,
    senders: Tensor | None,
    incoming: Tensor | None,
    incoming_ptr: Tensor | None,
    graph: Tensor | None,
    ptr: Tensor | None,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result and every row's mean and 1/sigma."""
    del incoming, incoming_ptr, ptr
    y = x.new_empty(x.shape)
    mean, rstd = _new_statistics(x, weight)
    if x.numel():
        pad, block, warps = shape_of_block(x.shape[1])
        given = (atoms, rows, linear_bias, weight, bias, receivers, senders, graph)
        norm_gelu_forward[(triton.cdiv(len(x), block),)](
            *(x, *pointers(x, *given), y, mean, rstd), *(len(x), eps),
            **_constants(x, atoms, rows, linear_bias, weight, relu, pad, block),
            num_warps=warps,
        )  # fmt: skip
    return y, mean, rstd


@normalise.backward(
    "x atoms rows linear_bias weight bias",
    fake=lambda x, atoms, rows: (
        *empty_gradients(x, x, atoms, rows),
        x.new_empty((3, x.shape[1]), dtype=wide_type(x)),
    ),
    unpack=lambda dx, datoms, drows, sums: (dx, datoms, drows, *sums),
)
def normalise_backward(
    dy: Tensor,
    x: Tensor,
    atoms: Tensor | None,
    rows: Tensor | None,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    receivers: Tensor | None,
    senders: Tensor | None,
    incoming: Tensor | None,
    incoming_ptr: Tensor | None,
    graph: Tensor | None,
    ptr: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of x, atoms and rows, empty if not given, and of the vectors.

    The last is [3, C]: linear bias, weight and bias.
    """
    dx, datoms, drows = empty_gradients(x, x, atoms, rows)
    sums = new_sums(x, 3, x.shape[1])
    given = (atoms, rows, linear_bias, weight, bias, receivers, senders, graph)
    _launch_backward(dy.contiguous(), x, given, mean, rstd, dx, sums, relu)
    if atoms is not None:
        assert senders is not None
        assert incoming is not None
        assert incoming_ptr is not None
        launch_gather(dx, None, senders, incoming, incoming_ptr, datoms)
    if rows is not None:
        assert ptr is not None
        # Sum the sums over each atom's edges: these are fewer rows than the edges.
        launch_sum(dx if atoms is None else datoms, ptr, drows)
    return dx, datoms, drows, sums


def _launch_backward(
    dy: Tensor,
    x: Tensor,
    given: tuple[Tensor | None, ...],
    mean: Tensor,
    rstd: Tensor,
    dz: Tensor,
    sums: Tensor,
    relu: bool,
) -> None:
    """Write the gradient of the normalised sum, and those of the vectors from partial sums."""
    if not x.numel():
        return
    width = x.shape[1]
    atoms, rows, linear_bias, weight = given[:4]
    plain = weight is None
    pad, block, warps = shape_of_block(width, FEWER_ELEMENTS if plain else ELEMENTS_PER_WARP)
    resident = (MORE_WARPS if plain else WARPS_PER_SM) // warps
    programs = min(triton.cdiv(len(x), block), resident * num_sms(x.device))
    parts = x.new_empty((programs, 3, width), dtype=wide_type(x))
    norm_gelu_backward[(programs,)](
        *(dy, x, *pointers(x, *given), mean, rstd), *(dz, parts, len(x)),
        **_constants(x, atoms, rows, linear_bias, weight, relu, pad, block),
        num_warps=warps,
    )  # fmt: skip
    sum_partials(parts, sums)


def _constants(
    x: Tensor,
    atoms: Tensor | None,
    rows: Tensor | None,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    relu: bool,
    pad: int,
    block: int,
) -> dict[str, Any]:
    return {
        "C": x.shape[1],
        "C_PAD": pad,
        "BLOCK": block,
        "BOND": atoms is not None,
        "HAS_ROWS": rows is not None,
        "HAS_LINEAR": linear_bias is not None,
        "NORM": weight is not None,
        "RELU": relu,
        "WIDE": accumulator(x),
    }


def _new_statistics(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = 0 if weight is None else x.shape[0]
    return x.new_empty(rows, dtype=wide_type(x)), x.new_empty(rows, dtype=wide_type(x))
