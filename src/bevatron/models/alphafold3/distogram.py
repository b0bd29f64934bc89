"""The distogram head: classes of the distance of two tokens' representative atoms."""

from jaxtyping import Float
from torch import Tensor, nn

from bevatron.models.common.folding import Linear
from bevatron.parallel.axial import transposed


class DistogramHead(nn.Module):
    """Compute ``W z_ij + b + W z_ji + b`` (AlphaFold3, algorithm 1, line 17)."""

    def __init__(self, pair_width: int, bins: int) -> None:
        super().__init__()
        self.linear = Linear(pair_width, bins, init="final")

    def forward(self, z: Float[Tensor, "*batch R N P"]) -> Float[Tensor, "*batch R N K"]:
        """Compute logits of own rows, symmetric in the two tokens."""
        logits: Tensor = self.linear(z)
        return logits + transposed(logits)
