r"""Dot-product attention over a block of a larger matrix: the partial sums of a partitioned graph.

The score is :math:`t_{ij} = s_i c_j \langle q_i, k_j\rangle`. Without a softmax a block returns its
partial sum. With one the sum is relative to the largest score of its own rows, as in
`bevatron.kernels.graph.graph_attention.partial`: `merge` adds blocks and `finish` normalises.
The backward pass of a block needs L (log of the sum of exponentials) and
:math:`\delta_i = \langle G_i, z_i\rangle` of the whole rows; `row_backward` returns the block's
part of the rows' gradients, `col_backward` of the columns'. All results are float32 (float64 for
float64).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.graph.csr import Csr

__all__ = ["Scores", "Sums", "col_backward", "finish", "forward", "merge", "row_backward"]

_sums, _row_gradients, _col_gradients = (
    registry.operator(
        f"dot_attention_{name}",
        "bevatron.kernels.graph.dot_attention",
        reference=f"partial_reference:{name}",
        triton=f"triton:{name}",
    )
    for name in ("sums", "row_gradients", "col_gradients")
)


@dataclass(frozen=True)
class Scores:
    """Scores and summands of a block.

    Attributes
    ----------
    query : [rows, H, C]
    key : [columns, H, C]
    value : [columns, H, D]; None: the key, loaded once for both
    row_scale, col_scale : [rows, H] and [columns, H], s and c; None: ones
    softmax : whether the scores of each row are normalised
    """

    query: Tensor
    key: Tensor
    value: Tensor | None = None
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    softmax: bool = False


@dataclass(frozen=True)
class Sums:
    """Sums over the entries of each row.

    Attributes
    ----------
    z : [rows, H, D]
    largest, total
        [rows, H], with a softmax: the largest score (-inf for a row without entries), and the sum
        of exponentials relative to it. None without.
    """

    z: Tensor
    largest: Tensor | None = None
    total: Tensor | None = None


def forward(csr: Csr, scores: Scores) -> Sums:
    """Compute a block's sums."""
    found = _sums.dispatch(scores.key)(csr, scores)
    return Sums(*found)


def merge(blocks: Sequence[Sums]) -> Sums:
    """Add the sums of blocks of the same rows, in order."""
    if blocks[0].largest is None:
        return Sums(sum((block.z for block in blocks[1:]), blocks[0].z))
    known = [(b.z, b.largest, b.total) for b in blocks if b.largest is not None]
    largest = torch.stack([part[1] for part in known]).amax(0)
    z, total = torch.zeros_like(blocks[0].z), torch.zeros_like(largest)
    for part_z, part_largest, part_total in known:
        factor = torch.where(part_largest == -torch.inf, 0.0, (part_largest - largest).exp())
        assert part_total is not None
        z, total = z + factor[..., None] * part_z, total + factor * part_total
    return Sums(z, largest, total)


def finish(sums: Sums) -> tuple[Float[Tensor, "rows H D"], Float[Tensor, "rows H"] | None]:
    """Normalise: the result and L (None without a softmax); +inf for a row without entries."""
    if sums.largest is None or sums.total is None:
        return sums.z, None
    empty = sums.total == 0
    total = torch.where(empty, 1.0, sums.total)
    return sums.z / total[..., None], torch.where(empty, torch.inf, sums.largest + total.log())


def row_backward(
    csr: Csr,
    scores: Scores,
    grad: Float[Tensor, "rows H D"],
    lse: Float[Tensor, "rows H"] | None = None,
    delta: Float[Tensor, "rows H"] | None = None,
) -> tuple[Float[Tensor, "rows H C"], Float[Tensor, "rows H"]]:
    """Compute a block's part of the gradients of the query and of ``row_scale``."""
    run = _row_gradients.dispatch(scores.key)
    by_query, by_scale = run(csr, scores, grad, lse, delta)
    return by_query, by_scale


def col_backward(
    csr: Csr,
    scores: Scores,
    grad: Float[Tensor, "rows H D"],
    lse: Float[Tensor, "rows H"] | None = None,
    delta: Float[Tensor, "rows H"] | None = None,
) -> tuple[Float[Tensor, "columns H C"], Tensor | None, Float[Tensor, "columns H"]]:
    """Compute a block's part of the gradients of the key, the value and ``col_scale``.

    If the key is the value, the first holds both and the second is None.
    """
    run = _col_gradients.dispatch(scores.key)
    by_key, by_value, by_scale = run(csr, scores, grad, lse, delta)
    return by_key, by_value, by_scale
