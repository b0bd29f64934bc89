"""Sums over the neighbours whose weights depend on the graph alone: GCN, SGC, GIN.

They are formulas: the values of Psi are computed once per graph and cached.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bevatron.models.graph_attention.formula.expression import (
    A,
    Expression,
    inverse,
    outer,
    row_sum,
    scalar,
    sqrt,
)
from bevatron.models.graph_attention.formula.layer import Layer
from bevatron.models.graph_attention.graph_layer import Activation, Features, dense_features
from bevatron.models.graph_attention.matrix import Matrix


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
    inputs, outputs : widths; the hops take the narrower of the two
    hops : number of aggregations
    bias : add a learned vector
    """

    def __init__(self, inputs: int, outputs: int, *, hops: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.hops, self.project_first = hops, outputs < inputs
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        nn.init.xavier_uniform_(self.weight)
        width = min(inputs, outputs)
        self.spread = Layer(width, psi=_symmetric(), phi=None, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, matrix: Matrix, features: Features) -> Float[Tensor, "n _"]:
        """Compute the result, [n, outputs]."""
        x = dense_features(features)
        if self.project_first:
            x = x @ self.weight
        for _ in range(self.hops):
            x = self.spread(matrix, x)
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

    Xu et al., arXiv 1810.00826, equation 4.1; the graph must not have self loops.

    Parameters
    ----------
    mlp : from [n, inputs] to [n, outputs]
    eps, trained : where eps starts, and whether it moves
    inputs, outputs, activation : see `Layer`
    """
    root = 1.0 + scalar("eps", eps)
    layer = Layer(inputs, outputs, psi=A, phi=mlp, root=root, activation=activation)
    layer.learned["eps"].requires_grad_(trained)
    return layer
