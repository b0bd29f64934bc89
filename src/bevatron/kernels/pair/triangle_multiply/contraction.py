"""Replacement of the contraction where the rows of a pair are distributed."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class Contraction(Protocol):
    """Contracts own rows R of a and b, matrices [planes, R, N], with all rows."""

    def contract(self, a: Tensor, b: Tensor, x: Tensor, outgoing: bool) -> Sequence[Tensor]:
        """Write own rows i of ``x_ij = sum_k a_ik b_jk``, or of ``sum_k a_ki b_kj`` if incoming.

        Returns what the backward pass needs besides.
        """

    def contract_backward(
        self,
        dx: Tensor,
        a: Tensor,
        b: Tensor,
        kept: Sequence[Tensor],
        da: Tensor,
        db: Tensor,
        outgoing: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        """Write the gradients of own rows of a and b.

        Parameters
        ----------
        kept : what `contract` returned
        meanwhile
            Launches what has nothing to do with it; called once, after the first exchange began.
        """
