"""Vocabularies of features as tensors on a device, copied there once."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bevatron.maths.constants import computed_once


@computed_once
def sizes_on(sizes: tuple[int, ...], device: torch.device) -> Int[Tensor, " F"]:
    """Return the number of values of every feature."""
    return torch.tensor(sizes, device=device)


@computed_once
def starts_on(sizes: tuple[int, ...], device: torch.device) -> Int[Tensor, " F"]:
    """Return the offset of every feature if their values are concatenated.

    Examples
    --------
    >>> starts_on((3, 2, 4), torch.device("cpu"))
    tensor([0, 3, 5])
    """
    numbers = torch.tensor(sizes)
    return (numbers.cumsum(0) - numbers).to(device)


@computed_once
def membership_on(sizes: tuple[int, ...], device: torch.device) -> Float[Tensor, "V F"]:
    """Return 1 where a value is one of a feature, else 0, in float32.

    Examples
    --------
    >>> membership_on((1, 2), torch.device("cpu"))
    tensor([[1., 0.],
            [0., 1.],
            [0., 1.]])
    """
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return torch.nn.functional.one_hot(owner, len(sizes)).float().to(device)
