"""GATv2: attention whose score depends on row and column jointly."""

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.kernels.graph.graph_attention import graph_attention_v2
from bevatron.models.graph_attention.formula import expression as e
from bevatron.models.graph_attention.formula.expression import A, Expression, H, X
from bevatron.models.graph_attention.graph_layer import Features, dense_features
from bevatron.models.graph_attention.layers.named import LayerOptions, NamedLayer, check_attention
from bevatron.models.graph_attention.matrix import Matrix, of_columns, whole_rows


class GatV2(NamedLayer):
    r"""GATv2 (Brody et al., arXiv 2105.14491, equation 7).

    .. math::

        z_{ih} = \sum_j a_{ij} \operatorname{softmax}_j\big(w_h \cdot \operatorname{LeakyReLU}(
        q_{ih} + x_{jh})\big)\, x_{jh}, \qquad q_{ih} = h_i Q_h, \quad x_{jh} = h_j W_h

    Parameters
    ----------
    inputs, outputs, options
        See `LayerOptions`; ``inner_bias`` adds vectors to q and x, as PyTorch Geometric does.
    slope, attention_dropout : see `bevatron.models.graph_attention.gat`
    share_weights : q = x
    """

    order = "project"

    def __init__(
        self, inputs: int, outputs: int, *, slope: float = 0.2, attention_dropout: float = 0.0,
        share_weights: bool = False, **options: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        check_attention(slope, attention_dropout)
        learned: dict[str, tuple[int, ...]] = {"attention": (outputs,)}
        if not share_weights:
            learned["query"] = (inputs, outputs)
            if options.get("inner_bias"):
                learned["bias_query"] = (outputs,)
        super().__init__(inputs, outputs, learned=learned, **options)
        self.slope, self.attention_dropout = slope, attention_dropout

    def attend(self, matrix: Matrix, features: Features) -> Float[Tensor, "n H out"]:
        """Compute z."""
        x = self.project(features)
        query = self._query(features).to(x.dtype) if "query" in self.learned else x
        p = self.attention_dropout if self.training else 0.0
        key, attention = of_columns(matrix, x), self.learned["attention"].to(x.dtype)
        return graph_attention_v2(whole_rows(matrix), key, query, attention, self.slope, p)

    def _query(self, features: Features) -> Float[Tensor, "n H out"]:
        """Compute q exactly, even under autocast."""
        h = dense_features(features)[:, None]
        with torch.autocast(h.device.type, enabled=False):
            query: Tensor = torch.einsum("nhk,hkj->nhj", h, self.learned["query"].to(h.dtype))
            if "bias_query" in self.learned:
                query = query + self.learned["bias_query"].to(query.dtype)
        return query

    @property
    def psi(self) -> Expression:
        """A * softmax(a . leaky_relu(Q_i + X_j))."""
        query: Expression = H @ e.weight("query", "in", "out") if "query" in self.learned else X
        if "bias_query" in self.learned:
            query = query + e.weight("bias_query", "out")
        joint = e.joint(query, X, e.weight("attention", "out"), self.slope)
        return A * e.dropout(e.softmax(A.pattern * joint), self.attention_dropout)


gatv2 = GatV2
