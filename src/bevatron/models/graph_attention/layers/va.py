"""VA, vanilla attention: dot products of rows, plain, scaled or with a softmax."""

import math
from typing import Literal, Unpack

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels.shared.dtypes import wide_type
from bevatron.models.graph_attention.formula import expression as e
from bevatron.models.graph_attention.formula.expression import A, Expression, H
from bevatron.models.graph_attention.graph_layer import Features, dense_features
from bevatron.models.graph_attention.layers.named import LayerOptions, NamedLayer
from bevatron.models.graph_attention.matrix import Matrix, dot_attention, whole_rows


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
    inputs, outputs, options : see `LayerOptions`; without a bias by default
    """

    def __init__(
        self, inputs: int, outputs: int, *, form: Literal["plain", "scaled", "softmax"] = "plain",
        **options: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        options.setdefault("bias", False)
        super().__init__(inputs, outputs, **options)
        divisor = {"plain": 1.0, "scaled": float(inputs), "softmax": math.sqrt(inputs)}
        self.form, self.scale = form, 1.0 / divisor[form]

    def attend(self, matrix: Matrix, features: Features) -> Float[Tensor, "n 1 out"]:
        """Compute z; W comes last, so that the row fetched for the score is the one summed."""
        h, softmax = dense_features(features)[:, None], self.form == "softmax"
        summed = dot_attention(matrix, h, softmax=softmax, scale=self.scale)
        if self.form == "scaled":
            # A row without entries is zero already.
            degree = whole_rows(matrix).row_ptr.diff().clamp(min=1).to(wide_type(h))
            summed = summed * (1.0 / degree)[:, None, None].to(summed.dtype)
        return self.project_sum(summed)

    @property
    def psi(self) -> Expression:
        """A * H H^T, scaled or with a softmax."""
        if self.form == "softmax":
            return A * e.softmax(A.pattern * (H @ H.T) / math.sqrt(self.inputs))
        if self.form == "plain":
            return A * (H @ H.T)
        return A * (H @ H.T) * e.replicate(e.inverse(e.row_sum(A.pattern))) / float(self.inputs)


va = Va
