"""The dropout masks of a step, drawn from its seed."""

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.models.common.folding import keep_masks


class Drops:
    """Draws the masks of one forward pass; every draw differs from those before.

    Parameters
    ----------
    seed : seed of the step, int64 on the device of the model; None = no dropout
    """

    def __init__(self, seed: Int[Tensor, ""] | None) -> None:
        self.seed = seed
        self.calls = 0

    def draw(
        self, x: Float[Tensor, "*batch _ N C"], count: int, rate: float
    ) -> Float[Tensor, "count *batch N C"] | list[None]:
        """Return masks that the rows (or columns) of x share, or None for each."""
        if self.seed is None or rate == 0:
            return [None] * count
        self.calls += 1
        return keep_masks(self.seed, self.calls, x, count, rate)
