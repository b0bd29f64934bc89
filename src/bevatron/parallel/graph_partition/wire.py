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
        Whether features are rounded to bfloat16 to be sent; sums are still made in float32.

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
        wide = features.reshape(features.shape[0], -1)
        if not self._narrow(features.dtype):
            return torch.cat([wide, *flat], 1) if flat else wide
        parts = [wide.to(torch.bfloat16)]
        parts += [part.contiguous().view(torch.bfloat16) for part in flat if part.shape[1]]
        return torch.cat(parts, 1)

    def unpack(self, rows: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Split rows into features [r, width] and all scalars [r, s], of type ``dtype``."""
        features, scalars = rows[:, :width], rows[:, width:]
        if not self._narrow(dtype):
            return features, scalars
        return features.to(dtype), scalars.contiguous().view(dtype)

    def reduce_scatter(self, group: Group, features: Tensor, *scalars: Tensor) -> Pending:
        """Add up rows over a group; the result is [r, w] in the type of the features."""
        rows = self.pack(features, *scalars)
        if not self._narrow(features.dtype):
            return group.reduce_scatter(rows)
        width, dtype = features[:1].numel(), features.dtype
        return group.reduce_scatter_wire(
            rows, lambda received: torch.cat(self.unpack(received, width, dtype), 1)
        )

    def _narrow(self, dtype: torch.dtype) -> bool:
        return self.bfloat16 and dtype == torch.float32
