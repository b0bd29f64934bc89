"""A linear layer whose weights' gradients are summed in float32."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.molecule.linear.rounding import rounded_together

__all__ = ["linear", "linear_beside", "rounded_together"]

_operator = registry.operator("linear", __name__)


def linear(
    x: Float[Tensor, "M K"],
    weight: Float[Tensor, "O K"],
    bias: Float[Tensor, " O"] | None = None,
) -> Float[Tensor, "M O"]:
    r"""Compute :math:`y = x W^\top + b`; products are in the type of torch's autocast, if it is on.

    It is `torch.nn.functional.linear` for many rows. The forward product is the library's; in the
    backward pass the weight's gradient leaves the product in float32, without a copy, and the
    bias's is summed by one kernel that reads every row once, where torch takes several times as
    long for 16-bit rows.

    Parameters
    ----------
    x
        Rows.
    weight, bias
        Of the type of ``x``; under autocast of any type, rounded to that of the products.

    Returns
    -------
    Tensor
        [M, O].

    Raises
    ------
    ValueError
        If a shape does not fit.

    Examples
    --------
    >>> import torch
    >>> linear(torch.ones(1, 2), torch.tensor([[1.0, 2.0]]), torch.tensor([0.5]))
    tensor([[3.5000]])
    """
    _check(x, weight)
    y: Tensor = _operator.dispatch(x)(x, weight, bias)[0]
    return y


def linear_beside(
    x: Float[Tensor, "M K"],
    weight: Float[Tensor, "O K"],
    bias: Float[Tensor, " O"] | None = None,
) -> tuple[Float[Tensor, "M O"], Float[Tensor, "M K"]]:
    """Compute `linear`, and hand x on to what else reads it.

    What flows back through the second result is added within the product that gives the gradient
    of x, where autograd would add the two in a pass of its own.

    Parameters
    ----------
    x, weight, bias
        As of `linear`.

    Returns
    -------
    y, and x for one other reader.

    Raises
    ------
    ValueError
        If a shape does not fit.

    Examples
    --------
    >>> import torch
    >>> y, x = linear_beside(torch.ones(1, 2), torch.tensor([[1.0, 2.0]]))
    >>> y + x
    tensor([[4., 4.]])
    """
    _check(x, weight)
    found: tuple[Tensor, Tensor] = _operator.dispatch(x)(x, weight, bias)
    return found


def _check(x: Tensor, weight: Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear: x {tuple(x.shape)} and weight {tuple(weight.shape)}, expected [M, K], [O, K]"
        )
