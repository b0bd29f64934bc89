"""One floating-point type for all that an operator multiplies."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def check_one_type(operator: str, tensors: Mapping[str, Tensor | Sequence[Tensor]]) -> None:
    """Refuse tensors of several types, which a kernel would round to that of the first.

    Under autocast they may differ: there torch makes them one type where they are multiplied.

    Parameters
    ----------
    operator
        What was called.
    tensors
        By the name of the argument, the one whose type the result has first.

    Raises
    ------
    ValueError
        If one has another type than the first; it names both.

    Examples
    --------
    >>> check_one_type("product", {"x": torch.ones(1), "weight": torch.ones(1).double()})
    Traceback (most recent call last):
    ...
    ValueError: product: x is float32, but weight is float64; make them one type
    """
    listed = [
        (name, tensor)
        for name, given in tensors.items()
        for tensor in ([given] if isinstance(given, Tensor) else given)
    ]
    first_name, first = listed[0]
    for name, tensor in listed[1:]:
        if tensor.dtype != first.dtype and not torch.is_autocast_enabled(first.device.type):
            first_type, other = (str(t.dtype).removeprefix("torch.") for t in (first, tensor))
            raise ValueError(
                f"{operator}: {first_name} is {first_type}, but {name} is {other}; make them one "
                "type"
            )
