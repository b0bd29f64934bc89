"""The types and devices that a Triton kernel supports."""

import importlib.util
import os
from collections.abc import Callable

import torch

Obstacle = Callable[[torch.device, torch.dtype], str | None]
"""Says why an implementation cannot run on a device and type, or None if it can."""


def up_to_float32(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a kernel that computes in float32 cannot run on a type."""
    del device
    if dtype in {torch.bfloat16, torch.float16, torch.float32}:
        return None
    return f"it computes in float32 from bfloat16, float16 or float32, not {dtype}"


def float32_or_float64(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a kernel cannot run on a type whose sums would be too coarse."""
    del device
    if dtype in {torch.float32, torch.float64}:
        return None
    return f"it computes in float32 or float64, not in {str(dtype).removeprefix('torch.')}"


def no_float64_on_gpu(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a kernel that takes float64 only under the interpreter cannot run."""
    if dtype == torch.float64 and device.type == "cuda":
        return "it computes in float32 on a GPU, not float64"
    return None


def without_triton(device: torch.device) -> str | None:
    """Return why no Triton kernel can run on a device, or None."""
    # Not while compiling: torch 2.11 cannot trace the search, and a GPU has triton then.
    if not torch.compiler.is_compiling() and importlib.util.find_spec("triton") is None:
        return "the package 'triton' is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are on the CPU, where Triton needs TRITON_INTERPRET=1"
    if device.type not in {"cpu", "cuda"}:
        return f"Triton does not run on the device '{device.type}'"
    return None
