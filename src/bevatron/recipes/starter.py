"""Starter configurations: the commented YAML files of the systems, with what matters to begin.

A placeholder is written ``<FILE>``. A key in a comment, ``# key: value  # meaning``, shows a value
that presets or the data decide otherwise.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bevatron.config import leaves
from bevatron.errors import ConfigError

_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>]*>")
_LINE = re.compile(r"^( *)(?:# )?([\w-]+):(?: +([^#\s].*?))?(?: +# (.*))?$")


class Key(NamedTuple):
    """A key of a starter configuration, its value as text, and what it means."""

    path: str
    value: str
    meaning: str

    @property
    def filled(self) -> bool:
        """Whether its value is not a placeholder."""
        return not _PLACEHOLDER.search(self.value)


def starter_keys(text: str) -> list[Key]:
    r"""List the keys of a starter configuration that have a value and a meaning.

    Examples
    --------
    >>> for key in starter_keys("optim:\n  lr: 0.01  # learning rate\n  # ema: 0.9  # average"):
    ...     print(*key)
    optim.lr 0.01 learning rate
    optim.ema 0.9 average
    """
    groups: list[tuple[int, str]] = []
    found = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        indent, key, value, meaning = len(match[1]), match[2], match[3] or "", match[4]
        groups = [group for group in groups if group[0] < indent]
        path = ".".join([*(name for _, name in groups), key])
        if not value:
            groups.append((indent, key))
        elif meaning is not None:
            found.append(Key(path, value, meaning))
    return found


def filled_in(text: str, values: Mapping[str, str]) -> str:
    """Put values into the places of a starter configuration's placeholders, ``NAME`` by ``NAME``.

    Examples
    --------
    >>> filled_in("output: <RUN>", {"RUN": "runs/water"})
    'output: runs/water'
    """
    for name, value in values.items():
        plain = re.fullmatch(r"[\w./+-]+", value) is not None
        text = text.replace(f"<{name}>", value if plain else json.dumps(value, ensure_ascii=False))
    return text


def check_filled(values: Any) -> None:
    """Refuse a configuration that still holds a placeholder.

    Raises ConfigError naming the key.
    """
    for path, value in leaves(values):
        if isinstance(value, str) and _PLACEHOLDER.fullmatch(value):
            raise ConfigError(f"{path}: is still the placeholder {value}; put your own there")
