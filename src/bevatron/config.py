"""Configurations: frozen dataclasses, read strictly from YAML.

An unknown key or a wrong type is one sentence with the path of the key and what was expected.
`to_dict` and `from_dict` are inverse to each other; `fingerprint` is a stable hash of the values.
"""

import dataclasses
import hashlib
import json
import logging
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from bevatron.errors import ConfigError

T = TypeVar("T")

log = logging.getLogger(__name__)

RENAMED = {"valid_fraction": "valid_size", "test_fraction": "test_size"}
"""Old name of a key -> its name; configurations and checkpoints of 0.1.0 have the old ones."""


def from_dict(cls: type[T], values: Any, path: str = "") -> T:
    """Build the dataclass ``cls`` from plain values, strictly.

    Raises ConfigError for an unknown or missing key or a value of the wrong type.

    Parameters
    ----------
    cls
        A frozen dataclass; its fields may be bool, int, float, str, Path, Literal, optional and
        union types, tuples, dicts with string keys and other such dataclasses. An ``InitVar`` is an
        old key, which it converts.
    values : what a YAML or JSON file holds
    path : path of ``values`` in the whole configuration, for messages

    Examples
    --------
    >>> @dataclasses.dataclass(frozen=True)
    ... class Optim:
    ...     lr: float = 0.01
    >>> from_dict(Optim, {"lr": "3e-4"})
    Optim(lr=0.0003)
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{path or 'the configuration'}: expected keys and values, got {values!r}"
        )
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    old = {name: hint.type for name, hint in hints.items() if isinstance(hint, dataclasses.InitVar)}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields and key not in old:
            raise unknown_key(where, {name: hints[name] for name in fields})
        arguments[key] = _convert(old.get(key, hints[key]), value, where)
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in arguments:
            raise ConfigError(f"{path}.{name}: missing" if path else f"{name}: missing")
    try:
        return cls(**arguments)
    except ConfigError as error:
        text, (outer, _, own) = str(error), path.rpartition(".")
        where = "" if text.startswith(path) else outer if text.startswith(f"{own}.") else path
        raise ConfigError(f"{where}.{text}" if where else text) from None


def to_dict(config: Any) -> dict[str, Any]:
    """Turn a configuration into plain values (dict, list, str, int, float, bool, None)."""
    return {
        field.name: _plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.init
    }


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change plain values: what holds keys on both sides key by key, everything else as a whole.

    Examples
    --------
    >>> merged({"optim": {"lr": 0.1, "ema": 0.99}, "seed": 0}, {"optim": {"lr": 0.2}})
    {'optim': {'lr': 0.2, 'ema': 0.99}, 'seed': 0}
    """
    changed = dict(base)
    for key, value in changes.items():
        old = changed.get(key)
        nested = isinstance(old, Mapping) and isinstance(value, Mapping)
        changed[key] = merged(old, value) if nested else value  # type: ignore[arg-type]
    return changed


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what plain values hold, each with the path of its key.

    Examples
    --------
    >>> [*leaves({"optim": {"lr": 0.1, "betas": [0.9, 0.99]}})]
    [('optim.lr', 0.1), ('optim.betas', 0.9), ('optim.betas', 0.99)]
    """
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, Sequence) and not isinstance(values, str):
        for value in values:
            yield from leaves(value, path)
    else:
        yield path, values


def take_renamed(config: Any, path: str, **old: Any) -> None:
    """Set the keys of a frozen dataclass whose old names, each an ``InitVar``, were given."""
    for name, value in old.items():
        if value is not None:
            object.__setattr__(config, RENAMED[name], value)
            log.warning("%s.%s is now %s.%s: %s", path, name, path, RENAMED[name], value)


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of keys and values.

    Raises ConfigError if the file is missing, is not YAML, holds a key twice or holds no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text; expected a YAML file") from None
    try:
        values = yaml.load(text, Loader=_StrictLoader)  # noqa: S506  a SafeLoader by inheritance
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{path}{line}: not valid YAML ({problem})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values")
    return values


def dump_yaml(values: Any) -> str:
    """Write a configuration, or the plain values of one, as YAML in the order that they have."""
    return yaml.safe_dump(_plain(values), sort_keys=False, allow_unicode=True)


def fingerprint(values: Any, length: int = 16) -> str:
    """Hash plain values or a configuration; equal values give equal hashes on any machine."""
    plain = json.dumps(_plain(values), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(plain.encode()).hexdigest()[:length]


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses duplicate keys and keys that are lists or mappings."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError):  # of a date like 2026-13-99, !!int abc
            text = str(node.value)[:40]
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"'{text}' is not a valid date or number; put it in quotes",
                node.start_mark,
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    "expected a plain key; has a template such as {{ name }} not been filled in?",
                    key_node.start_mark,
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' occurs twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def unknown_key(path: str, known: Mapping[str, Any]) -> ConfigError:
    """Return the error of a key that is not among the known ones; it suggests a similar one.

    ``known`` has the type of each; a key of the same name in one of them is suggested too.
    """
    name = path.rpartition(".")[2]
    close = get_close_matches(name, known, n=1) or [
        f"{group}.{name}"
        for group, hint in known.items()
        if dataclasses.is_dataclass(hint)
        and name in {each.name for each in dataclasses.fields(hint)}
    ]
    other = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}"
    return ConfigError(f"{path}: unknown key ({other})")


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Convert ``value`` to the annotated type or say what was expected."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _convert(arguments[0], value, where)
    may_be_none = hint is Any or type(None) in arguments
    if value is None and not may_be_none and origin is not Literal:
        raise ConfigError(
            f"{where}: has no value; give {_name(hint)}, or take the key out for the default"
        )
    if origin in {typing.Union, types.UnionType}:
        return _convert_union(arguments, value, where)
    if origin is Literal:
        if value in arguments:
            return value
        expected = ", ".join(repr(choice) for choice in arguments)
        raise ConfigError(f"{where}: expected one of {expected}, got {value!r}")
    if origin is tuple:
        return _convert_tuple(arguments, value, where)
    if origin in {dict, Mapping} or origin is typing.get_origin(Mapping[str, int]):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected keys and values, got {value!r}")
        key_hint, item_hint = arguments
        return {
            _convert(key_hint, key, where): _convert(item_hint, item, f"{where}.{key}")
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_dict(hint, value, where)  # type: ignore[arg-type]
    return _convert_scalar(hint, value, where)


def _convert_union(hints: Sequence[Any], value: Any, where: str) -> Any:
    if value is None and type(None) in hints:
        return None
    problems = []
    candidates = [hint for hint in hints if hint is not type(None)]
    for hint in candidates:
        try:
            return _convert(hint, value, where)
        except ConfigError as error:
            if isinstance(value, Mapping) and getattr(hint, "__origin__", None) is dict:
                raise  # it names the key inside that is wrong
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    expected = " or ".join(_name(hint) for hint in candidates)
    raise ConfigError(f"{where}: expected {expected}, got {value!r}")


def _convert_tuple(hints: Sequence[Any], value: Any, where: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{where}: expected a list, got {value!r}")
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = [hints[0]] * len(value)
    if len(hints) != len(value):
        raise ConfigError(f"{where}: expected {len(hints)} values, got {len(value)}")
    return tuple(
        _convert(hint, item, f"{where}[{i}]")
        for i, (hint, item) in enumerate(zip(hints, value, strict=True))
    )


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if hint is float and not isinstance(value, bool):
        # YAML 1.1 reads 3e-4, without a dot, as text.
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{where}: expected a number, got {value!r}") from None
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is Path and isinstance(value, str | Path):
        return Path(os.path.expanduser(value))  # noqa: PTH111  leaves an unknown ~NAME as it is
    if hint is not bool and isinstance(value, bool):
        # The name NO of a column, or the element No.
        quotes = "; put a word such as no or on in quotes" if hint is str else ""
        raise ConfigError(f"{where}: expected {_name(hint)}, got {value!r}{quotes}")
    if not isinstance(value, hint):
        raise ConfigError(f"{where}: expected {_name(hint)}, got {value!r}")
    return value


def _name(hint: Any) -> str:
    """Name a type as a user would."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(_name(one) for one in arguments if one is not type(None))
    if origin is Literal:
        choices = ", ".join(repr(choice) for choice in arguments)
        return choices if len(arguments) == 1 else f"one of {choices}"
    if origin is tuple:
        return "a list"
    if origin in {dict, Mapping} or dataclasses.is_dataclass(hint):
        return "keys and values"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        Path: "a path",
    }
    return names.get(hint) or str(getattr(hint, "__name__", hint))
