"""Linear layers that compute in the type of their rows, with AlphaFold3's initial weights."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Start = Literal["default", "relu", "zeros"]
"""Initial weights: a normal distribution cut at two deviations, of variance 1 / inputs or (in front
of a ReLU) 2 / inputs; or zero."""

DEVIATION_OF_CUT_NORMAL = 0.87962566103423978
"""Standard deviation of a standard normal distribution cut at -2 and 2."""


class Projection(nn.Linear):
    """A linear layer; weights are rounded to the type of the rows.

    Parameters
    ----------
    width_in, width_out
        Channels.
    bias
        Whether there is one.
    start
        Initial weights.
    start_bias
        Initial bias.
    """

    def __init__(
        self,
        width_in: int,
        width_out: int,
        *,
        bias: bool = False,
        start: Start = "default",
        start_bias: float = 0.0,
    ) -> None:
        super().__init__(width_in, width_out, bias=bias)
        with torch.no_grad():
            if start == "zeros":
                self.weight.zero_()
            else:
                variance = (2.0 if start == "relu" else 1.0) / width_in
                nn.init.trunc_normal_(self.weight, a=-2.0, b=2.0)
                self.weight.mul_(variance**0.5 / DEVIATION_OF_CUT_NORMAL)
            if self.bias is not None:
                self.bias.fill_(start_bias)

    def forward(self, x: Float[Tensor, "*rows C"]) -> Float[Tensor, "*rows K"]:
        """Map rows."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def joined(x: Float[Tensor, "*rows C"], *layers: Projection) -> Float[Tensor, "*rows _"]:
    """Apply several layers to the same rows in one matmul; results are side by side."""
    weight = torch.cat([layer.weight for layer in layers])
    y: Tensor = F.linear(x, weight.to(x.dtype), joined_bias(x, *layers))
    return y


def joined_bias(x: Tensor, *layers: Projection) -> Tensor | None:
    """Concatenate the layers' biases, zeros where one has none; None if none has."""
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat(
        [
            x.new_zeros(layer.out_features) if layer.bias is None else layer.bias.to(x.dtype)
            for layer in layers
        ]
    )
