"""AGNN: attention by cosines, with a softmax (2018) and without (SC 2023)."""

from typing import Unpack

from jaxtyping import Float
from torch import Tensor

from bevatron.models.graph_attention.formula import expression as e
from bevatron.models.graph_attention.formula.expression import A, Expression, H
from bevatron.models.graph_attention.graph_layer import Features, dense_features
from bevatron.models.graph_attention.layers.named import LayerOptions, NamedLayer
from bevatron.models.graph_attention.matrix import Matrix, dot_attention


class Agnn(NamedLayer):
    r"""Propagation by cosines, no weights but beta, on a graph with self loops.

    .. math::

        z_i = \sum_j a_{ij} \operatorname{softmax}_j\big(\beta \cos(h_i, h_j)\big)\, h_j

    Thekumparampil et al., arXiv 1803.03735, equation 3; ``trained`` says whether beta is.
    """

    def __init__(self, width: int, *, beta: float = 1.0, trained: bool = True) -> None:
        initial = {"beta": float(beta)}
        super().__init__(width, width, learned={"beta": ()}, initial=initial, phi=None, bias=False)
        self.learned["beta"].requires_grad_(trained)

    def attend(self, matrix: Matrix, features: Features) -> Float[Tensor, "n 1 width"]:
        """Compute z."""
        h, beta = dense_features(features)[:, None], self.learned["beta"]
        return dot_attention(matrix, h, normalize=True, softmax=True, scale=beta)

    @property
    def psi(self) -> Expression:
        """A * softmax(beta cos)."""
        beta = e.scalar("beta", self._initial["beta"])
        return A * e.softmax(beta * A.pattern * (e.normalize(H) @ e.normalize(H).T))


class AgnnPaper(NamedLayer):
    r"""AGNN as Besta et al. (SC 2023) define and measure it, without a softmax.

    .. math::

        z_i = \sum_j a_{ij} \cos(h_i, h_j)\, h_j W
    """

    def __init__(self, inputs: int, outputs: int, **options: Unpack[LayerOptions]) -> None:
        options.setdefault("bias", False)
        super().__init__(inputs, outputs, **options)

    def attend(self, matrix: Matrix, features: Features) -> Float[Tensor, "n 1 out"]:
        """Compute z; W comes last, so that the row fetched for the score is the one summed."""
        h = dense_features(features)[:, None]
        return self.project_sum(dot_attention(matrix, h, normalize=True))

    @property
    def psi(self) -> Expression:
        """A * H H^T / n n^T, n the lengths of rows."""
        return A * (H @ H.T) / e.outer(e.norm(H), e.norm(H))


agnn, agnn_paper = Agnn, AgnnPaper
