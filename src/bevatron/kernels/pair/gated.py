"""Layout of rows of a gated unit: all gates before all values."""

from torch import Tensor


def gate_and_value(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the gates and of the values that follow them."""
    width = both.shape[-1] // 2
    return both[..., :width], both[..., width:]
