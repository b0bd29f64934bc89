"""An activation and the linear layer after it, with second derivatives."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.equivariant.channelwise_tensor_product import only_32_and_64_bit
from bevatron.kernels.shared.checks import check_one_type

__all__ = ["silu_linear"]

for _name, _obstacle in (("reference", None), ("triton", only_32_and_64_bit)):
    registry.register(
        "silu_linear",
        _name,
        f"bevatron.kernels.equivariant.silu_linear.{_name}:silu_linear",
        _obstacle,
    )


def silu_linear(x: Float[Tensor, "E H"], weight: Float[Tensor, "_ J"]) -> Float[Tensor, "E J"]:
    r"""Compute :math:`y = \mathrm{silu}(x) W`.

    The hidden layers of a radial network: very many rows, few columns. The activation, of which a
    potential trained on forces needs two derivatives, is computed where it is multiplied and never
    stored.

    Parameters
    ----------
    x
        What enters the activation.
    weight
        W.

    Raises
    ------
    ValueError
        If the shapes do not go together, or the types are not one.

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
    check_one_type("silu_linear", {"x": x, "weight": weight})
    result: Tensor = registry.dispatch("silu_linear", x)(x, weight)
    return result
