"""Update of the pair from an alignment."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bevatron.models.common.folding.layer_norm import LayerNorm
from bevatron.models.common.folding.linear import Linear
from bevatron.parallel.axial import outer_product_mean


class OuterProductMean(nn.Module):
    """Average the outer products of two projections of an alignment over its rows.

    ``y_ij = (W_o flatten(sum_s a_si x b_sj) + b_o) / (1e-3 + sum_s m_si m_sj)``. AlphaFold2,
    algorithm 10; AlphaFold3, algorithm 9. As in the published code the division comes after the
    last layer and its bias.

    Parameters
    ----------
    width_msa, hidden, width_pair : channels of the alignment, of a and b, and of the pair
    bias : whether a and b have biases (AlphaFold2); the last layer always has one
    """

    def __init__(self, width_msa: int, hidden: int, width_pair: int, *, bias: bool = False) -> None:
        super().__init__()
        self.norm = LayerNorm(width_msa)
        self.a = Linear(width_msa, hidden, bias=bias)
        self.b = Linear(width_msa, hidden, bias=bias)
        self.out = Linear(hidden * hidden, width_pair, init="final")

    def forward(
        self, m: Float[Tensor, "*batch R N C"], mask: Bool[Tensor, "*batch S N"] | None = None
    ) -> Float[Tensor, "*batch _ N Z"]:
        """Compute the update of the pair's own rows from the entries that the mask keeps.

        m holds own rows of the alignment, the mask covers all of it; None = everything, on one
        process.
        """
        if mask is None:
            mask = torch.ones(m.shape[:-1], dtype=torch.bool, device=m.device)
        return outer_product_mean(m, mask, *self._weights)

    def of_columns(
        self, columns: Float[Tensor, "*batch K S C"], mask: Bool[Tensor, "*batch S N"]
    ) -> Float[Tensor, "*batch K N Z"]:
        """Compute the same from own columns of the alignment, laid out as rows."""
        return outer_product_mean(columns, mask, *self._weights, by_columns=True)

    @property
    def _weights(self) -> tuple[Any, ...]:
        layers = (self.a, self.b, self.out)
        weights, biases = ([getattr(x, name) for x in layers] for name in ("weight", "bias"))
        return (*self.norm.both, *weights, *biases)
