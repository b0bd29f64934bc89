"""Checks and presets that the configurations of several models share."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from bevatron.config import unknown_key
from bevatron.errors import ConfigError

C = TypeVar("C")


def check_ranges(config: object, ranges: Iterable[tuple[str, float, float]]) -> None:
    """Check that entries are within (name, lowest, highest).

    Raises ConfigError naming the first entry that is not.
    """
    for name, low, high in ranges:
        value = getattr(config, name)
        if not low <= value <= high:
            expected = f"{low} or more" if high == math.inf else f"{low} to {high}"
            raise ConfigError(f"{name}: expected {expected}, got {value}")


def check_dropout(rate: float) -> None:
    """Check a rate of dropout; ConfigError if it is not in [0, 1)."""
    if not 0 <= rate < 1:
        raise ConfigError(f"dropout: expected one in [0, 1), got {rate}")


def check_heads(width: int, num_heads: int) -> None:
    """Check that heads divide the channels among them; ConfigError if they cannot."""
    if num_heads < 1 or width % num_heads:
        raise ConfigError(f"num_heads: {width} channels are no multiple of {num_heads} heads")


def preset_values(presets: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return a copy of the preset of this name.

    Raises ConfigError if there is no such preset, listing the existing ones.
    """
    if name not in presets:
        raise ConfigError(f"preset: there is no '{name}' (known: {', '.join(presets)})")
    return dict(presets[name])


def from_preset(
    config: type[C], presets: Mapping[str, Mapping[str, Any]], name: str, changes: Mapping[str, Any]
) -> C:
    """Build a configuration from the preset of a name, with changes.

    Raises ConfigError if there is no such preset or entry.
    """
    known = {field.name: field.type for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    for key in changes:
        if key not in known:
            raise unknown_key(key, known)
    return config(**{**preset_values(presets, name), **changes})
