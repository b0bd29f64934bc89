"""Parsing of the command line with tyro; every mistake becomes one sentence.

For a wrong option tyro prints a box of several lines and exits; here it is a `ConfigError` like any
other mistake. Names of options in messages of the library (``energy_key='e'``) become what a user
types (``--labels.energy-key e``).
"""

import dataclasses
import functools
import io
import os
import re
import shlex
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any, TypeVar

import tyro

from bevatron.errors import ConfigError

T = TypeVar("T")

_PARAMETER = re.compile(r"^( *)(\w+(?:, \w+)*) : (\S+)(.*?)\.?$", re.MULTILINE)
"""A parameter in a docstring: indentation, names, first word and rest of its meaning."""


def parse(target: Callable[..., T], arguments: Sequence[str], command: str, **options: Any) -> T:
    """Parse ``arguments`` into what ``target`` returns: `tyro.cli` with our errors.

    Raises ConfigError for an unknown option, a missing one or a wrong value; SystemExit after
    ``--help`` was printed.

    Parameters
    ----------
    target : a dataclass or a function
    command : the command itself, for messages and help
    """
    _write_help(target)  # always: tyro remembers the docstrings that it has read
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            made: T = tyro.cli(
                target,
                args=_with_flags(_with_minus(arguments), flags(target)),
                prog=command,
                config=(tyro.conf.AvoidSubcommands,),
                **options,
            )
    except ConfigError as error:
        raise ConfigError(_with_path(str(error), arguments)) from None
    except SystemExit as stop:
        if stop.code in {None, 0}:
            raise
        for each in arguments:
            if each.startswith("-") and os.path.exists(each):  # noqa: PTH110  see `_unknown`
                raise ConfigError(f"{each}: is taken for an option; write ./{each}") from None
        raise ConfigError(sentence(printed.getvalue(), command)) from None
    sys.stderr.write(printed.getvalue())  # warnings of old names
    return made


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """Return the value of an option; of one given several times, the last, as tyro does."""
    value = None
    for i, argument in enumerate(arguments):
        if argument == flag and i + 1 < len(arguments):
            value = arguments[i + 1]
        elif argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
    return value


def call(function: Callable[..., T], arguments: Sequence[str], command: str) -> T:
    """Call a function with arguments from the command line, which `parse` reads."""

    @functools.wraps(function)
    def later(*args: Any, **kwargs: Any) -> Callable[[], T]:
        return functools.partial(function, *args, **kwargs)

    return parse(later, arguments, command)()


def _with_path(message: str, arguments: Sequence[str]) -> str:
    """Write a key that a message begins with as the whole path of the option that was typed.

    tyro makes the innermost parts of a configuration first, which do not know where they are.
    """
    key = message.partition(":")[0]
    ending = "." + key.replace("_", "-")
    typed = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    paths = {option[2:] for option in typed if option.replace("_", "-").endswith(ending)}
    if len(paths) != 1:
        return message
    return paths.pop()[: -len(key)] + message


def _write_help(target: Any) -> None:
    """Rewrite the docstrings that help is made from."""
    documented = [*getattr(target, "__mro__", [target])]
    while hasattr(documented[-1], "__wrapped__"):
        documented.append(documented[-1].__wrapped__)
    for each in documented:
        text = as_help(each.__doc__ or "")
        if text != (each.__doc__ or ""):
            each.__doc__ = text
    for hint in _hints(target).values():
        for part in (hint, *typing.get_args(hint)):
            if isinstance(part, type) and dataclasses.is_dataclass(part):
                _write_help(part)


def as_help(docstring: str) -> str:
    """Return a docstring without markup, what it says of each parameter in a sentence.

    Examples
    --------
    >>> print(as_help("lr : learning rate, ``cosine`` decays it"))
    lr
        Learning rate, cosine decays it.
    """
    return _PARAMETER.sub(_in_a_sentence, docstring).replace("``", "")


def _in_a_sentence(found: re.Match[str]) -> str:
    indent, names, first, rest = found.groups()
    first = first.capitalize() if re.fullmatch("[a-z-]+[,;:]?", first) else first
    return f"{indent}{names}\n{indent}    {first}{rest}."


