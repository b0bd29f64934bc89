"""A linear layer with the initialisations of AlphaFold's supplement."""

from math import sqrt
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from bevatron.kernels import linear

Init = Literal["lecun", "he", "glorot", "gating", "final", "normal"]
"""Initialisation of a layer: AlphaFold2's supplement, section 1.11.4.

``lecun`` and ``he`` are truncated normal with variance 1 and 2 over the number of inputs, ``he`` in
front of a ReLU; ``glorot`` is uniform, for queries, keys and values; ``gating`` has weights 0 and
biases 1, so that a gate starts almost open; ``final`` is zero, so that a residual update starts at
zero; ``normal`` is not truncated.
"""

TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a standard normal truncated at -2 and 2."""


class Linear(nn.Linear):
    """Compute ``y = W x + b`` in the type of x.

    Parameters
    ----------
    width_in, width_out : channels
    bias : whether there is a b; it starts at 0, that of a gate at 1
    init : see `Init`
    """

    def __init__(
        self, width_in: int, width_out: int, *, bias: bool = True, init: Init = "lecun"
    ) -> None:
        self.init: Init = init
        super().__init__(width_in, width_out, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weights again."""
        if self.bias is not None:
            nn.init.constant_(self.bias, 1.0 if self.init == "gating" else 0.0)
        std = sqrt((2.0 if self.init == "he" else 1.0) / max(self.in_features, 1))
        if self.init in {"gating", "final"}:
            nn.init.zeros_(self.weight)
        elif self.init == "glorot":
            nn.init.xavier_uniform_(self.weight)
        elif self.init == "normal":
            nn.init.normal_(self.weight, std=std)
        else:
            std /= TRUNCATED_STD
            nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)

    def forward(self, x: Float[Tensor, "*rows C"]) -> Float[Tensor, "*rows K"]:
        """Map rows; weights of another type are rounded to that of ``x``."""
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the sizes and the initialisation."""
        return f"{super().extra_repr()}, init={self.init}"
