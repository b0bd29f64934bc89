"""The specification of silu_linear."""

from torch import Tensor
from torch.nn.functional import silu


def silu_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Activate, then multiply."""
    return silu(x) @ weight
