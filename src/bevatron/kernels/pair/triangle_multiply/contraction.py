"""Protocol of a contraction for a pair whose rows are distributed."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class Contraction(Protocol):
    """Contracts this process's rows R of a and b, matrices [planes, R, N], with all rows."""

    def contract(self, a: Tensor, b: Tensor, x: Tensor, outgoing: bool) -> Sequence[Tensor]:
        """Write this process's rows i of ``x_ij = sum_k a_ik b_jk`` (incoming: ``a_ki b_kj``).

        Returns what else the backward pass needs.
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
        """Write the gradients of this process's rows of a and b.

        Parameters
        ----------
        kept : what `contract` returned
        meanwhile
            Launches independent work; called once, after the first exchange has started.
        """
