"""Which gradients somebody waits for: what nobody wants is not computed."""

from typing import Any

import torch
from torch import Tensor


def wanted(ctx: Any, count: int) -> list[bool]:
    """Say for each of the first ``count`` inputs whether its gradient is needed in this backward.

    ``ctx.needs_input_grad`` tells only whether an input requires one at all. With forces, the inner
    `torch.autograd.grad` asks for gradients by positions alone, and those of all weights would be
    computed in vain.
    """
    needed = list(ctx.needs_input_grad[:count])
    if torch.compiler.is_compiling():
        return needed
    return [need and _awaited(ctx.next_functions[i][0]) for i, need in enumerate(needed)]


def _awaited(node: Any) -> bool:
    """Ask the engine whether it will run the node that takes this gradient."""
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # It cannot tell of leaves that are differentiated by; these are wanted.
        return True


def none_unless(needs: list[bool], gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Replace the empty placeholders of gradients that were not computed."""
    return tuple(g if need else None for need, g in zip(needs, gradients, strict=True))
