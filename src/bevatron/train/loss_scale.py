"""The factor that keeps the gradients of float16 products from vanishing.

float16 knows nothing below 6e-8: small gradients would become zero. The loss is multiplied by a
factor before the backward pass and the gradients are divided by it afterwards, in float32. If one
overflows, the step is left out and the factor halved; after many sound steps it is doubled.
bfloat16 has the range of float32 and needs none of it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST = 2.0**16
"""The factor that a run begins with; it is soon as large as it can be."""
LEAST = 1.0
"""Without a factor, what overflows is not a matter of scale."""
PATIENCE = 2000
"""Sound steps in a row after which the factor is doubled."""


@dataclass
class LossScale:
    """The factor, which goes into checkpoints.

    Attributes
    ----------
    factor
        Of the next step.
    sound_steps
        Steps without overflow since it last changed.
    """

    factor: float = FIRST
    sound_steps: int = 0

    def divide(self, gradients: Iterable[Tensor | None]) -> None:
        """Divide gradients by the factor, in place."""
        found = [gradient for gradient in gradients if gradient is not None]
        if found:
            torch._foreach_mul_(found, 1.0 / self.factor)

    def take(self, grad_norm: float) -> bool:
        """Take note of a step's gradient; return False if the step is to be left out.

        A gradient that overflows by itself is left to those who look for divergence.

        Examples
        --------
        >>> scale = LossScale(factor=8.0)
        >>> scale.take(float("inf")), scale.factor
        (False, 4.0)
        >>> scale.take(0.5), scale.factor
        (True, 4.0)
        """
        if not math.isfinite(grad_norm):
            left_out = self.factor > LEAST
            self.factor, self.sound_steps = max(self.factor / 2, LEAST), 0
            return not left_out
        self.sound_steps += 1
        if self.sound_steps == PATIENCE:
            self.factor, self.sound_steps = self.factor * 2, 0
        return True
