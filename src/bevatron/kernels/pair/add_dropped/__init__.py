"""A residual update with dropout whose mask is shared by rows or by columns."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import as_one_type, check_axes, check_shapes

__all__ = ["Shared", "add_dropped"]

Shared = Literal["rows", "columns"]
"""Axis along which a mask is shared: rows (``DropoutRowwise`` of the supplements) or columns."""

_operator = registry.operator("add_dropped", __name__, takes=support.up_to_float32)


def add_dropped(
    x: Float[Tensor, "*batch R N C"],
    update: Float[Tensor, "*batch R N H"],
    mask: Float[Tensor, "*batch _ C"] | None = None,
    shared: Shared = "rows",
    weight: Float[Tensor, "C H"] | None = None,
    bias: Float[Tensor, "C"] | None = None,
) -> Float[Tensor, "*batch R N C"]:
    r"""Add a layer's update, with channels dropped by a mask.

    .. math:: y_{rn} = x_{rn} + m_n \odot u_{rn} \text{ or } x_{rn} + m_n \odot (W u_{rn} + b)

    AlphaFold2's supplement, section 1.11.6. The mask is drawn beforehand and not
    differentiated. Raises ValueError if shapes or types do not fit; KernelError if Triton is
    requested and cannot run. The kernel has first derivatives.

    Parameters
    ----------
    x, update
        A residual stream and a layer's update of it, of one type; the update may be a transposed
        view, such as that of attention around the ending node. With a weight [..., H].
    mask
        0 or ``1 / (1 - rate)``: [..., N, C], or [..., R, C] if columns share it. None: no dropout.
    shared : see `Shared`
    weight, bias : [C, H] and [C], of a linear layer of the update, the last of an attention

    Returns
    -------
    Tensor
        Same type as ``x``; contiguous, with a weight laid out as ``x``. Saved for the backward
        pass: the mask, with a weight the update and the weight too.

    Examples
    --------
    >>> import torch
    >>> ones = torch.ones(1, 2, 1)
    >>> add_dropped(ones, ones, torch.tensor([[0.0], [2.0]])).flatten()
    tensor([1., 3.])
    """
    try:
        *batch, R, N, C = x.shape
        H = C if weight is None else weight.shape[1]
    except (IndexError, ValueError):
        check_axes("add_dropped", "[..., R, N, C]", x=x)
        check_axes("add_dropped", "[C, H]", weight=weight)
        raise
    wanted = {
        "update": (update, (*batch, R, N, H)),
        "weight": (weight, (C, H)),
        "bias": (bias, (C,)),
        "mask": (mask, (*batch, R if shared == "columns" else N, C)),
    }
    check_shapes("add_dropped", wanted, x=x)
    rows, mask = as_one_type("add_dropped", x=x, update=update, mask=mask)
    run = _operator.dispatch(x)
    result: Tensor = run(x, rows, mask, weight, bias, shared == "columns")
    return result
