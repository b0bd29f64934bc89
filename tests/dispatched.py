"""What torch's dispatcher sees: operators by name, the largest tensor that one makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Lists the names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """Keeps the bytes of the largest tensor that any operator makes, and that operator."""

    def __init__(self):
        super().__init__()
        self.nbytes, self.op = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().nbytes() > self.nbytes:
                self.nbytes, self.op = each.untyped_storage().nbytes(), str(func)
        return result
