"""Operators that launch their kernels without torch's dispatcher where nobody looks on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def is_traced(tensor: Tensor) -> bool:
    """Say whether an operator must go through the dispatcher: a compiler or a mode looks on.

    Else its kernels are launched directly: with the fourteen tensors of a matrix's structure, a
    custom operator and its backward pass take half a millisecond of the host's time.
    """
    if torch.compiler.is_compiling() or type(tensor) not in {Tensor, torch.nn.Parameter}:
        return True
    # There is no public way to ask for either.
    transformed = torch._C._are_functorch_transforms_active()  # noqa: SLF001
    return transformed or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001


def direct(
    forward: Callable[..., Any],
    save: Callable[..., None],
    backward: Callable[..., Any],
    *,
    once: bool = True,
) -> Callable[..., Any]:
    """Return a function with the gradient that a custom operator made of these would have.

    Parameters
    ----------
    forward, save, backward
        As `torch.library.custom_op` and ``register_autograd`` take them; no output may be a list.
    once
        The gradient has no derivative: to ask for one is refused.
    """

    def backward_of_tensors(ctx: Any, *grads: Tensor | None) -> Any:
        found = backward(ctx, *grads)
        return tuple(None if isinstance(each, list) else each for each in found)

    gradient = once_differentiable(backward_of_tensors) if once else backward_of_tensors

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            outputs = forward(*inputs)
            save(ctx, inputs, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return gradient(ctx, *grads)

    apply: Callable[..., Any] = Direct.apply
    return apply
