"""Short help: what a command does, examples, and of each option the first sentence.

It is made from signatures, docstrings and the commented starter configurations of the systems, so
that it costs no import of torch. ``--help-all`` is tyro's help, with every option.
"""

import dataclasses
import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import tyro

from bevatron.arguments import as_help
from bevatron.recipes.starter import Key, starter_keys
from bevatron.recipes.system import System

CLOSING = "-q prints only results, --debug shows the traceback of an error."

WIDEST = 34
"""Characters of an option and its default; what it means begins behind them."""


SENTENCES = re.compile(r"(?<=\.) (?=[A-Z])")


class Row(NamedTuple):
    """An argument as it is typed, and what it means."""

    typed: str
    meaning: str


def asks_for_help(arguments: Iterable[str]) -> bool:
    """Whether the short help is asked for."""
    return any(argument in {"-h", "--help"} for argument in arguments)


def command_help(function: Callable[..., Any], command: str) -> str:
    """Return the short help of a command.

    Parameters
    ----------
    function : a function whose docstring has a summary line, parameters and examples
    command : the command as it is typed
    """
    parts = _sections(inspect.getdoc(function) or "")
    positional: list[Row] = []
    options: list[Row] = []
    for row, is_positional in _rows(function, parts.get("Parameters", "")):
        (positional if is_positional else options).append(row)
    needed = {
        f"--{name.replace('_', '-')} VALUE"
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
    typed = [
        row.typed for row in (*positional, *options) if row in positional or row.typed in needed
    ]
    usage = " ".join([command, *typed, "[--OPTION VALUE ...]"])
    if json_result(function):
        options.append(Row("--json", "Print only the result, as JSON."))
    return _page(
        usage,
        parts[""],
        parts.get("Examples", ""),
        [positional, options],
        f"--help-all explains all options, {CLOSING}",
    )


def train_help(system: System, command: str, start: type) -> str:
    """Return the short help of ``bevatron train SYSTEM``: the keys of its starter configuration.

    Parameters
    ----------
    system : what is trained
    command : as it is typed
    start : dataclass of the options that say how to start
    """
    examples = [
        f"bevatron train {system.name} --data FILE --output runs/first",
        f"bevatron init {system.name} > first.yaml; bevatron train first.yaml",
    ]
    keys = starter_keys(system.starter_text()) if system.starter else []
    meanings = {key.path: key.meaning for key in keys}
    first = [
        Row(typed, meanings[path])
        for path, typed in (("data.train", "--data FILE ..."), ("output", "--output RUN"))
        if path in meanings
    ]
    rest = [Row(_option(key), key.meaning) for key in keys if key.filled]
    return _page(
        f"{command} --data FILE ... --output RUN [--KEY VALUE ...]",
        f"Train {system.name}: {system.summary}.",
        "\n".join(examples),
        [first, rest, [row for row, _ in _fields(start)]],
        f"`bevatron init {system.name}` prints these keys as a YAML file, --help-all explains all, "
        f"{CLOSING}",
    )


def json_result(function: Callable[..., Any]) -> bool:
    """Whether a command returns a `bevatron.output.Result`, which can be printed as JSON."""
    from bevatron.output import Result

    return inspect.signature(function).return_annotation is Result


def _option(key: Key) -> str:
    value = "VALUE" if key.value in {"null", "[]", "{}"} else key.value
    return f"--{key.path.replace('_', '-')} {value}"


def _page(
    usage: str, summary: str, examples: str, groups: Iterable[Iterable[Row]], closing: str
) -> str:
    width = min(shutil.get_terminal_size((80, 24)).columns, 110)
    lines = [*_filled(f"usage: {usage}", width), "", *_filled(" ".join(summary.split()), width)]
    if examples:
        lines += ["", *(f"  {line}" for line in examples.splitlines())]
    for group in groups:
        rows = list(group)
        if rows:
            lines.append("")
        for typed, meaning in rows:
            text = _filled(SENTENCES.split(meaning)[0], width - WIDEST - 3)
            wide = len(typed) > WIDEST
            lines += [f"  {typed}"] if wide else []
            first = "" if wide else typed
            lines += [f"  {'' if n else first:<{WIDEST}} {line}" for n, line in enumerate(text)]
    return "\n".join([*lines, "", *_filled(closing, width)])


def _filled(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 30), break_on_hyphens=False, break_long_words=False) or [
        ""
    ]


def _rows(function: Callable[..., Any], section: str) -> Iterator[tuple[Row, bool]]:
    """Describe the parameters of a function, and whether each is positional."""
    meanings = _entries(section)
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        yield from _described(name, hints[name], parameter.default, meanings.get(name, ""))


def _fields(cls: type) -> Iterator[tuple[Row, bool]]:
    """Describe the fields of a dataclass of options."""
    meanings = _entries(_sections(inspect.getdoc(cls) or "").get("Attributes", ""))
    hints = typing.get_type_hints(cls, include_extras=True)
    for each in dataclasses.fields(cls):
        yield from _described(
            each.name, hints[each.name], each.default, meanings.get(each.name, "")
        )


def _described(name: str, hint: Any, default: Any, meaning: str) -> Iterator[tuple[Row, bool]]:
    bare, *extras = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else [hint]
    named = next((each for each in extras if hasattr(each, "metavar")), None)
    meaning = meaning or (named and named.help) or ""
    if isinstance(bare, type) and dataclasses.is_dataclass(bare):
        if named is not None and named.name == "":
            yield from _fields(bare)
        else:
            yield Row(f"--{name.replace('_', '-')}.KEY VALUE", meaning), False
        return
    positional = tyro.conf.Positional in extras
    if positional:
        typed = named.metavar if named is not None else name.upper()
        left_out = default is not inspect.Parameter.empty and not typed.startswith("[")
        yield Row(f"[{typed}]" if left_out else typed, meaning), True
        return
    option = f"--{name.replace('_', '-')}"
    choices = [str(each) for each in typing.get_args(bare)] if _is_literal(bare) else []
    if any(choice not in meaning for choice in choices):
        meaning = f"{meaning.removesuffix('.')}: {', '.join(choices)}."
    yield Row(f"{option}{_value(bare, default)}", meaning), False


def _is_literal(bare: Any) -> bool:
    return typing.get_origin(bare) is typing.Literal


def _value(bare: Any, default: Any) -> str:
    """Return what follows an option: its default, else what is expected."""
    if bare is bool:
        return ""
    if default is None or default is inspect.Parameter.empty or default == ():
        return " VALUE"
    listed = default if isinstance(default, tuple) else (default,)
    return " " + " ".join(map(str, listed))


def _sections(docstring: str) -> Mapping[str, str]:
    """Split a docstring at its underlined headings; what comes before them has the name ""."""
    pieces = re.split(r"^(\w+)\n-{3,}\n", as_help(docstring), flags=re.MULTILINE)
    return {"": pieces[0].strip(), **dict(zip(pieces[1::2], pieces[2::2], strict=True))}


def _entries(section: str) -> dict[str, str]:
    """Read the names of a section of parameters and what is said of each."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            names = [name.strip() for name in line.split(",")]
        for name in names if line.startswith(" ") else ():
            found.setdefault(name, []).append(line.strip())
    return {name: " ".join(lines) for name, lines in found.items()}
