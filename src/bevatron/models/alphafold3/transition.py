"""The transition with a gated unit (AlphaFold3, algorithm 11)."""

from jaxtyping import Float
from torch import Tensor, nn

from bevatron.kernels import transition
from bevatron.models.alphafold3.projection import Projection


class Transition(nn.Module):
    r""":math:`W_d (\operatorname{silu}(W_g n) \odot W_u n)`, n the LayerNorm of x.

    Parameters
    ----------
    width
        Channels.
    factor
        Hidden channels for each.
    """

    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = Projection(width, factor * width, start="relu")
        self.up = Projection(width, factor * width, start="relu")
        self.down = Projection(factor * width, width, start="zeros")

    def forward(self, x: Float[Tensor, "*rows C"]) -> Float[Tensor, "*rows C"]:
        """Return the update, to be added to x."""
        return transition(
            x, self.norm.weight, self.norm.bias, self.up.weight, self.down.weight, self.gate.weight
        )
