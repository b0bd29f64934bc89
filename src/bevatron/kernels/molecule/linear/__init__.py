"""A linear layer whose weight gradients are float32."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.molecule.linear.rounding import rounded_together

__all__ = ["linear", "linear_with_input", "rounded_together"]

_operator = registry.operator("linear", __name__)


def linear(
    x: Float[Tensor, "*rows K"],
    weight: Float[Tensor, "O K"],
    bias: Float[Tensor, " O"] | None = None,
) -> Float[Tensor, "*rows O"]:
    r"""Compute :math:`y = x W^\top + b`, in autocast's type under autocast.

    This is `torch.nn.functional.linear` for many rows. The forward matmul is cuBLAS. In the
    backward pass the matmul returns the weight gradient in float32, without a copy, and one
    kernel that reads every row once sums the bias gradient; torch takes several times as long for
    16-bit rows. Raises ValueError if a shape does not match.

    Parameters
    ----------
    x : [..., K]
    weight, bias : rounded to the type of the matmul: that of ``x``, or autocast's

    Returns
    -------
    Tensor
        [..., O].

    Examples
    --------
    >>> import torch
    >>> linear(torch.ones(1, 2), torch.tensor([[1.0, 2.0]]), torch.tensor([0.5]))
    tensor([[3.5000]])
    """
    _check(x, weight)
    y: Tensor = _operator.dispatch(x)(x, weight, bias)[0]
    return y


def linear_with_input(
    x: Float[Tensor, "*rows K"],
    weight: Float[Tensor, "O K"],
    bias: Float[Tensor, " O"] | None = None,
) -> tuple[Float[Tensor, "*rows O"], Float[Tensor, "*rows K"]]:
    """Compute `linear` and return its input for one other consumer.

    The gradient of the second result is accumulated by the matmul that computes the gradient of x;
    autograd would need a separate pass. Raises ValueError if a shape does not match.

    Parameters
    ----------
    x, weight, bias : see `linear`

    Returns
    -------
    y, and x for one other consumer.

    Examples
    --------
    >>> import torch
    >>> y, x = linear_with_input(torch.ones(1, 2), torch.tensor([[1.0, 2.0]]))
    >>> y + x
    tensor([[4., 4.]])
    """
    _check(x, weight)
    found: tuple[Tensor, Tensor] = _operator.dispatch(x)(x, weight, bias)
    return found


def _check(x: Tensor, weight: Tensor) -> None:
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: x {tuple(x.shape)} and weight {tuple(weight.shape)}, "
            "expected [..., K], [O, K]"
        )
