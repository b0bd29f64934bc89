"""GAT: attention by the sum of a score of the row and one of the column."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from bevatron.kernels.graph.graph_attention import graph_attention
from bevatron.models.graph_attention.formula.expression import (
    A,
    Expression,
    X,
    dropout,
    leaky_relu,
    replicate,
    softmax,
    weight,
)
from bevatron.models.graph_attention.graph_layer import (
    Activation,
    Combine,
    Features,
    Matrix,
    scores,
)
from bevatron.models.graph_attention.layers.named import NamedLayer, check_attention
from bevatron.parallel.graph_partition import DistributedGraph


class Gat(NamedLayer):
    r"""Graph attention (Velickovic et al., arXiv 1710.10903, equations 1-6).

    .. math::

        z_{ih} = \sum_j a_{ij} \operatorname{softmax}_j\big(\operatorname{LeakyReLU}(
        x_{ih} \cdot r_h + x_{jh} \cdot c_h)\big)\, x_{jh}, \qquad x_{ih} = h_i W_h

    Parameters
    ----------
    inputs, outputs
        Widths; ``outputs`` of one head.
    heads, combine
        Heads concatenated or averaged.
    slope
        Of the leaky ReLU, 0 to 1.
    attention_dropout
        Probability that an edge is left out of a head's sum while training.
    value_dropout
        Probability that an element of X is dropped from the sums while training, though not from
        the scores, as in the authors' code.
    input_dropout
        Probability that an element of H is dropped while training, drawn for each head separately,
        likewise.
    own_glorot
        Initialise each head as a layer of its own, likewise.
    bias, activation
        See `bevatron.models.graph_attention.Layer`.

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
        value_dropout: float = 0.0,
        input_dropout: float = 0.0,
        own_glorot: bool = False,
        bias: bool = True,
        activation: Activation | None = None,
    ) -> None:
        check_attention(slope, attention_dropout)
        super().__init__(
            *(inputs, outputs),
            learned={"row": (heads, outputs), "column": (heads, outputs)},
            heads=heads,
            combine=combine,
            bias=bias,
            activation=activation,
            input_dropout=input_dropout,
            own_glorot=own_glorot,
        )
        self.slope, self.attention_dropout = slope, attention_dropout
        self.value_dropout = value_dropout

    def attend(self, csr: Matrix, features: Features) -> Float[Tensor, "n H out"]:
        """Compute z."""
        x = self.project(features)
        value = F.dropout(x, self.value_dropout, self.training)
        row, column = scores(x, self.learned["row"]), scores(x, self.learned["column"])
        p = self.attention_dropout if self.training else 0.0
        if isinstance(csr, DistributedGraph):
            return csr.graph_attention(value, row, column, self.slope, p)
        return graph_attention(csr, value, row, column, self.slope, p)

    @property
    def psi(self) -> Expression:
        """A * softmax(leaky_relu(u 1^T + 1 v^T)), u = X r, v = X c."""
        row, column = X @ weight("row", "out"), X @ weight("column", "out")
        additive = leaky_relu(replicate(row) + replicate(column).T, self.slope)
        return A * dropout(softmax(A.pattern * additive), self.attention_dropout)


gat = Gat
