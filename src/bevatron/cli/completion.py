"""Shell completion of all commands and options: one script, written by tyro."""

import inspect
import io
import re
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from typing import Annotated, Any, Literal, Union

import tyro

from bevatron.cli import COMMANDS, load_command
from bevatron.cli.training import with_options
from bevatron.errors import ConfigError
from bevatron.recipes import systems

Tree = dict[str, Any]
"""Name -> the function that has its options, or what may follow the name."""

_BASH_FILES = """

# Where nothing else fits, names of files.
_bevatron() {{
  {}
  [[ -n "${{COMPREPLY[*]}}" ]] || COMPREPLY=()
}}
complete -o bashdefault -o default -F _bevatron bevatron"""


def completion_script(shell: Literal["bash", "zsh"]) -> str:
    """Return the script that completes ``bevatron`` in a shell.

    A command of several systems completes the options of all. Raises ConfigError if tyro cannot
    write it.
    """
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            tyro.cli(
                _choice(_commands()),
                prog="bevatron",
                args=["--tyro-print-completion", shell],
                config=(tyro.conf.AvoidSubcommands, tyro.conf.OmitSubcommandPrefixes),
            )
        except SystemExit as stop:
            if stop.code:
                raise ConfigError("completion: tyro cannot write a script for this shell") from None
    script = printed.getvalue().rstrip()
    registered = re.search(r"^complete .*-F (\w+) bevatron$", script, flags=re.MULTILINE)
    return script if registered is None else script + _BASH_FILES.format(registered[1])


def _commands() -> Tree:
    """Collect all commands, those of two words below their first."""
    tree: Tree = {}
    names = dict.fromkeys([*COMMANDS, *(name for each in systems() for name in each.commands)])
    for name in names:
        if name == "train":
            tree[name] = {each.name: with_options(each.load(each.config)) for each in systems()}
            continue
        providers = [each for each in systems() if name in each.commands]
        functions = [each.command(name) for each in providers] or [load_command(name)]
        first, _, second = name.partition(" ")
        if second:
            tree.setdefault(first, {})[second] = _merged(functions)
        else:
            tree[name] = _merged(functions)
    return tree


def _merged(functions: Iterable[Callable[..., Any]]) -> Callable[..., Any]:
    """Make a function with the parameters of all; where names clash, the first wins."""
    parameters: dict[str, inspect.Parameter] = {}
    for function in functions:
        for name, each in inspect.signature(function, eval_str=True).parameters.items():
            parameters.setdefault(name, each.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def accept(**arguments: Any) -> None:
        """Take the arguments."""

    accept.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    accept.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    return accept


def _choice(tree: Tree) -> Any:
    """Make the type that tyro parses as a choice of subcommands."""
    arms: list[Any] = []
    for name, below in tree.items():
        target = _choice(below) if isinstance(below, dict) else below
        if isinstance(below, dict):
            wrapped = _one_of(target)
            arms.append(Annotated[Any, tyro.conf.subcommand(name=name, constructor=wrapped)])
        else:
            arms.append(Annotated[Any, tyro.conf.subcommand(name=name, constructor=target)])
    return Union[tuple(arms)]  # noqa: UP007


def _one_of(choice: Any) -> Callable[..., Any]:
    def accept(which: Any) -> None:
        """Take one of several commands."""

    accept.__annotations__ = {"which": choice, "return": None}
    return accept
