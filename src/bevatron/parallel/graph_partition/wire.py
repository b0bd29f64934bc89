"""The type in which features are sent: their own, or float32 rounded to bfloat16.

Per-vertex scalars (scores, sums, logarithms) are sent separately in full precision: packing and
unpacking wide rows would cost more than the extra messages.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bevatron.parallel.groups import Group, Pending


@dataclass(frozen=True)
class Wire:
    """The type of features between ranks.

    Attributes
    ----------
    bfloat16
        Whether float32 features are rounded to bfloat16 for sending. Gathered features stay
        bfloat16, so kernels read half the bytes; all sums accumulate in float32.

    Examples
    --------
    >>> Wire(bfloat16=True).narrow(torch.ones(2, 3)).dtype
    torch.bfloat16
    """

    bfloat16: bool = False

    def narrow(self, features: Tensor) -> Tensor:
        """Round features to the type in which they are sent."""
        if self.bfloat16 and features.dtype == torch.float32:
            return features.to(torch.bfloat16)
        return features

    def all_gather(self, group: Group, features: Tensor) -> Pending:
        """All-gather the features of all ranks."""
        return group.all_gather(self.narrow(features))

    def reduce_scatter(self, group: Group, sums: Tensor) -> Pending:
        """Reduce sums over a group; the result has their type."""
        sent = self.narrow(sums)
        if sent.dtype == sums.dtype:
            return group.reduce_scatter(sums)
        return group.reduce_scatter_wire(sent, lambda received: received.to(sums.dtype))
