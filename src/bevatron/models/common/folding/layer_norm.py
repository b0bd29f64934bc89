"""LayerNorm as a module over the fused operator."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bevatron.kernels import layer_norm


class LayerNorm(nn.Module):
    """Normalise every row, then scale and shift it: ``w (x - mean) / sqrt(var + 1e-5) + b``.

    Parameters
    ----------
    width : channels of a row
    bias : whether there is a b
    """

    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    @property
    def parts(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias, in the form of the fused operators."""
        return self.weight, self.bias

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """The weight and the bias of a norm that has one."""
        assert self.bias is not None
        return self.weight, self.bias

    def forward(self, x: Float[Tensor, "*rows C"]) -> Float[Tensor, "*rows C"]:
        """Normalise rows; the result has the type of ``x``."""
        return layer_norm(x, self.weight, self.bias)
