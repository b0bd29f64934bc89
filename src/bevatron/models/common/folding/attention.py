"""Gated attention within rows with a shared bias, and the bias from a pair."""

from math import prod

from jaxtyping import Bool, Float
from torch import Tensor, nn

from bevatron.kernels import add_dropped, layer_norm_linear, pair_attention, qkvg
from bevatron.models.common.folding.layer_norm import LayerNorm
from bevatron.models.common.folding.linear import Linear
from bevatron.parallel.axial import Coming, own


class PairBias(nn.Module):
    """The bias of attention by the pair: ``b_hij = W_h LayerNorm(z_ij)``.

    AlphaFold2, algorithm 7, line 3; AlphaFold3, algorithm 24, line 8.
    """

    def __init__(self, width_pair: int, num_heads: int) -> None:
        super().__init__()
        self.norm = LayerNorm(width_pair)
        self.linear = Linear(width_pair, num_heads, bias=False, init="normal")

    def forward(self, z: Float[Tensor, "*batch R N C"]) -> Float[Tensor, "*batch H R N"]:
        """Project own rows of the pair; the result is a view with the heads in front."""
        return layer_norm_linear(z, *self.norm.parts, self.linear.weight).movedim(-1, -3)


class GatedAttention(nn.Module):
    r"""Attend within every row; all rows share a bias.

    .. math::

        o_{shi} = \sigma(g_{shi}) \odot \sum_j \operatorname{softmax}_j\big(
        q_{shi} \cdot k_{shj} / \sqrt{D} + b_{hij}\big) v_{shj}, \qquad
        y_{si} = W_o \operatorname{concat}_h(o_{shi})

    AlphaFold2, algorithms 7, 8, 13 and 14; AlphaFold3, algorithms 14, 15 and 24.

    Parameters
    ----------
    width : channels of x and of the result
    num_heads, head_width : H and D
    norm : whether x is normalised first; if not, x must be normalised rows
    q_bias : whether queries have a bias (AlphaFold3, algorithm 24)
    bias : whether the gate and the last layer have one (AlphaFold2)
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_width: int,
        *,
        norm: bool = True,
        q_bias: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        inner = num_heads * head_width
        self.num_heads, self.head_width = num_heads, head_width
        self.norm = LayerNorm(width) if norm else None
        self.q = Linear(width, inner, bias=q_bias, init="glorot")
        self.k = Linear(width, inner, bias=False, init="glorot")
        self.v = Linear(width, inner, bias=False, init="glorot")
        self.gate = Linear(width, inner, bias=bias, init="gating")
        self.out = Linear(inner, width, bias=bias, init="final")

    def forward(
        self,
        x: Float[Tensor, "*batch S N C"],
        bias: Float[Tensor, "*batch H _ N"] | Coming | None = None,
        mask: Bool[Tensor, "*batch S N"] | None = None,
    ) -> Float[Tensor, "*batch S _ C"]:
        """Compute the update of the rows.

        Parameters
        ----------
        x : rows, in any strides
        bias
            Added to the logits of every row; own rows of it give the update of own queries alone.
            If it is pending, it is awaited after the rows are projected.
        mask : true for keys that exist; a row without any gets the last layer's bias
        """
        N = x.shape[-2]
        q, k, v, gate = self._project(x)
        bias = bias.wait() if isinstance(bias, Coming) else bias
        if bias is not None and bias.shape[-2] < N:
            q, gate = own(q, 2), own(gate, 2)
        attended = self._attend(q, k, v, gate, bias, mask)
        update: Tensor = self.out(attended.reshape(*x.shape[:-2], *attended.shape[-2:]))
        return update

    def updated(
        self,
        x: Float[Tensor, "*batch N N C"],
        bias_weight: Float[Tensor, "H C"],
        mask: Bool[Tensor, "*batch N N"] | None = None,
        drop: Float[Tensor, "*batch N C"] | None = None,
    ) -> Float[Tensor, "*batch N N C"]:
        """Return the rows of a pair with their update, biased by the pair itself.

        The result is laid out as ``x``, which may be a transposed pair. ``bias_weight`` projects
        the normalised pair to the bias; ``drop`` is a dropout mask that rows share.
        """
        q, k, v, gate, bias, rows = self._project(x, bias_weight)
        attended = self._attend(q, k, v, gate, bias.movedim(-1, -3), mask)
        drop = None if drop is None else drop.reshape(rows.shape[0], *drop.shape[-2:])
        layer = self.out.weight, self.out.bias
        return add_dropped(rows, attended, drop, "rows", *layer).reshape(x.shape)

    def _project(self, x: Tensor, bias_weight: Tensor | None = None) -> tuple[Tensor, ...]:
        return qkvg(
            x if x.ndim == 4 else x.reshape(prod(x.shape[:-3]), *x.shape[-3:]),
            self.q.weight,
            self.k.weight,
            self.v.weight,
            self.gate.weight,
            gate_bias=self.gate.bias,
            q_bias=self.q.bias,
            norm=None if self.norm is None else self.norm.parts,
            bias_weight=bias_weight,
            head_width=self.head_width,
        )

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Return the rows in front of the last layer, [B, S, N, H D]."""
        B, S, N = k.shape[:3]
        attended = pair_attention(
            q,
            k,
            v,
            bias=None if bias is None else bias.reshape(B, 1, *bias.shape[-3:]),
            mask=None if mask is None else mask.reshape(B, S, N),
            gate=gate,
            layout="BSNHD",
        )
        return attended.flatten(-2)
