"""JSON and YAML with strict access: every error names the file and the path of the key."""

import json
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bevatron.errors import DataError


@dataclass
class Keyed:
    """A value of a file and the path to it (``sequences[2].protein``).

    `refuse_unknown` names a key that was never asked for, so that no misspelt one is dropped.
    """

    file: str
    path: str
    value: Any
    asked: set[str] = field(default_factory=set)

    @property
    def where(self) -> str:
        """File and path of the key, for messages."""
        return f"{self.file}, {self.path}" if self.path else self.file

    def error(self, message: str) -> DataError:
        """Return an error that names this place."""
        return DataError(f"{self.where}: {message}")

    def mapping(self) -> dict[str, Any]:
        """Return the value if it has keys."""
        if not isinstance(self.value, dict):
            raise self.error(f"is {_shown(self.value)}; expected keys and values")
        return self.value

    def has(self, key: str) -> bool:
        """Whether a key is present and not null."""
        self.asked.add(key)
        return not _is_null(self.mapping().get(key))

    def at(self, key: str) -> "Keyed":
        """Return the value of a required key."""
        if not self.has(key):
            raise self.error(f"has no '{key}', which is needed")
        return Keyed(self.file, f"{self.path}.{key}".lstrip("."), self.value[key])

    def items(self, key: str | None = None) -> Iterator["Keyed"]:
        """Yield the values of a list; none if the key is missing."""
        if key is not None:
            if self.has(key):
                yield from self.at(key).items()
            return
        if not isinstance(self.value, list):
            raise self.error(f"is {_shown(self.value)}; expected a list")
        for number, value in enumerate(self.value):
            yield Keyed(self.file, f"{self.path}[{number}]", value)

    def text(self, key: str | None = None, default: str | None = None) -> str:
        """Return a text; a number is returned as written."""
        if key is not None:
            return self.at(key).text() if default is None or self.has(key) else default
        if not isinstance(self.value, str | int | float) or isinstance(self.value, bool):
            raise self.error(f"is {_shown(self.value)}; expected text")
        return str(self.value).strip()

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a text or a list of texts; nothing if the key is missing."""
        if not self.has(key):
            return ()
        place = self.at(key)
        if isinstance(place.value, list):
            return tuple(part.text() for part in place.items())
        return (place.text(),)

    def integer(self, key: str | None = None, default: int | None = None) -> int:
        """Return an integer, which may be written as text."""
        if key is not None:
            return self.at(key).integer() if default is None or self.has(key) else default
        digits = str(self.value).strip()
        if isinstance(self.value, bool) or not digits.removeprefix("-").isdecimal():
            raise self.error(f"is {_shown(self.value)}; expected an integer")
        return int(digits)

    def flag(self, key: str) -> bool:
        """Return true or false; false if the key is missing."""
        if not self.has(key):
            return False
        value = str(self.value[key]).lower()
        if value not in {"true", "false"}:
            raise self.at(key).error(f"is {_shown(self.value[key])}; expected true or false")
        return value == "true"

    def file_path(self, key: str, folder: Path) -> Path | None:
        """Return a path, relative to the folder of the file; None if the key is missing."""
        return folder / Path(self.text(key)).expanduser() if self.has(key) else None

    def only(self) -> tuple[str, "Keyed"]:
        """Return the one key and its value: ``{protein: {...}}``."""
        keys = list(self.mapping())
        if len(keys) != 1:
            raise self.error(f"has {len(keys)} keys ({', '.join(keys)}); expected one, the kind")
        return keys[0], self.at(keys[0])

    def refuse_unknown(self) -> None:
        """Refuse a key that was not asked for."""
        unknown = [key for key in self.mapping() if key not in self.asked]
        if unknown:
            raise self.error(
                f"'{unknown[0]}' is unknown; known are {', '.join(sorted(self.asked))}"
            )


def _is_null(value: object) -> bool:
    # YAML is read as text, so that a component '004' or a chain 'NO' stays what it is.
    return value is None or (isinstance(value, _Plain) and value in {"", "~", "null"})


def _shown(value: object) -> str:
    text = json.dumps(value) if isinstance(value, str | int | float | bool) else ""
    names = {dict: "keys and values", list: "a list", type(None): "null"}
    return text[:60] or names.get(type(value), type(value).__name__)


def parse_json(text: str, name: str) -> Keyed:
    """Parse JSON; a key that occurs twice is refused.

    Raises DataError naming line and column of what is not valid JSON.
    """

    def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twin = next(key for key in keys if keys.count(key) > 1)
            raise DataError(f"{name}: the key '{twin}' occurs twice in one place; keep one")
        return found

    try:
        return Keyed(name, "", json.loads(text, object_pairs_hook=no_twins))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{name}, line {error.lineno}, column {error.colno}: is not valid JSON ({error.msg})"
        ) from None
    except (RecursionError, ValueError):
        raise DataError(
            f"{name}: is nested too deeply or holds a number that is too long"
        ) from None


class _Plain(str):
    """A scalar of YAML that was written without quotes."""

    __slots__ = ()


class _TextLoader(yaml.BaseLoader):
    """Every scalar as text; keys that occur twice are refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Construct a mapping; refuse a key that occurs twice."""
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            keys = [key.value for key, _ in node.value]
            twin = next(key for key in keys if keys.count(key) > 1)
            message = f"the key '{twin}' occurs twice"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        return found


def _plain_text(loader: yaml.BaseLoader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    return text if node.style else _Plain(text)


_TextLoader.add_constructor("tag:yaml.org,2002:str", _plain_text)


def parse_yaml(text: str, name: str) -> Keyed:
    """Parse YAML, all scalars as text.

    Raises DataError naming line and column of what is not valid YAML.
    """
    try:
        return Keyed(name, "", yaml.load(text, _TextLoader))  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise DataError(f"{name}{place}: is not valid YAML ({error.problem})") from None
    except RecursionError:
        raise DataError(f"{name}: is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise DataError(f"{name}: is not valid YAML ({reason})") from None
