"""The two-layer MLP of every row, with SwiGLU or ReLU."""

from jaxtyping import Float
from torch import Tensor, nn

from bevatron.kernels import transition
from bevatron.models.common.folding.layer_norm import LayerNorm
from bevatron.models.common.folding.linear import Linear


class Transition(nn.Module):
    """Add to every row an MLP of its LayerNorm.

    ``W_d (silu(W_g n) * W_u n)`` without biases: AlphaFold3, algorithm 11; without a gate
    ``W_d relu(W_u n + b_u) + b_d``: AlphaFold2, algorithms 9 and 15.

    Parameters
    ----------
    width : channels
    factor : hidden channels over channels
    gated : whether it is AlphaFold3's
    """

    def __init__(self, width: int, factor: int = 4, *, gated: bool = True) -> None:
        super().__init__()
        hidden = factor * width
        self.norm = LayerNorm(width)
        self.gate = Linear(width, hidden, bias=False) if gated else None
        self.up = Linear(width, hidden, bias=not gated, init="lecun" if gated else "he")
        self.down = Linear(hidden, width, bias=not gated, init="final")

    def forward(self, x: Float[Tensor, "*rows C"]) -> Float[Tensor, "*rows C"]:
        """Update the rows."""
        return transition(
            x,
            *self.norm.parts,
            self.up.weight,
            self.down.weight,
            None if self.gate is None else self.gate.weight,
            self.up.bias,
            self.down.bias,
            residual=True,
        )
