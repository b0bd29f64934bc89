"""AGNN: attention by cosines, with a softmax (2018) and without (SC 2023)."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels.graph.dot_attention import dot_attention
from bevatron.models.graph_attention.formula.expression import (
    A,
    Expression,
    H,
    norm,
    normalize,
    outer,
    scalar,
    softmax,
)
from bevatron.models.graph_attention.graph_layer import Activation, Features, Matrix, dense_features
from bevatron.models.graph_attention.layers.named import NamedLayer
from bevatron.parallel.graph_partition import DistributedGraph


class Agnn(NamedLayer):
    r"""Propagation by cosines, no weights but beta.

    .. math::

        z_i = \sum_j a_{ij} \operatorname{softmax}_j\big(\beta \cos(h_i, h_j)\big)\, h_j

    Thekumparampil et al., arXiv 1803.03735, equation 3, on a graph with self loops.

    Parameters
    ----------
    width
        Of the features.
    beta, trained
        Initial value of beta, and whether it is trained.
    """

    def __init__(self, width: int, *, beta: float = 1.0, trained: bool = True) -> None:
        initial = {"beta": float(beta)}
        super().__init__(
            *(width, width), learned={"beta": (1,)}, initial=initial, phi=None, bias=False
        )
        self.learned["beta"].requires_grad_(trained)

    def attend(self, csr: Matrix, features: Features) -> Float[Tensor, "n 1 width"]:
        """Compute z."""
        h, beta = dense_features(features)[:, None], self.learned["beta"]
        if isinstance(csr, DistributedGraph):
            return csr.dot_attention(h, normalize=True, softmax=True, scale=beta)
        return dot_attention(csr, h, normalize=True, softmax=True, scale=beta)

    @property
    def psi(self) -> Expression:
        """A * softmax(beta cos)."""
        beta = scalar("beta", self._initial["beta"])
        return A * softmax(beta * A.pattern * (normalize(H) @ normalize(H).T))


class AgnnPaper(NamedLayer):
    r"""AGNN as Besta et al. (SC 2023) define and measure it, without a softmax.

    .. math::

        z_i = \sum_j a_{ij} \cos(h_i, h_j)\, h_j W

    Parameters
    ----------
    inputs, outputs, bias, activation
        See `bevatron.models.graph_attention.Layer`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        activation: Activation | None = None,
    ) -> None:
        super().__init__(inputs, outputs, learned={}, bias=bias, activation=activation)

    def attend(self, csr: Matrix, features: Features) -> Float[Tensor, "n 1 out"]:
        """Compute z; W comes last, so that the row fetched for the score is the one summed."""
        h = dense_features(features)[:, None]
        if isinstance(csr, DistributedGraph):
            return self.project_sum(csr.dot_attention(h, normalize=True))
        return self.project_sum(dot_attention(csr, h, normalize=True))

    @property
    def psi(self) -> Expression:
        """A * H H^T / n n^T, n the lengths of rows."""
        return A * (H @ H.T) / outer(norm(H), norm(H))


agnn, agnn_paper = Agnn, AgnnPaper
