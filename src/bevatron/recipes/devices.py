"""The device on which a trained model is used."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from bevatron.errors import ConfigError, OutOfMemoryError, ran_out_of_memory
from bevatron.output import note
from bevatron.parallel.mesh import parse_device, ranks_from_environment


def device_to_use(device: torch.device | str) -> torch.device:
    """Return a device that works; ``auto`` is a GPU if there is one.

    Raises ConfigError if there is no such device here.

    Examples
    --------
    >>> device_to_use("cpu")
    device(type='cpu')
    """
    found = parse_device(device, "device")
    if found.type not in {"cpu", "cuda"}:
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got '{device}'")
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"device: '{device}' cannot be used here ({reason})") from None
    return found


@contextmanager
def fitting(what: str, device: torch.device) -> Iterator[None]:
    """Name what the memory of a device was too small for, with an OutOfMemoryError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's own error is a RuntimeError
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"{device} ran out of memory at {what}") from error


@cache
def announce(device: torch.device, dtype: torch.dtype | str) -> None:
    """Print where a trained model runs and in which precision; once, and on one process."""
    if ranks_from_environment(os.environ)[0] == 0:
        name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
        note(f"running on {device}{name} in {str(dtype).removeprefix('torch.')}")