def sentence(box: str, command: str) -> str:
    """Turn the box that tyro prints into one sentence.

    Examples
    --------
    >>> sentence("Unrecognized options: --lrr", "bevatron train mace")
    'there is no option --lrr; `bevatron train mace --help-all` shows all'
    """
    # Where the terminal has nothing better, the frame is drawn in ASCII.
    lines = [re.sub(r"^[\s│╭╰|+]+|[\s│╮╯|+]+$", "", line) for line in box.splitlines()]
    lines = [line for line in lines if not re.fullmatch(r"[─-].*[─-]", line)]
    text = " ".join(line for line in lines if line)
    unknown = re.search(
        r"Unrecognized options: (.*?)(?:$| Perhaps you meant| Arguments sim| For )", text
    )
    if unknown:
        return _unknown(unknown[1], text, command)
    missing = re.search(r"Missing from .*?:(.*?)(?:For full helptext|$)", " ".join(lines))
    if missing:
        names = [
            line.split()[0] for line in lines if re.fullmatch(r"(--\S+|[A-Z]{2,})( .*)?", line)
        ]
        given = ", ".join(dict.fromkeys(names))
        return f"`{command}` needs {given}; `{command} --help` says more"
    whole = re.search(r"Argument helptext: \S+ \[?INT\b", text)
    text = re.split(r" (?:Got errors:|Argument helptext:|For full helptext)", text)[0].strip()
    for pattern, replacement in _WORDING:
        text = re.sub(pattern, replacement, text)
    if whole:  # tyro names the type of several numbers only there
        text = text.replace("expected numbers", "expected whole numbers")
    text = re.sub(r"(?<=expected )[^ ]*[A-Z{|].*(?=, got )", _plain_types, text)
    return text.removesuffix(".")


def _plain_types(found: re.Match[str]) -> str:
    """Write ``{None}|INT|{auto}`` and the like in plain English."""
    text = found[0]
    for pattern, replacement in _TYPES:
        text = re.sub(pattern, replacement, text)
    return text.removeprefix(" or ")


def flags(target: Any, prefix: str = "") -> frozenset[str]:
    """Name the options of a dataclass or function that are plain switches.

    Examples
    --------
    >>> @dataclasses.dataclass
    ... class Options:
    ...     dry_run: bool = False
    >>> flags(Options)
    frozenset({'dry-run'})
    """
    found: set[str] = set()
    for name, hint in _hints(target).items():
        bare = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
        hidden = typing.get_args(hint)[1:] if bare is not hint else ()
        unnamed = any(getattr(item, "name", None) == "" for item in hidden)
        path = prefix if unnamed else f"{prefix}{name.replace('_', '-')}"
        if bare is bool:
            found.add(path)
        elif isinstance(bare, type) and dataclasses.is_dataclass(bare):
            found |= flags(bare, path if unnamed else f"{path}.")
    return frozenset(found)


def as_typed(message: str, options: str) -> str:
    """Spell the options in a message as they are typed.

    Parameters
    ----------
    message : from the library, with Python's names
    options
        Prefix of the options for labels: ``--labels.`` or ``--data.labels.``; empty = the command
        takes none of them, they are spelled as keys of the run's YAML file.

    Examples
    --------
    >>> as_typed("set energy_key='E' if that is it", "--labels.")
    "set --labels.energy-key 'E' if that is it"
    >>> as_typed("choose with columns.targets", "")
    'choose with data.columns.targets'
    """
    if not options:
        typed = as_typed(message, "--data.labels.")
        return re.sub(r"--([a-z]+\.[\w.-]*\w)", lambda found: found[1].replace("-", "_"), typed)
    text = re.sub(
        rf"(?:data\.)?(?:labels\.)?\b({_KEYS})_key\b(?:=('[^']*'))?",
        lambda found: f"{options}{found[1]}-key" + (f" {found[2]}" if found[2] else ""),
        message,
    )
    text = re.sub(r"(?:data\.)?(?:labels\.)?\bgroup_weights\b", f"{options}group-weights", text)
    text = re.sub(r"\ballow_(zero_labels|unlabelled)\b", _allow(options), text)
    text = text.replace("oversized='alone'", "--batch.oversized alone")
    before = options.removesuffix("labels.")
    text = re.sub(r"(?<![\w.-])(?:data\.)?(columns\.[a-z]+)", rf"{before}\1", text)
    if options.startswith("--data."):
        # Not after the name of a YAML file, whose key it is.
        text = re.sub(r"(?<=[ (])(?<!ml: )data\.[a-z_.]*[a-z]", _dashed, text)
        text = re.sub(r"\bduplicates='(\w+)'", r"--data.read.duplicates \1", text)
    return text.replace("pass `trust=True`", f"pass `{options}trust`")


def typed_arguments(message: str) -> str:
    """Spell Python's arguments in backticks as they are typed.

    Examples
    --------
    >>> typed_arguments('a run; `resume="auto"` resumes it, `overwrite=True` replaces it')
    'a run; `--resume auto` resumes it, `--overwrite` replaces it'
    """

    def typed(found: re.Match[str]) -> str:
        value = f" {found[2]}" if found[2] else ""
        return f"`--{found[1].replace('_', '-')}{value}`"

    return re.sub(r"`(\w+)=(?:\"([^\"`]*)\"|True)`", typed, message)


_KEYS = "energy|forces|stress|virials|group|head|weight"

