"""Atoms sorted by element, once per batch, for operators with one matrix per element."""

import torch
from jaxtyping import Int
from torch import Tensor


class ElementOrder:
    """The elements of a batch's atoms, with the atoms of each element, computed on first use.

    `order` and `ptr` are computed on the device of the elements without synchronising, so a CUDA
    graph can capture them; `counts` waits for the device. Make one per batch and pass it to
    all layers: an operator that takes ``elements`` takes this too, and sorts for itself if it
    is given a tensor.

    Parameters
    ----------
    elements : the element of each atom
    num_elements
        Z. Operators return NaN for atoms whose element is outside 0..Z-1, or refuse them.

    Examples
    --------
    >>> order = ElementOrder(torch.tensor([2, 0, 2]), 3)
    >>> order.order, order.ptr, order.counts
    (tensor([1, 0, 2]), tensor([0, 1, 1, 3]), [1, 0, 2])
    """

    def __init__(self, elements: Int[Tensor, " N"], num_elements: int) -> None:
        self.elements, self.num_elements = elements, num_elements
        # Not functools.cached_property: torch.compile cannot trace it.
        self._sorted: tuple[Tensor, Tensor] | None = None
        self._ptr: Tensor | None = None
        self._inverse: Tensor | None = None
        self._counts: list[int] | None = None

    @classmethod
    def of(cls, elements: "Tensor | ElementOrder", num_elements: int) -> "ElementOrder":
        """Wrap the argument of an operator."""
        return elements if isinstance(elements, ElementOrder) else cls(elements, num_elements)

    @property
    def order(self) -> Int[Tensor, " N"]:
        """The atoms, those of element 0 first."""
        return self._sort()[1]

    @property
    def ptr(self) -> Int[Tensor, " _"]:
        """Offsets of each element's atoms in `order`."""
        if self._ptr is None:
            ordered = self._sort()[0]
            bounds = torch.arange(self.num_elements + 1, device=ordered.device, dtype=ordered.dtype)
            self._ptr = torch.searchsorted(ordered, bounds)
        return self._ptr

    @property
    def inverse(self) -> Int[Tensor, " N"]:
        """The place of each atom in `order`."""
        if self._inverse is None:
            self._inverse = torch.argsort(self.order)
        return self._inverse

    @property
    def counts(self) -> list[int]:
        """The number of atoms of each element; waits for the device if there are several."""
        if self._counts is None:
            one = self.num_elements == 1
            self._counts = [len(self.elements)] if one else self.ptr.diff().tolist()
        return self._counts

    def _sort(self) -> tuple[Tensor, Tensor]:
        if self._sorted is None:
            # Fewer digits mean fewer passes of the radix sort; unknown elements become -1 or Z.
            narrow = torch.int16 if self.num_elements < 2**15 else torch.int64
            known = self.elements.long().clamp(-1, self.num_elements).to(narrow)
            ordered, order = torch.sort(known, stable=True)
            self._sorted = ordered.contiguous(), order
        return self._sorted
