"""The device on which a trained model is used."""

import torch

from bevatron.errors import ConfigError


def device_to_use(device: torch.device | str) -> torch.device:
    """Check a device by using it; ``auto`` is a GPU if there is one.

    Raises
    ------
    ConfigError
        If there is no such device here.

    Examples
    --------
    >>> device_to_use("cpu")
    device(type='cpu')
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(
            f"device: '{device}' cannot be used here (expected auto, cpu, cuda or cuda:N)"
        ) from None
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"device: '{device}' cannot be used here ({reason})") from None
    return found