_WORDING = (
    (r"^.*?Error parsing (--\S+): ", r"\1: "),
    (r"invalid literal for int\(\) with base 10: (.*)", r"expected a whole number, got \1"),
    (r"could not convert string to float: (.*)", r"expected a number, got \1"),
    (r"no type matching (.*) could be instantiated from \[(.*)\]", r"expected \1, got \2"),
    (
        r"Could not parse arguments \[(.*)\] into tuple type .*(?:float|int).*",
        r"expected numbers, got \1",
    ),
    (r"Could not find valid parse for arguments: \[(.*)\]", r"expected numbers, got \1"),
    (r"Failed to parse key-value pairs!", "expected pairs, each a name and its value"),
    (
        r"^.*?invalid choice (.*) for argument '(.*)'\. Expected one of \((.*?),?\)",
        r"\2: expected one of \3, got \1",
    ),
    (
        r"^.*?Missing value for argument '(.*)'\. Expected (\d+) values",
        lambda found: (
            f"{found[1]}: expected {'a value' if found[2] == '1' else found[2] + ' values'}"
        ),
    ),
)
"""Pattern in tyro's message -> our wording."""

_TYPES = (
    (r"\{None\}", ""),
    (r"\[(?:INT|FLOAT) \[(?:INT|FLOAT) \.\.\.\]\]", "several"),
    (r"\{\[STR (\w+) \[STR \w+ \.\.\.\]\]\}", r"pairs of a name and \1 without braces"),
    (r"\{([^{}]*)\}", lambda choices: " or ".join(re.split(r",\s*", choices[1]))),
    (r"\bINT(?: INT)+\b", lambda several: f"{several[0].count('INT')} whole numbers"),
    (r"\bFLOAT(?: FLOAT)+\b", lambda several: f"{several[0].count('FLOAT')} numbers"),
    (r"\bINT\b", "a whole number"),
    (r"\bFLOAT\b", "a number"),
    (r"\bSTR\b", "text"),
    (r"\bPATH\b", "a path"),
    (r"\|", " or "),
)
"""Pattern in tyro's notation of types -> our wording, in this order."""


def _unknown(names: str, text: str, command: str) -> str:
    """Return the sentence for options that do not exist."""
    unknown = [name for name in names.split(", ") if name]
    options = [name for name in unknown if name.startswith("-")]
    if not options:
        given = ", ".join(map(repr, unknown))
        # Path.exists raises where a name is longer than a file's may be.
        files = command.startswith("bevatron train ") and all(map(os.path.exists, unknown))
        hint = f" (did you mean --data {shlex.join(unknown)}?)" if files else ""
        return (
            f"nothing was expected after the options but {given}{hint}; `{command} --help-all` "
            "shows all"
        )
    rest = text.partition(names)[2].partition("For full helptext")[0]
    close = re.findall(r"--[\w.-]+", rest)
    same = [each for each in close if each.endswith(f".{options[0].lstrip('-')}")]
    hint = f" (did you mean {(same or close)[0]}?)" if close else ""
    return f"there is no option {options[0]}{hint}; `{command} --help-all` shows all"


def _allow(options: str) -> Callable[[re.Match[str]], str]:
    return lambda found: f"{options}allow-{found[1].replace('_', '-')}"


def _dashed(found: re.Match[str]) -> str:
    return "--" + found[0].replace("_", "-")


def _hints(target: Any) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(target, include_extras=True)
    except (TypeError, NameError):
        return {}


def _with_minus(arguments: Iterable[str]) -> list[str]:
    """Allow a value that begins with a minus and a letter: ``--train.monitor -accuracy``."""
    done: list[str] = []
    for argument in arguments:
        before = done[-1] if done else ""
        if re.match(r"-[a-z_]{2}", argument) and re.match(r"--[^=]+$", before):
            done[-1] = f"{before}={argument}"
        else:
            done.append(argument)
    return done


def _with_flags(arguments: Iterable[str], switches: frozenset[str]) -> list[str]:
    """Allow true and false after switches, as in a YAML file: ``--report false``."""
    rest = [part for argument in arguments for part in _split(argument, switches)]
    done: list[str] = []
    while rest:
        option = rest.pop(0)
        name = option.removeprefix("--").replace("_", "-")
        if option.startswith("--") and name in switches and rest and rest[0].lower() in _TRUTH:
            head, dot, last = name.rpartition(".")
            option = f"--{name}" if _TRUTH[rest.pop(0).lower()] else f"--{head}{dot}no-{last}"
        done.append(option)
    return done


_TRUTH = {"true": True, "false": False}


def _split(argument: str, switches: frozenset[str]) -> list[str]:
    """Split ``--report=false``."""
    option, equals, value = argument.partition("=")
    if equals and option.removeprefix("--").replace("_", "-") in switches:
        return [option, value]
    return [argument]
