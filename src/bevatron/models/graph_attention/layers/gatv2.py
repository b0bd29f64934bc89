"""GATv2: attention whose score looks at row and column jointly."""

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.kernels.graph.graph_attention import graph_attention_v2
from bevatron.models.graph_attention.formula.expression import (
    A,
    Expression,
    H,
    X,
    dropout,
    joint,
    softmax,
    weight,
)
from bevatron.models.graph_attention.graph_layer import (
    Activation,
    Combine,
    Features,
    Matrix,
    dense_features,
    not_partitioned,
)
from bevatron.models.graph_attention.layers.named import NamedLayer, check_attention


class GatV2(NamedLayer):
    r"""GATv2 (Brody et al., arXiv 2105.14491, equation 7).

    .. math::

        z_{ih} = \sum_j a_{ij} \operatorname{softmax}_j\big(w_h \cdot \operatorname{LeakyReLU}(
        q_{ih} + x_{jh})\big)\, x_{jh}, \qquad q_{ih} = h_i Q_h, \quad x_{jh} = h_j W_h

    Parameters
    ----------
    inner_bias
        Learned vectors in q and x, as PyTorch Geometric has them.
    share_weights
        q = x.
    inputs, outputs, heads, combine, slope, attention_dropout, bias, activation
        See `bevatron.models.graph_attention.gat`.

    Raises
    ------
    ConfigError
        If a number is out of its range.
    """

    order = "project"

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        heads: int = 1,
        combine: Combine = "concat",
        slope: float = 0.2,
        attention_dropout: float = 0.0,
        bias: bool = True,
        inner_bias: bool = False,
        share_weights: bool = False,
        activation: Activation | None = None,
    ) -> None:
        check_attention(slope, attention_dropout)
        learned: dict[str, tuple[int, ...]] = {"attention": (heads, outputs)}
        if not share_weights:
            learned["query"] = (heads, inputs, outputs)
            if inner_bias:
                learned["bias_query"] = (heads, outputs)
        super().__init__(
            *(inputs, outputs),
            learned=learned,
            heads=heads,
            combine=combine,
            bias=bias,
            inner_bias=inner_bias,
            activation=activation,
        )
        self.slope, self.attention_dropout = slope, attention_dropout

    def attend(self, csr: Matrix, features: Features) -> Float[Tensor, "n H out"]:
        """Compute z."""
        csr = not_partitioned(csr, "GATv2")
        x = self.project(features)
        query = self._query(features).to(x.dtype) if "query" in self.learned else x
        p = self.attention_dropout if self.training else 0.0
        attention = self.learned["attention"].to(x.dtype)
        return graph_attention_v2(csr, x, query, attention, self.slope, p)

    def _query(self, features: Features) -> Float[Tensor, "n H out"]:
        """Compute q, exactly also under autocast."""
        h = dense_features(features)[:, None]
        with torch.autocast(h.device.type, enabled=False):
            query: Tensor = torch.einsum("nhk,hkj->nhj", h, self.learned["query"].to(h.dtype))
            if "bias_query" in self.learned:
                query = query + self.learned["bias_query"].to(query.dtype)
        return query

    @property
    def psi(self) -> Expression:
        """A * softmax(a . leaky_relu(Q_i + X_j))."""
        query: Expression = X
        if "query" in self.learned:
            query = H @ weight("query", "in", "out")
        if "bias_query" in self.learned:
            query = query + weight("bias_query", "out")
        scores = joint(query, X, weight("attention", "out"), self.slope)
        return A * dropout(softmax(A.pattern * scores), self.attention_dropout)


gatv2 = GatV2
