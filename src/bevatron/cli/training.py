"""The command ``bevatron train``: a system or a YAML file, and options that override it."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from bevatron.arguments import parse
from bevatron.errors import ConfigError
from bevatron.recipes.arguments import say


@dataclass(frozen=True)
class TrainOptions:
    """How to start.

    Attributes
    ----------
    resume
        ``never``: the folder must not hold a run; ``auto``: resume one if it does, from its newest
        intact checkpoint; ``must``: it has to hold one, whose newest checkpoint is intact.
    dry_run
        Print parameters, memory and steps, and exit.
    """

    resume: Literal["never", "auto", "must"] = "never"
    dry_run: bool = False


def train(arguments: list[str]) -> int:
    """Train: the first argument is a system or a YAML file, the others override its keys."""
    from bevatron.recipes import SYSTEMS
    from bevatron.recipes.training import configuration, start

    recipes = ", ".join(sorted(SYSTEMS))
    if not arguments:
        raise ConfigError(
            f"`bevatron train` needs a recipe ({recipes}) or a YAML file; "
            "`bevatron train --help` says more"
        )
    if arguments[0] in {"-h", "--help"}:
        say("usage: bevatron train RECIPE|FILE.yaml [--data FILE...] [--output RUN] [--KEY VALUE]")
        say(f"recipes: {recipes}; `bevatron train RECIPE --help` lists all keys")
        return 0
    base = configuration(arguments[0], arguments[1:])
    command = _train_command(type(base))
    parsed = parse(
        command,
        [_written_out(argument) for argument in arguments[1:]],
        f"bevatron train {arguments[0]}",
        default=command(base, TrainOptions()),
    )
    return start(parsed.run, resume=parsed.options.resume, dry_run=parsed.options.dry_run)


def _written_out(argument: str) -> str:
    """Expand an option's short name."""
    option, equals, value = argument.partition("=")
    short = {"--data": "--data.train", "--out": "--output", "--stage-to": "--loader.stage-to"}
    return short.get(option, option) + equals + value


def _train_command(config: type) -> Any:
    """Create the class from which tyro parses a configuration and how to start."""

    @dataclass(frozen=True)
    class Command:
        run: Annotated[config, tyro.conf.arg(name="")]  # type: ignore[valid-type]
        options: Annotated[TrainOptions, tyro.conf.arg(name="")]

    return Command
