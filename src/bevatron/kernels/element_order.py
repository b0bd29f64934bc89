"""Atoms by element, found once per batch: maps of their own for each element run over these."""

from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor


class ElementOrder:
    """The elements of a batch's atoms with, once somebody asks, where those of each element are.

    `order` and `ptr` are computed on the device of the elements without asking it for a number, so
    they can be part of a captured CUDA graph; `counts` waits for the device. Make one for each
    batch and hand it to all layers: an operator that takes ``elements`` takes this too, and sorts
    for itself if it is given a tensor.

    Parameters
    ----------
    elements
        The element of each atom.
    num_elements
        Z. Atoms of elements outside 0..Z-1 belong to none: operators give NaN for them, or refuse.

    Examples
    --------
    >>> order = ElementOrder(torch.tensor([2, 0, 2]), 3)
    >>> order.order, order.ptr, order.counts
    (tensor([1, 0, 2]), tensor([0, 1, 1, 3]), [1, 0, 2])
    """

    def __init__(self, elements: Int[Tensor, " N"], num_elements: int) -> None:
        self.elements, self.num_elements = elements, num_elements

    @classmethod
    def of(cls, elements: "Tensor | ElementOrder", num_elements: int) -> "ElementOrder":
        """Take what an operator was given."""
        return elements if isinstance(elements, ElementOrder) else cls(elements, num_elements)

    @property
    def order(self) -> Int[Tensor, " N"]:
        """The atoms, those of element 0 first."""
        return self._sorted[1]

    @cached_property
    def ptr(self) -> Int[Tensor, " _"]:
        """Where the atoms of each element begin in `order`, and where the last end."""
        ordered = self._sorted[0]
        bounds = torch.arange(self.num_elements + 1, device=ordered.device, dtype=ordered.dtype)
        return torch.searchsorted(ordered, bounds)

    @cached_property
    def inverse(self) -> Int[Tensor, " N"]:
        """The place of each atom in `order`."""
        return torch.argsort(self.order)

    @cached_property
    def counts(self) -> list[int]:
        """The number of atoms of each element."""
        if self.num_elements == 1:
            return [len(self.elements)]
        return self.ptr.diff().tolist()

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        ordered, order = torch.sort(self.elements, stable=True)
        return ordered.contiguous(), order
