"""The device of a launch, real or planned."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

AS_IT_IS = contextlib.nullcontext()
"""What `on_device` returns if nothing must change."""


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make a tensor's device the current one, where Triton launches."""
    # Without the check that CUDA is initialised, which a tensor on it implies.
    if not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice():  # noqa: SLF001
        return AS_IT_IS
    return torch.cuda.device(tensor.device)


PLANNED_SMS = 132
"""Number of SMs of an H100 or H200; workspaces grow with it."""

_planned = False


@contextlib.contextmanager
def planned_for_gpu() -> Iterator[None]:
    """Treat CPU tensors as GPU tensors, to plan a GPU computation without a GPU."""
    global _planned  # noqa: PLW0603  no flag travels through operators
    before, _planned = _planned, True
    try:
        yield
    finally:
        _planned = before


def device_of(tensor: Tensor) -> torch.device:
    """Return the device of a tensor, real or planned."""
    return torch.device("cuda") if _planned else tensor.device


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU, or is planned to be."""
    return _planned or tensor.is_cuda


def num_sms(device: torch.device) -> int:
    """Return the number of SMs of a GPU; 1 for a CPU, which interprets kernels."""
    if _planned:
        return PLANNED_SMS
    if device.type != "cuda":
        return 1
    return _multiprocessors(device)


@functools.cache
def cache_bytes(device: torch.device) -> int:
    """Return the size of a GPU's L2 cache; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).L2_cache_size


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor, contiguous, or None."""
    return None if tensor is None else tensor.contiguous()


def pointers(placeholder: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Return tensors for a launch; a placeholder stands in for None, which is never read."""
    return [placeholder if tensor is None else tensor for tensor in tensors]
