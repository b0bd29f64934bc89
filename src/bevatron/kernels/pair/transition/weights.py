"""The weights of a transition, handed on together."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """All weights but those of the norm.

    Attributes
    ----------
    up, gate
        [H, C].
    down
        [C_out, H].
    up_bias, down_bias
        [H] and [C_out].
    """

    up: Tensor
    down: Tensor
    gate: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    def cast(self, dtype: torch.dtype) -> "Weights":
        """Return them contiguous in the type of the products."""
        given = (self.up, self.down, self.gate, self.up_bias, self.down_bias)
        made: Any = (None if w is None else w.to(dtype).contiguous() for w in given)
        return Weights(*made)
