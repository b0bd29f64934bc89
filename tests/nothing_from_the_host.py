"""A check on a CPU that a step can be captured as a CUDA graph."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NothingFromTheHost(TorchDispatchMode):
    """Refuses what a captured step cannot hold: numbers asked for, and tensors made of numbers."""

    refused = (
        "_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "linalg_svd",
        "linalg_eigh", "linalg_inv_ex",
    )  # fmt: skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert not name.lstrip("_").startswith(self.refused), name
        assert name not in self.refused, name
        if name in {"index", "index_put", "_index_put_impl_"}:
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), name
        return func(*args, **(kwargs or {}))
