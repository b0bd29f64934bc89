"""Tensors that depend on plain numbers alone: made once, and kept."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
R = TypeVar("R")


def computed_once(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a function of hashable arguments.

    What it makes serves training even if it is first asked for in inference mode, or while a step
    is planned on tensors without memory (`bevatron.train.memory_plan`).

    Examples
    --------
    >>> @computed_once
    ... def squares(count: int) -> list[int]:
    ...     return [i * i for i in range(count)]
    >>> squares(3) is squares(3)
    True
    """

    @functools.cache
    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(mode=False), _disable_current_modes():
            return function(*args, **kwargs)

    return cast("Callable[P, R]", made)
