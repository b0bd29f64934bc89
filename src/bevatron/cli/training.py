"""The command ``bevatron train``: a system or a YAML file, and options that override it."""

import gc
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from bevatron.arguments import parse, value_of
from bevatron.cli.help import asks_for_help, train_help
from bevatron.errors import ConfigError
from bevatron.garbage import no_garbage_collection
from bevatron.output import say
from bevatron.recipes import SYSTEMS, system
from bevatron.recipes.dispatch import system_and_values


@dataclass(frozen=True)
class TrainOptions:
    """Options of starting a run.

    Attributes
    ----------
    resume
        ``never``: the folder must not hold a run; ``auto``: resume one if it does, from its newest
        intact checkpoint; ``must``: it has to hold one, whose newest checkpoint is intact.
    dry_run : print parameters, memory and steps; the run's folder stays as it is
    """

    resume: Literal["never", "auto", "must"] = "never"
    dry_run: bool = False


def train(arguments: list[str]) -> int:
    """Train: the first argument is a system or a YAML file, the others override its keys."""
    recipes = ", ".join(sorted(SYSTEMS))
    if not arguments:
        raise ConfigError(
            f"`bevatron train` needs a recipe ({recipes}) or a YAML file; "
            "`bevatron train --help` says more"
        )
    if arguments[0] in {"-h", "--help", "--help-all"}:
        say("usage: bevatron train SYSTEM|FILE.yaml [--data FILE...] [--output RUN] [--KEY VALUE]")
        say(f"systems: {recipes}; `bevatron train SYSTEM --help` shows the keys that matter")
        return 0
    if asks_for_help(arguments[1:]):
        found = system(system_and_values(arguments[0])[0])
        say(train_help(found, f"bevatron train {arguments[0]}", TrainOptions))
        return 0
    system_and_values(arguments[0])  # a mistake in a file is reported before torch is imported
    with no_garbage_collection():  # saves a sixth of the import time; nothing imported is freed
        if arguments[0] in SYSTEMS and "--dry-run" not in arguments:
            from bevatron.parallel.mesh import start_gpu

            # As early as possible; files may say otherwise.
            start_gpu(value_of("--train.device", arguments) or "auto")
        from bevatron.recipes.training import configuration, start

        base = configuration(arguments[0], arguments[1:])
        command = with_options(type(base))
        parsed = parse(
            command,
            [_written_out(argument) for argument in arguments[1:]],
            f"bevatron train {arguments[0]}",
            default=command(base, TrainOptions()),
        )
    if not gc.get_freeze_count():
        gc.freeze()  # collections skip what was imported
    return start(parsed.run, resume=parsed.options.resume, dry_run=parsed.options.dry_run)


def _written_out(argument: str) -> str:
    """Expand an option's short name."""
    option, equals, value = argument.partition("=")
    short = {
        "--help-all": "--help",
        "--data": "--data.train",
        "--out": "--output",
        "--stage-to": "--loader.stage-to",
    }
    return short.get(option, option) + equals + value


def with_options(config: type) -> Any:
    """Create the class from which tyro parses a configuration and how to start."""

    @dataclass(frozen=True)
    class Command:
        run: Annotated[config, tyro.conf.arg(name="")]  # type: ignore[valid-type]
        options: Annotated[TrainOptions, tyro.conf.arg(name="")]

    return Command
