"""Known layers as formulas: GAT, GATv2, AGNN, VA, GCN, SGC and GIN, all of them a `Layer`.

Edge values, where a graph has them, multiply the attention after the softmax. Whether vertices
attend to themselves is a matter of the graph: GAT, AGNN, GCN and SGC expect self loops.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bevatron.kernels.graph.csr import Csr
from bevatron.models.graph_attention.formula.expression import (
    A,
    Expression,
    H,
    X,
    dropout,
    inverse,
    joint,
    leaky_relu,
    norm,
    normalize,
    outer,
    replicate,
    row_sum,
    scalar,
    softmax,
    sqrt,
    weight,
)
from bevatron.models.graph_attention.formula.layer import Activation, Layer, dense_features

Combine = Literal["concat", "mean"]


def gat(
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
) -> Layer:
    """Graph attention: softmax(leaky_relu(u 1^T + 1 v^T)), u = X a_row, v = X a_column.

    Velickovic et al., arXiv 1710.10903, equations 1-6.

    Parameters
    ----------
    inputs, outputs
        Widths; ``outputs`` of one head.
    heads, combine
        Heads side by side or averaged.
    slope
        Of the leaky ReLU.
    attention_dropout
        Probability that an edge is left out of a head's sum while training.
    value_dropout
        Probability that a number of X is left out of the sums while training, though not of the
        scores, as in the authors' program.
    input_dropout
        Probability that a number of H is left out while training, for each head anew, likewise.
    own_glorot
        Begin each head's weights as those of a layer by itself, likewise.
    bias, activation
        See `Layer`.
    """
    scores = leaky_relu(
        replicate(X @ weight("row", "out")) + replicate(X @ weight("column", "out")).T, slope
    )
    psi = A * dropout(softmax(A.pattern * scores), attention_dropout)
    return Layer(
        inputs, outputs, psi=psi, heads=heads, combine=combine, bias=bias, activation=activation,
        order="project", value_dropout=value_dropout, input_dropout=input_dropout,
        own_glorot=own_glorot,
    )  # fmt: skip


def gatv2(
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
) -> Layer:
    """GATv2, whose scores look at row and column jointly: a . leaky_relu(Q_i + X_j).

    Brody et al., arXiv 2105.14491, equation 7.

    Parameters
    ----------
    inner_bias
        Learned vectors in Q and X, as PyTorch Geometric has them.
    share_weights
        Q = X.
    inputs, outputs, heads, combine, slope, attention_dropout, bias, activation
        See `gat`.
    """
    query: Expression = X
    if not share_weights:
        query = H @ weight("query", "in", "out")
        if inner_bias:
            query = query + weight("bias_query", "out")
    psi = A * dropout(
        softmax(A.pattern * joint(query, X, weight("attention", "out"), slope)), attention_dropout
    )
    return Layer(
        inputs, outputs, psi=psi, heads=heads, combine=combine, bias=bias, inner_bias=inner_bias,
        activation=activation, order="project",
    )  # fmt: skip


def agnn(width: int, *, beta: float = 1.0, trained: bool = True) -> Layer:
    """Propagate by cosines: softmax(beta cos(H_i, H_j)), no weights but beta.

    Thekumparampil et al., arXiv 1803.03735, equation 3, on a graph with self loops.

    Parameters
    ----------
    width
        Of the features.
    beta, trained
        Where beta starts, and whether it moves.
    """
    cosines = normalize(H) @ normalize(H).T
    psi = A * softmax(scalar("beta", beta) * A.pattern * cosines)
    layer = Layer(width, psi=psi, phi=None, bias=False)
    layer.learned["beta"].requires_grad_(trained)
    return layer


def agnn_paper(
    inputs: int, outputs: int, *, bias: bool = False, activation: Activation | None = None
) -> Layer:
    """AGNN as Besta et al. (SC 2023) define and measure it: A . H H^T / n n^T, no softmax."""
    psi = A * (H @ H.T) / outer(norm(H), norm(H))
    return Layer(inputs, outputs, psi=psi, bias=bias, activation=activation)


def va(
    inputs: int,
    outputs: int,
    *,
    form: Literal["plain", "scaled", "softmax"] = "plain",
    bias: bool = False,
    activation: Activation | None = None,
) -> Layer:
    """Vanilla attention: A . H H^T.

    Parameters
    ----------
    form
        ``plain`` is the paper's, whose values grow with degree x width x square in every layer and
        overflow in the third; ``scaled`` divides by degree x width; ``softmax`` is a transformer's
        softmax(H H^T / sqrt(width)).
    inputs, outputs, bias, activation
        See `Layer`.
    """
    if form == "softmax":
        psi = A * softmax(A.pattern * (H @ H.T) / math.sqrt(inputs))
    else:
        psi = A * (H @ H.T)
        if form == "scaled":
            psi = psi * replicate(inverse(row_sum(A.pattern))) / float(inputs)
    return Layer(inputs, outputs, psi=psi, bias=bias, activation=activation)


def gcn(
    inputs: int, outputs: int, *, bias: bool = True, activation: Activation | None = None
) -> Layer:
    """Graph convolution: A / sqrt(d d^T), d the weighted degrees of rows.

    Kipf and Welling, arXiv 1609.02907, equation 2; self loops are the graph's.
    """
    return Layer(inputs, outputs, psi=_symmetric(), bias=bias, activation=activation)


def _symmetric() -> Expression:
    scale = inverse(sqrt(row_sum(A)))
    return A * outer(scale, scale)


class Sgc(nn.Module):
    """Simplified graph convolution: (A / sqrt(d d^T))^hops H W, one matrix for all hops.

    Wu et al., arXiv 1902.07153.

    Parameters
    ----------
    inputs, outputs
        Widths; the hops take the narrower of the two.
    hops
        Number of aggregations.
    bias
        Add a learned vector.
    """

    def __init__(self, inputs: int, outputs: int, *, hops: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.hops, self.project_first = hops, outputs < inputs
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        nn.init.xavier_uniform_(self.weight)
        width = min(inputs, outputs)
        self.spread = Layer(width, psi=_symmetric(), phi=None, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, csr: Csr, features: Float[Tensor, "n inputs"] | Csr) -> Float[Tensor, "n _"]:
        """Compute the result, [n, outputs]."""
        x = dense_features(features)
        if self.project_first:
            x = x @ self.weight
        for _ in range(self.hops):
            x = self.spread(csr, x)
        if not self.project_first:
            x = x @ self.weight
        return x if self.bias is None else x + self.bias.to(x.dtype)


def gin(
    mlp: nn.Module,
    inputs: int,
    outputs: int,
    *,
    eps: float = 0.0,
    trained: bool = False,
    activation: Activation | None = None,
) -> Layer:
    """Graph isomorphism network: MLP((1 + eps) H_i + sum of the neighbours').

    Xu et al., arXiv 1810.00826, equation 4.1; self loops are not wanted.

    Parameters
    ----------
    mlp
        From [n, inputs] to [n, outputs].
    eps, trained
        Where eps starts, and whether it moves.
    inputs, outputs, activation
        See `Layer`.
    """
    root = 1.0 + scalar("eps", eps)
    layer = Layer(inputs, outputs, psi=A, phi=mlp, root=root, activation=activation)
    layer.learned["eps"].requires_grad_(trained)
    return layer
