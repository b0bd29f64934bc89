"""How many bytes autograd keeps for a backward pass."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(compute: Callable[[], Tensor], excluded: Iterable[Tensor] = ()) -> int:
    """Count the memory that a computation keeps until its backward pass.

    Storage that several operations keep is counted once; that of ``excluded`` tensors (weights)
    not at all.

    Examples
    --------
    >>> x = torch.ones(10, requires_grad=True)
    >>> saved_bytes(lambda: (x * 2).exp().sum())
    40
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor.detach())  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(kept.values())
