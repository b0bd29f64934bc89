"""SiLU followed by a linear layer, with second derivatives."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_alike

__all__ = ["silu_linear"]

_operator = registry.operator("silu_linear", __name__, takes=support.float32_or_float64)


def silu_linear(x: Float[Tensor, "E H"], weight: Float[Tensor, "_ J"]) -> Float[Tensor, "E J"]:
    r"""Compute :math:`y = \mathrm{silu}(x) W`.

    The hidden layers of a radial network: very many rows, few columns. A potential trained on
    forces needs two derivatives of the activation, which every matmul recomputes and nothing
    stores. Raises ValueError if the shapes do not match, or the types differ.

    Parameters
    ----------
    x : input of the activation
    weight : W

    Examples
    --------
    >>> import torch
    >>> silu_linear(torch.tensor([[0.0, 1.0]]), torch.ones(2, 1))
    tensor([[0.7311]])
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[0]:
        raise ValueError(
            f"silu_linear: {tuple(x.shape)} do not go with a weight {tuple(weight.shape)}"
        )
    check_alike("silu_linear", {"x": x, "weight": weight})
    result: Tensor = _operator.dispatch(x)(x, weight)
    return result
