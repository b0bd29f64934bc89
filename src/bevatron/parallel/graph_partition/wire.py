"""How features travel: in their own type, or float32 rounded to bfloat16.

Scalars of vertices (scores, sums, logarithms) travel apart and whole: joining them to wide rows and
parting them again would cost more copies than their messages cost time.
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
        Whether float32 features are rounded to bfloat16 to be sent. What was gathered stays
        bfloat16, half of what kernels have to read; all sums are made in float32.

    Examples
    --------
    >>> Wire(bfloat16=True).narrow(torch.ones(2, 3)).dtype
    torch.bfloat16
    """

    bfloat16: bool = False

    def narrow(self, features: Tensor) -> Tensor:
        """Round features as they are sent."""
        if self.bfloat16 and features.dtype == torch.float32:
            return features.to(torch.bfloat16)
        return features

    def all_gather(self, group: Group, features: Tensor) -> Pending:
        """Lay the features of all ranks one after another."""
        return group.all_gather(self.narrow(features))

    def reduce_scatter(self, group: Group, sums: Tensor) -> Pending:
        """Add up sums over a group; the result has their type."""
        sent = self.narrow(sums)
        if sent.dtype == sums.dtype:
            return group.reduce_scatter(sums)
        return group.reduce_scatter_wire(sent, lambda received: received.to(sums.dtype))
