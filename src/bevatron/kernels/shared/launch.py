"""The device that kernels are launched on, real or planned for."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_AS_IT_IS = contextlib.nullcontext()


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Set a tensor's device as the current one: Triton launches on the current device."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(tensor.device)


PLANNED_SMS = 132
"""Of an H100 or H200; workspaces grow with it."""

_planned = False


@contextlib.contextmanager
def planned_for_gpu() -> Iterator[None]:
    """Take tensors on the CPU for those of a GPU: to plan what is computed there, without it."""
    global _planned  # noqa: PLW0603  no flag travels through operators
    before, _planned = _planned, True
    try:
        yield
    finally:
        _planned = before


def device_of(tensor: Tensor) -> torch.device:
    """Return the device that a tensor is on, or is planned to be on."""
    return torch.device("cuda") if _planned else tensor.device


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU, or is planned to be."""
    return _planned or tensor.is_cuda


def num_sms(device: torch.device) -> int:
    """Return the number of SMs of a GPU; 1 for a CPU, where kernels are interpreted."""
    if _planned:
        return PLANNED_SMS
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
