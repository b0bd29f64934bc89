r"""Attention over a block of a larger matrix: the partial sums of a partitioned graph.

A row's softmax runs over all its blocks, so a block returns sums that are not yet normalised, each
relative to its own largest logit:

.. math::

    m_i = \max_j E_{ij}, \quad s_i = \sum_j e^{E_{ij} - m_i}, \quad
    Z_i = \sum_j e^{E_{ij} - m_i} d_{ij} a_{ij} x_j

with :math:`E_{ij} = LeakyReLU(l_i + r_j)`, and the same two sums over the entries whose
:math:`l_i + r_j` is positive. `merge` adds blocks, `finish` normalises. The backward pass of a
block needs the logarithm L of the whole row's sum and :math:`\delta_i = \langle G_i, z_i\rangle`.
`backward` returns the block's part of the gradients of x and r (to be summed over the blocks of a
column), `row_gradient` its part of that of l (to be summed over the blocks of a row). The
latter gathers nothing: LeakyReLU has two slopes, and the softmax gradients of a row sum to zero.

Set ``row_ids`` and ``col_ids`` of each block's `Csr` to make the dropout mask independent of the
partition. All results are float32 (float64 for float64).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.dropout import as_seed

__all__ = ["Sums", "backward", "finish", "forward", "merge", "row_gradient"]

_sums, _gradients = (
    registry.operator(
        f"graph_attention_{name}",
        "bevatron.kernels.graph.graph_attention",
        reference=f"partial_reference:{name}",
        triton=f"triton:{name}",
    )
    for name in ("sums", "gradients")
)


@dataclass(frozen=True)
class Sums:
    """Sums over the entries of each row, relative to the row's largest logit.

    Attributes
    ----------
    largest : [rows, H], m; -inf for a row without entries
    total, positive : [rows, H], s over all entries and over those with a positive sum of scores
    z, z_positive
        [rows, H, C], Z over the same. ``positive`` and ``z_positive`` are empty if no backward
        pass follows.
    """

    largest: Tensor
    total: Tensor
    positive: Tensor
    z: Tensor
    z_positive: Tensor

    def relative_to(self, largest: Float[Tensor, "rows H"]) -> "Sums":
        """Return the same sums relative to other, larger logits."""
        # A block without entries has m = -inf and sums of zero: its factor must not be NaN.
        factor = torch.where(self.largest == -torch.inf, 0.0, (self.largest - largest).exp())
        wide = factor[..., None]
        total, z = self.total * factor, self.z * wide
        if not self.positive.numel():
            return Sums(largest, total, self.positive, z, self.z_positive)
        return Sums(largest, total, self.positive * factor, z, self.z_positive * wide)


def forward(
    csr: Csr,
    x: Float[Tensor, "columns H C"],
    row_score: Float[Tensor, "rows H"],
    col_score: Float[Tensor, "columns H"],
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    *,
    seed: int | Tensor | None = None,
    backward: bool = True,
) -> Sums:
    """Compute a block's sums; arguments as for `bevatron.kernels.graph.graph_attention`.

    Dropout requires a seed, because all blocks and the backward pass must use the same. If no
    backward pass follows, ``backward=False`` skips the sums over positive entries.
    """
    mask_seed = _mask_seed(seed, dropout, x)
    run = _sums.dispatch(x)
    return Sums(*run(csr, x, row_score, col_score, negative_slope, dropout, mask_seed, backward))


def merge(blocks: Sequence[Sums]) -> Sums:
    """Add the sums of blocks of the same rows, in order."""
    largest = torch.stack([block.largest for block in blocks]).amax(0)
    moved = [block.relative_to(largest) for block in blocks]
    names = ("total", "positive", "z", "z_positive")
    added = (sum((getattr(block, n) for block in moved[1:]), getattr(moved[0], n)) for n in names)
    return Sums(largest, *added)


def finish(sums: Sums) -> tuple[Float[Tensor, "rows H C"], Float[Tensor, "rows H"]]:
    """Normalise: the result z and L = m + log s; zero and +inf for a row without entries."""
    empty = sums.total == 0
    total = torch.where(empty, 1.0, sums.total)
    lse = torch.where(empty, torch.inf, sums.largest + total.log())
    return sums.z / total[..., None], lse


def backward(
    csr: Csr,
    x: Float[Tensor, "columns H C"],
    row_score: Float[Tensor, "rows H"],
    col_score: Float[Tensor, "columns H"],
    grad: Float[Tensor, "rows H C"],
    lse: Float[Tensor, "rows H"],
    delta: Float[Tensor, "rows H"],
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    *,
    seed: int | Tensor | None = None,
) -> tuple[Float[Tensor, "columns H C"], Float[Tensor, "columns H"]]:
    """Compute a block's part of the gradients of ``x`` and ``col_score``.

    Parameters
    ----------
    grad : G, the gradient of the whole rows' result
    lse : L of the whole rows
    delta : <G, z> of the whole rows
    """
    mask_seed = _mask_seed(seed, dropout, x)
    run = _gradients.dispatch(x)
    by_x, by_score = run(
        *(csr, x, row_score, col_score, grad, lse, delta, negative_slope, dropout, mask_seed)
    )
    return by_x, by_score


def row_gradient(
    sums: Sums,
    grad: Float[Tensor, "rows H C"],
    lse: Float[Tensor, "rows H"],
    delta: Float[Tensor, "rows H"],
    negative_slope: float = 0.2,
) -> Float[Tensor, "rows H"]:
    r"""Compute a block's part of the gradient of ``row_score``.

    :math:`u_i = (1 - \alpha)(\langle G_i, Z^+_i\rangle - \delta_i p^+_i)` with the sums over
    positive entries, normalised by the whole row's L.
    """
    factor = torch.where(sums.largest == -torch.inf, 0.0, (sums.largest - lse).exp())
    along = (grad.to(factor.dtype) * sums.z_positive).sum(-1)
    return (1.0 - negative_slope) * factor * (along - delta * sums.positive)


def _mask_seed(seed: int | Tensor | None, dropout: float, x: Tensor) -> Tensor | None:
    if dropout == 0.0:
        return None
    if seed is None:
        raise ValueError("graph_attention: dropout over blocks needs a seed that all blocks share")
    return as_seed(seed, x.device)
