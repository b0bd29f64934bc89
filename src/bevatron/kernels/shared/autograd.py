"""Queries to autograd by operators and their backward formulas."""

import torch
from torch import Tensor


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records operations on these, so that a backward pass may come.

    Examples
    --------
    >>> x = torch.ones(1, requires_grad=True)
    >>> needs_grad(None, x), needs_grad(x.detach())
    (True, False)
    """
    wanted = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return wanted and torch.is_grad_enabled()


def empty_gradients(like: Tensor, *given: Tensor | None) -> list[Tensor]:
    """Allocate the gradient of every tensor; one that is not given gets one without elements.

    Parameters
    ----------
    like : where the gradients are allocated
    given : tensors whose shapes and types they have
    """
    return [
        like.new_empty(0)
        if tensor is None
        else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in given
    ]
