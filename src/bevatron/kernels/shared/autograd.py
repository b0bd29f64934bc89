"""What operators and their backward formulas ask autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is made of these now: what a backward pass needs is worth it.

    Examples
    --------
    >>> x = torch.ones(1, requires_grad=True)
    >>> is_differentiated(None, x), is_differentiated(x.detach())
    (True, False)
    """
    wanted = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return wanted and torch.is_grad_enabled()


def is_wanted(ctx: Any, position: int) -> bool:
    """Whether the running backward pass needs the gradient by an input of an operator.

    ``ctx.needs_input_grad`` says only that the input requires gradients. The forces of a potential
    are gradients by positions alone; then those by weights, which also require gradients, would be
    computed and thrown away.

    Parameters
    ----------
    ctx
        What `torch.library.register_autograd` hands to ``backward``.
    position
        Place of the input among the operator's arguments.
    """
    if not ctx.needs_input_grad[position]:
        return False
    if torch.compiler.is_compiling():
        return True
    node = ctx.next_functions[position][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))  # noqa: SLF001
    except (AttributeError, RuntimeError):
        # A leaf, of which the engine does not tell, or a torch that does not offer this.
        return True


def empty_gradients(like: Tensor, *given: Tensor | None) -> list[Tensor]:
    """Allocate the gradient of every tensor; one that is not given gets one without elements.

    Parameters
    ----------
    like
        Where the gradients are allocated.
    given
        Of whose shapes and types they are.
    """
    return [
        like.new_empty(0) if tensor is None else like.new_empty(tensor.shape, dtype=tensor.dtype)
        for tensor in given
    ]


def of_given(
    given: Sequence[Tensor | None], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Put None for gradients of tensors that are not given, as autograd wants it."""
    return tuple(
        None if tensor is None else gradient
        for tensor, gradient in zip(given, gradients, strict=True)
    )
