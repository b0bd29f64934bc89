"""What operators and their backward formulas ask of autograd."""

import torch
from torch import Tensor


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records operations on these tensors, so that a backward pass may follow.

    Examples
    --------
    >>> x = torch.ones(1, requires_grad=True)
    >>> needs_grad(None, x), needs_grad(x.detach())
    (True, False)
    """
    wanted = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return wanted and torch.is_grad_enabled()


def empty_gradients(like: Tensor, *given: Tensor | None) -> list[Tensor]:
    """Allocate the gradient of every tensor; None gets an empty one.

    Parameters
    ----------
    like : gradients are allocated on its device
    given : tensors of the shapes and types of the gradients
    """
    return [
        like.new_empty(0)
        if tensor is None
        else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in given
    ]
