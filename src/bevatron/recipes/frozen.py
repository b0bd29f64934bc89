"""Freezing of parameters."""

import fnmatch
from collections.abc import Sequence

from torch import nn

from bevatron.errors import ConfigError


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match.

    Raises ConfigError if a pattern matches nothing, or everything is frozen.

    Parameters
    ----------
    patterns : names with wildcards as in `fnmatch`: ``embedding.*``
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            parts = ", ".join(sorted({name.split(".")[0] for name in names}))
            raise ConfigError(
                f"finetune.frozen: no parameter matches '{pattern}' (there are: {parts}.*)"
            )
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            parameter.requires_grad = False
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("finetune.frozen: all parameters are frozen, nothing would be learnt")
