"""Updates of a pair by triangles of its edges: multiplication and attention."""

from jaxtyping import Bool, Float
from torch import Tensor, nn

from bevatron.kernels import layer_norm_linear
from bevatron.models.common.folding.attention import GatedAttention
from bevatron.models.common.folding.dropout import add_dropped
from bevatron.models.common.folding.layer_norm import LayerNorm
from bevatron.models.common.folding.linear import Linear
from bevatron.parallel.axial import (
    Coming,
    gathered,
    own,
    sample_group,
    transposed,
    triangle_multiply,
    turned,
)


class TriangleMultiplication(nn.Module):
    """Add to every edge the products of the other two edges of its triangles.

    ``y_ij = sigmoid(W_g n_ij) * W_o LayerNorm(sum_k a_ik b_jk)``, incoming ``sum_k a_ki b_kj``,
    with ``a = mask sigmoid(W_ag n) W_a n`` of the normalised pair n, likewise b. AlphaFold2,
    algorithms 11 and 12; AlphaFold3, algorithms 12 and 13.

    Parameters
    ----------
    width, hidden : channels of the pair and of a and b
    outgoing : whether outgoing edges are multiplied, or incoming ones
    bias : whether the linear layers have biases (AlphaFold2)
    """

    def __init__(self, width: int, hidden: int, *, outgoing: bool, bias: bool = False) -> None:
        super().__init__()
        self.outgoing = outgoing
        self.norm_in = LayerNorm(width)
        self.a = Linear(width, hidden, bias=bias)
        self.a_gate = Linear(width, hidden, bias=bias, init="gating")
        self.b = Linear(width, hidden, bias=bias)
        self.b_gate = Linear(width, hidden, bias=bias, init="gating")
        self.norm_out = LayerNorm(hidden)
        self.out = Linear(hidden, width, bias=bias, init="final")
        self.out_gate = Linear(width, width, bias=bias, init="gating")

    def forward(
        self,
        z: Float[Tensor, "*batch R N C"],
        mask: Bool[Tensor, "*batch N N"] | None = None,
        drop: Float[Tensor, "*batch N C"] | None = None,
    ) -> Float[Tensor, "*batch R N C"]:
        """Update own rows; edges outside the mask update no other, ``drop`` is a dropout mask."""
        return triangle_multiply(
            z,
            mask,
            *self.norm_in.both,
            a_weight=self.a.weight,
            a_gate_weight=self.a_gate.weight,
            b_weight=self.b.weight,
            b_gate_weight=self.b_gate.weight,
            norm_out_weight=self.norm_out.weight,
            norm_out_bias=self.norm_out.both[1],
            out_weight=self.out.weight,
            out_gate_weight=self.out_gate.weight,
            a_bias=self.a.bias,
            a_gate_bias=self.a_gate.bias,
            b_bias=self.b.bias,
            b_gate_bias=self.b_gate.bias,
            out_bias=self.out.bias,
            out_gate_bias=self.out_gate.bias,
            outgoing=self.outgoing,
            drop=drop,
            residual=True,
        )


class TriangleAttention(nn.Module):
    """Add to every edge what it attends to of those from the same node, biased by the third edge.

    ``softmax_k(q_ij . k_ik / sqrt(D) + b_jk)`` with ``b = W_b LayerNorm(z)``: AlphaFold2,
    algorithm 13; AlphaFold3, algorithm 14. Around the ending node (14; 15) it is the same on the
    transposed pair.

    Parameters
    ----------
    width : channels of the pair
    num_heads, head_width : H and D
    starting : whether edges share the node where they start, or where they end
    bias : whether the gate and the last layer have biases (AlphaFold2)
    """

    def __init__(
        self, width: int, num_heads: int, head_width: int, *, starting: bool, bias: bool = False
    ) -> None:
        super().__init__()
        self.starting = starting
        self.attention = GatedAttention(width, num_heads, head_width, bias=bias)
        self.bias = Linear(width, num_heads, bias=False, init="normal")

    def forward(
        self,
        z: Float[Tensor, "*batch R N C"],
        mask: Bool[Tensor, "*batch N N"] | None = None,
        drop: Float[Tensor, "*batch N C"] | None = None,
    ) -> Float[Tensor, "*batch R N C"]:
        """Update own rows; masked edges are not attended to.

        ``drop`` is a dropout mask that rows share, around the ending node columns.
        """
        if sample_group().size == 1:
            attend, weight = self.attention.updated, self.bias.weight
            if self.starting:
                return attend(z, weight, mask, drop)
            # In place: its rows are read and written where they lie.
            turned_mask = None if mask is None else mask.mT
            return attend(z.transpose(-3, -2), weight, turned_mask, drop).transpose(-3, -2)
        if not self.starting:
            update = transposed(self._of_columns(z, mask)[1])
            return add_dropped(z, update, drop, "columns")
        update = self._attend(z, gathered(self._bias(z), -2, z.shape[-2]), mask)
        return add_dropped(z, update, drop)

    def by_columns(
        self,
        z: Float[Tensor, "*batch R N C"],
        mask: Bool[Tensor, "*batch N N"] | None = None,
        drop: Float[Tensor, "*batch N C"] | None = None,
    ) -> Float[Tensor, "*batch K N C"]:
        """Return own columns, updated around the ending node, laid out as rows."""
        return add_dropped(*self._of_columns(z, mask), drop)

    def _of_columns(self, z: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return own columns, laid out as rows, and their update."""
        coming = turned(z, group=sample_group().urgent)  # only the bias is computed meanwhile
        bias = gathered(self._bias(z).mT, -1, z.shape[-2])
        # Copied once here instead of by every operator that reads it.
        columns = coming.wait().contiguous()
        return columns, self._attend(columns, bias, None if mask is None else mask.mT)

    def _bias(self, z: Tensor) -> Tensor:
        norm = self.attention.norm
        assert norm is not None
        return layer_norm_linear(z, *norm.parts, self.bias.weight).movedim(-1, -3)

    def _attend(self, z: Tensor, bias: Coming, mask: Tensor | None) -> Tensor:
        update: Tensor = self.attention(z, bias, None if mask is None else own(mask, -2))
        return update
