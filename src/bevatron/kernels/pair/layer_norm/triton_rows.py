"""Rows normalised within other operators, which do not keep them from one pass to the next."""

from dataclasses import dataclass

from torch import Tensor

from bevatron.kernels.pair.layer_norm.triton import launch_backward, launch_forward


@dataclass(frozen=True)
class NormedRows:
    """Rows of a matrix that an operator normalises itself, a part at a time.

    Attributes
    ----------
    rows
        [n, C].
    weight, bias
        [C].
    mean, rstd
        [n], every row's mean and 1/sigma in float32.
    """

    rows: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    rstd: Tensor
    eps: float

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        eps: float,
    ) -> "NormedRows":
        """Take a tensor of any shape [..., C] with statistics [...]."""
        rows = x.reshape(-1, x.shape[-1])
        return cls(rows, weight, bias, mean.view(-1), rstd.view(-1), eps)

    def make(self, part: slice = slice(None)) -> Tensor:
        """Return the normalised rows of a part; write their statistics."""
        rows = self.rows[part]
        normed = rows.new_empty(rows.shape)
        mean, rstd = self.mean[part], self.rstd[part]
        launch_forward(rows, self.weight, self.bias, None, None, normed, mean, rstd, self.eps)
        return normed

    def backward(self, dnormed: Tensor, dx: Tensor, dweight: Tensor, dbias: Tensor) -> None:
        """Write all gradients, of the statistics that are known; ``dx`` may lie on ``dnormed``."""
        launch_backward(
            *(dnormed, self.rows, self.weight, self.bias, None, self.mean, self.rstd),
            *(dx, dweight, dbias, self.rows.new_empty(0)),
        )
