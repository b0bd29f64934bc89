"""Chooses the system whose function runs a command.

Several systems may have a command of the same name. ``prepare`` goes by what the files look like,
all others by the kind of the first model folder among the arguments. The name of a system as first
argument takes precedence: ``bevatron evaluate gpspp --help``.
"""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bevatron.config import load_yaml
from bevatron.errors import ConfigError
from bevatron.output import Outcome, say
from bevatron.recipes import DEFAULT, SYSTEMS, system, systems
from bevatron.recipes.kinds import holds_model, kind_of_model
from bevatron.recipes.system import System

Call = tuple[Callable[..., Outcome], list[str], str]
"""The function of a command, the arguments that are left for it, and how the command is typed."""


def system_command(command: str, arguments: Sequence[str]) -> Call:
    """Find the function of a command and the arguments that it takes.

    Raises BevatronError if the system is ambiguous or has no such command.

    Parameters
    ----------
    command : a command that at least one system has
    arguments : what follows on the command line
    """
    providers = having(command)
    named, rest = _named(list(arguments))
    if named is not None:
        chosen = named
    elif len(providers) == 1:
        (chosen,) = providers
    elif command == "prepare":
        chosen = _of_files(providers, rest)
    else:
        # The default where there is no model, for its own message.
        chosen = system_of_kind(kind_of_model(rest)) or providers[0]
    if named is None and len(providers) > 1 and _asks_for_help(rest):
        _explain(command, providers, chosen)
    typed = command if len(providers) == 1 else f"{command} {chosen.name}"
    return chosen.command(command), rest, f"bevatron {typed}"


def system_and_values(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name of the system that a configuration is for, and its other values.

    Raises ConfigError if a file cannot be read, or there is no such recipe. What the values may be
    is checked later: only the classes of a system know it, and they import torch.

    Parameters
    ----------
    name : a recipe, or a YAML file whose key ``recipe`` names one
    """
    known = ", ".join(sorted(SYSTEMS))
    if name in SYSTEMS:
        return name, {}
    if Path(name).suffix not in {".yaml", ".yml"} and not Path(name).is_file():
        raise ConfigError(f"there is no recipe '{name}' (known: {known}) and no such YAML file")
    values = load_yaml(Path(name))
    chosen = str(values.pop("recipe", None) or DEFAULT)
    if chosen not in SYSTEMS:
        raise ConfigError(f"{name}: recipe: there is no '{chosen}' (known: {known})")
    return chosen, values


def having(command: str) -> list[System]:
    """Return the systems that have a command."""
    return [each for each in systems() if command in each.commands]


def system_of_kind(kind: str | None) -> System | None:
    """Return the system whose models are of a kind."""
    return next((each for each in systems() if each.kind == kind), None)


def of_samples(samples: str) -> System:
    """Return the system that is trained on such samples; ConfigError if there is none."""
    for each in systems():
        if samples in {each.samples, each.name}:
            return each
    known = ", ".join(each.samples for each in systems())
    raise ConfigError(f"there is no system for {samples} (known: {known})")


def _named(arguments: list[str]) -> tuple[System | None, list[str]]:
    """Remove the name of a system from the arguments."""
    if arguments and arguments[0] in SYSTEMS and not holds_model(Path(arguments[0])):
        return system(arguments[0]), arguments[1:]
    return None, arguments


def _of_files(providers: Sequence[System], arguments: Sequence[str]) -> System:
    """Choose by what files look like: those before the first option, else any argument."""
    first = next((i for i, a in enumerate(arguments) if a.startswith("-")), len(arguments))
    files = [Path(argument) for argument in arguments[:first]]
    fallback = next((each for each in providers if each.recognises is None), providers[0])
    found: dict[str, Path] = {}
    others = (Path(argument) for argument in arguments if not argument.startswith("-"))
    for path in files or others:
        claiming = [each for each in systems() if each.takes(path)]
        if len(claiming) > 1:
            choices = [f"`bevatron prepare {each.name}` ({each.summary})" for each in claiming]
            raise ConfigError(f"{path}: may be for several systems; choose {' or '.join(choices)}")
        if files and not claiming and not path.exists():
            for close in get_close_matches(str(path), SYSTEMS, n=1):
                raise ConfigError(f"{path}: there is no such file; did you mean '{close}'?")
        if claiming or files:
            found.setdefault(claiming[0].name if claiming else fallback.name, path)
    if len(found) > 1:
        listed = " and ".join(f"{system(name).samples} ({path})" for name, path in found.items())
        raise ConfigError(f"files of {listed} cannot go into one store; prepare them separately")
    return system(next(iter(found))) if found else fallback


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return any(argument in {"-h", "--help", "--help-all"} for argument in arguments)


def _explain(command: str, providers: Sequence[System], chosen: System) -> None:
    """Print above the help of a shared command which system its options belong to."""
    names = ", ".join(each.name for each in providers)
    say(f"{command} exists for {names};", f"the options for {chosen.name} follow, others:")
    say(
        *(f"  bevatron {command} {each.name} --help" for each in providers if each is not chosen),
        "",
    )
