"""Device properties for kernel launches."""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

_AS_IT_IS = contextlib.nullcontext()


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Set a tensor's device as the current one: Triton launches on the current device."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(tensor.device)


def num_sms(device: torch.device) -> int:
    """Return the number of SMs of a GPU; 1 for a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return _multiprocessors(device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor that is given with contiguous memory."""
    return None if tensor is None else tensor.contiguous()


def pointers(placeholder: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Return tensors for a launch, the placeholder for those that are None and will not be read."""
    return [placeholder if tensor is None else tensor for tensor in tensors]
