"""VA, vanilla attention: scalar products of rows, plain, scaled or with a softmax."""

import math
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels.graph.dot_attention import dot_attention
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.models.graph_attention.formula.expression import (
    A,
    Expression,
    H,
    inverse,
    replicate,
    row_sum,
    softmax,
)
from bevatron.models.graph_attention.graph_layer import (
    Activation,
    Features,
    Matrix,
    dense_features,
    not_partitioned,
)
from bevatron.models.graph_attention.layers.named import NamedLayer
from bevatron.parallel.graph_partition import DistributedGraph


class Va(NamedLayer):
    r"""Vanilla attention (Besta et al., SC 2023, equation 11).

    .. math::

        z_i = \sum_j a_{ij}\, (h_i \cdot h_j)\, h_j W

    Parameters
    ----------
    form
        ``plain`` is the paper's, whose values grow with degree x width x square in every layer and
        overflow in the third; ``scaled`` divides by degree x width; ``softmax`` is a transformer's
        softmax(H H^T / sqrt(width)).
    inputs, outputs, bias, activation
        See `bevatron.models.graph_attention.Layer`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        form: Literal["plain", "scaled", "softmax"] = "plain",
        bias: bool = False,
        activation: Activation | None = None,
    ) -> None:
        super().__init__(inputs, outputs, learned={}, bias=bias, activation=activation)
        self.form = form
        divisor = {"plain": 1.0, "scaled": float(inputs), "softmax": math.sqrt(inputs)}
        self.scale = 1.0 / divisor[form]

    def attend(self, csr: Matrix, features: Features) -> Float[Tensor, "n 1 out"]:
        """Compute z; W comes last, so that the row fetched for the score is the one summed."""
        h, softmax = dense_features(features)[:, None], self.form == "softmax"
        if self.form == "scaled":
            csr = not_partitioned(csr, "VA divided by the degrees")
            summed = dot_attention(csr, h, scale=self.scale)
            # A row without entries is zero already.
            degree = csr.row_ptr.diff().clamp(min=1).to(wide_type(h))
            return self.project_sum(summed * (1.0 / degree)[:, None, None].to(summed.dtype))
        if isinstance(csr, DistributedGraph):
            return self.project_sum(csr.dot_attention(h, softmax=softmax, scale=self.scale))
        return self.project_sum(dot_attention(csr, h, softmax=softmax, scale=self.scale))

    @property
    def psi(self) -> Expression:
        """A * H H^T, scaled or with a softmax."""
        if self.form == "softmax":
            return A * softmax(A.pattern * (H @ H.T) / math.sqrt(self.inputs))
        psi = A * (H @ H.T)
        if self.form == "plain":
            return psi
        return psi * replicate(inverse(row_sum(A.pattern))) / float(self.inputs)


va = Va
