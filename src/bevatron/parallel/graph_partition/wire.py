"""How rows of features and scalars travel: in their own type, or features in bfloat16.

Scalars (scores, sums, logarithms) always travel whole; in bfloat16 rows a 32-bit scalar takes the
place of two features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bevatron.parallel.graph_partition.groups import Group, Pending


@dataclass(frozen=True)
class Wire:
    """The type of features between ranks.

    Attributes
    ----------
    bfloat16
        Whether float32 features are rounded to bfloat16 to be sent; sums are still made in
        float32. Features that are bfloat16 always travel as such.

    Examples
    --------
    >>> x, score = torch.ones(2, 3), torch.full((2, 1), 0.1)
    >>> rows = Wire(bfloat16=True).pack(x, score)
    >>> rows.shape, rows.dtype
    (torch.Size([2, 5]), torch.bfloat16)
    >>> Wire(bfloat16=True).unpack(rows, 3, torch.float32)[1].tolist() == score.tolist()
    True
    """

    bfloat16: bool = False

    def pack(self, features: Tensor, *scalars: Tensor) -> Tensor:
        """Join [r, ...] tensors into rows [r, w]."""
        flat = [scalar.reshape(scalar.shape[0], -1) for scalar in scalars]
        rows = features.reshape(features.shape[0], -1)
        narrow = self.bfloat16 and features.dtype == torch.float32
        if not narrow and features.dtype != torch.bfloat16:
            return torch.cat([rows, *flat], 1) if flat else rows
        parts = [rows.to(torch.bfloat16)]
        parts += [part.float().contiguous().view(torch.bfloat16) for part in flat if part.shape[1]]
        return torch.cat(parts, 1)

    def unpack(self, rows: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Split rows into features [r, width] of type ``dtype`` and all scalars [r, s]."""
        features, scalars = rows[:, :width], rows[:, width:]
        if rows.dtype == torch.bfloat16:
            scalars = scalars.contiguous().view(torch.float32)
        return features.to(dtype), scalars

    def reduce_scatter(self, group: Group, features: Tensor, *scalars: Tensor) -> Pending:
        """Add up rows over a group; the result is [r, w] in the type of the features."""
        rows = self.pack(features, *scalars)
        if rows.dtype == features.dtype:
            return group.reduce_scatter(rows)
        width, dtype = features[:1].numel(), features.dtype
        return group.reduce_scatter_wire(
            rows, lambda received: torch.cat(self.unpack(received, width, dtype), 1)
        )
