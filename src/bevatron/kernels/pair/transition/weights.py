"""The weights of a transition, handed on together."""

from typing import NamedTuple

from torch import Tensor


class Weights(NamedTuple):
    """All weights but those of the norm.

    Attributes
    ----------
    up, gate : [H, C]
    down : [C_out, H]
    up_bias, down_bias : [H] and [C_out]
    """

    up: Tensor
    down: Tensor
    gate: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
