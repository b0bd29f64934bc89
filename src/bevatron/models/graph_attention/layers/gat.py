"""GAT: attention by the sum of a score of the row and one of the column."""

from typing import Unpack

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from bevatron.models.graph_attention.formula import expression as e
from bevatron.models.graph_attention.formula.expression import A, Expression, X
from bevatron.models.graph_attention.graph_layer import Features, scores
from bevatron.models.graph_attention.layers.named import LayerOptions, NamedLayer, check_attention
from bevatron.models.graph_attention.matrix import Matrix, graph_attention


class Gat(NamedLayer):
    r"""Graph attention (Velickovic et al., arXiv 1710.10903, equations 1-6).

    .. math::

        z_{ih} = \sum_j a_{ij} \operatorname{softmax}_j\big(\operatorname{LeakyReLU}(
        x_{ih} \cdot r_h + x_{jh} \cdot c_h)\big)\, x_{jh}, \qquad x_{ih} = h_i W_h

    Parameters
    ----------
    inputs, outputs, options : see `LayerOptions`; ``outputs`` of one head
    slope : negative slope of the leaky ReLU, 0 to 1
    attention_dropout : probability that an edge is left out of a head's sum while training
    value_dropout
        Probability that an element of X is dropped from the sums while training, though not from
        the scores, as in the authors' code.
    """

    order = "project"

    def __init__(
        self, inputs: int, outputs: int, *, slope: float = 0.2, attention_dropout: float = 0.0,
        value_dropout: float = 0.0, **options: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        check_attention(slope, attention_dropout)
        learned = {"row": (outputs,), "column": (outputs,)}
        super().__init__(inputs, outputs, learned=learned, **options)
        self.slope, self.attention_dropout = slope, attention_dropout
        self.value_dropout = value_dropout

    def attend(self, matrix: Matrix, features: Features) -> Float[Tensor, "n H out"]:
        """Compute z."""
        x = self.project(features)
        value = F.dropout(x, self.value_dropout, self.training)
        row, column = scores(x, self.learned["row"]), scores(x, self.learned["column"])
        p = self.attention_dropout if self.training else 0.0
        return graph_attention(matrix, value, row, column, self.slope, p)

    @property
    def psi(self) -> Expression:
        """A * softmax(leaky_relu(u 1^T + 1 v^T)), u = X r, v = X c."""
        row, column = X @ e.weight("row", "out"), X @ e.weight("column", "out")
        additive = e.leaky_relu(e.replicate(row) + e.replicate(column).T, self.slope)
        return A * e.dropout(e.softmax(A.pattern * additive), self.attention_dropout)


gat = Gat
