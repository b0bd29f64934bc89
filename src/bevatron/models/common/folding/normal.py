"""Normal random numbers on the device that are a function of a seed.

There is no generator state: a captured step draws new numbers whenever its seed, a tensor, has
changed, and a step repeated on other ranks draws the same.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from bevatron.kernels.graph.csr.dropout import COLUMN, FIRST, HEAD, MASK, mix

Normal = Callable[[tuple[int, ...]], Tensor]
"""Draws standard normal numbers of a shape; each call draws others."""


class SeededNormal:
    """Standard normal numbers by hashing (seed, call, place) and Box and Muller's transform.

    Parameters
    ----------
    seed : int64 on the device
    dtype : type of the numbers
    calls : number of earlier calls; streams of one seed start far apart

    Examples
    --------
    >>> numbers = SeededNormal(torch.tensor(7))((2, 3))
    >>> numbers.shape, bool((numbers == SeededNormal(torch.tensor(7))((2, 3))).all())
    (torch.Size([2, 3]), True)
    """

    def __init__(
        self, seed: Int[Tensor, ""], dtype: torch.dtype = torch.float32, calls: int = 0
    ) -> None:
        self.seed, self.dtype, self.calls = seed, dtype, calls

    def __call__(self, shape: tuple[int, ...]) -> Tensor:
        """Draw numbers of a shape."""
        self.calls += 1
        low, high = self.seed & MASK, (self.seed >> 32) & MASK
        key = mix(low ^ mix((high + self.calls * HEAD) & MASK))
        index = torch.arange(math.prod(shape), device=self.seed.device)
        word = mix(key ^ mix((index + COLUMN) & MASK))
        other = mix((word + FIRST) & MASK ^ mix((index * HEAD + key) & MASK))
        first, second = (((each + 0.5) * 2.0**-32).double() for each in (word, other))
        numbers = (-2.0 * first.log()).sqrt() * (2.0 * torch.pi * second).cos()
        return numbers.to(self.dtype).view(shape)
