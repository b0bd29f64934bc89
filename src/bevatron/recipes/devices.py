"""The device on which a trained model is used."""

import torch

from bevatron.errors import ConfigError
from bevatron.parallel.mesh import parse_device


def device_to_use(device: torch.device | str) -> torch.device:
    """Return a device that works; ``auto`` is a GPU if there is one.

    Raises
    ------
    ConfigError
        If there is no such device here.

    Examples
    --------
    >>> device_to_use("cpu")
    device(type='cpu')
    """
    found = parse_device(device, "device")
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"device: '{device}' cannot be used here ({reason})") from None
    return found
