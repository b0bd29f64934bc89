"""What takes the place of the contraction where rows of a pair are in several places."""

from typing import Protocol

from torch import Tensor


class Contraction(Protocol):
    """Contracts own rows R of a and b, [..., R, N], with all rows; channels are in front."""

    def contract(self, a: Tensor, b: Tensor, outgoing: bool) -> Tensor:
        """Return own rows i of ``sum_k a_ik b_jk``, or of ``sum_k a_ki b_kj`` if incoming."""

    def contract_backward(
        self, a: Tensor, b: Tensor, dx: Tensor, outgoing: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of own rows of a and b."""
