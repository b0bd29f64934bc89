"""The command ``bevatron``. No logic: each of its functions calls one function of `recipes`.

Little is imported here, so that ``bevatron --help`` answers at once; commands, and torch with
them, are imported when they are called.

Exit codes: 0 done; 2 an error of the user, explained in one sentence; 129, 130, 138 and 143 a run
that SIGHUP, Ctrl-C, SIGUSR1 or SIGTERM stopped and that saved its state; 1 anything else, with a
traceback.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from difflib import get_close_matches
from importlib import import_module
from itertools import pairwise

from bevatron import __version__
from bevatron.errors import BevatronError, ConfigError
from bevatron.output import Outcome, Result, print_no_more, quietly, say

EXIT_MISTAKE = 2

COMMANDS = {
    "train": "training:train",
    "inspect": "commands:inspect",
    "bench store": "bench:bench_store",
    "bench loader": "bench:bench_loader",
    "bench packing": "bench:bench_packing",
    "bench cost": "bench:bench_cost",
    "bench capacity": "bench:bench_capacity",
    "bench profile": "bench:bench_profile",
    "init": "commands:init",
    "compare": "commands:compare",
    "env": "commands:env",
    "demo": "commands:demo",
    "completion": "commands:completion",
}
"""Commands that belong to no single system, and their functions in this package."""

USAGE = (
    ("train SYSTEM|FILE.yaml [--KEY VALUE]", "train; keys: `bevatron train SYSTEM --help`"),
    ("init SYSTEM > FILE.yaml", "a commented configuration to start from"),
    ("prepare [SYSTEM] FILE... --out STORE", "features that do not change, computed once"),
    ("inspect STORE [--plan]", "what is in a store, how batches fill"),
    ("evaluate RUN FILE...", "errors on labelled data"),
    ("predict RUN FILE OUT", "predictions, next to what the file holds"),
    ("compare RUN RUN... [--out PAGE]", "settings that differ, errors and curves side by side"),
    ("bench store|loader|packing STORE", "rates on this machine and these data"),
    ("bench cost|capacity STORE", "what a step costs, how large a batch may be"),
    ("bench profile RUN", "where a step's time and memory go"),
    ("env", "versions, devices, which kernels run here"),
    ("demo [OUT]", "trains small models of four systems in a few minutes"),
    ("completion bash|zsh", "a script that completes commands and options"),
)
"""Lines of the usage: what is typed and what it does."""


def usage() -> str:
    """Return what ``bevatron --help`` prints: the commands of all systems, then of each."""
    from bevatron.recipes import systems

    def lines(rows: Iterable[tuple[str, str]]) -> list[str]:
        return [f"  bevatron {typed:<39} {what}" for typed, what in rows]

    parts = [lines(USAGE)]
    parts += [[f"{s.name}: {s.summary}", *lines(s.usage)] for s in systems() if s.usage]
    return (
        f"bevatron {__version__}: training scientific graph and structure models on GPUs\n\n"
        + "\n\n".join("\n".join(part) for part in parts)
        + "\n\n`bevatron COMMAND --help` says more, --help-all all of it; -q prints only results,\n"
        "--json prints them as JSON, --debug shows the traceback of an error."
    )


_FIXABLE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EMFILE,
    errno.EIO,
    errno.ESTALE,
}
"""Errors of the file system that a user can fix."""


EVERYWHERE = {"--debug", "-q", "--quiet", "--json"}
"""Options of all commands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    given = [_from_home(each) for each in (sys.argv[1:] if arguments is None else arguments)]
    arguments = [argument for argument in given if argument not in EVERYWHERE]
    debug, as_json = "--debug" in given, "--json" in given
    quiet = not {"-q", "--quiet"}.isdisjoint(given)
    command, *rest = arguments or [""]
    options = {"train": "--data.labels.", "bench": "", "convert": None}.get(command, "--labels.")

    def run() -> int:
        if command in {"", "-h", "--help", "help"}:
            print(usage())  # noqa: T201
            return 0 if command else EXIT_MISTAKE
        if command == "--version":
            print(__version__)  # noqa: T201
            return 0
        _check_output(arguments)
        with quietly(quiet), redirect_stdout(sys.stderr) if as_json else nullcontext():
            found = _dispatch(command, rest, as_json=as_json)
        if not isinstance(found, Result):
            return found or 0
        if not {"RANK", "SLURM_PROCID"}.isdisjoint(os.environ):
            from bevatron.parallel.mesh import is_main_process

            if not is_main_process():
                return 0
        if as_json:
            print(found.as_json())  # noqa: T201
        else:
            found.show()
        return 0

    return one_sentence(run, options, debug=debug)


def _from_home(argument: str) -> str:
    """Expand the ~ that a shell leaves in ``--out=~/store``: else a folder of that name is made."""
    option, equals, value = argument.partition("=") if argument[:2] == "--" else ("", "", argument)
    return option + equals + os.path.expanduser(value)  # noqa: PTH111  not every value is a path


def _check_output(arguments: Sequence[str]) -> None:
    """Refuse ``--output ""``, as of an unset shell variable: it would be the current folder."""
    for option in {"--out=", "--output="} & {*arguments, *map("=".join, pairwise(arguments))}:
        raise ConfigError(f"{option[:-1]}: is empty; is a shell variable unset?")


def one_sentence(
    command: Callable[[], int], options: str | None = None, *, debug: bool = False
) -> int:
    """Run a command and return its exit code; an error of the user becomes one sentence.

    Parameters
    ----------
    command : returns the exit code
    options
        Prefix of the options for labels, to name them as they are typed; empty = as they are in a
        YAML file; None = the sentence stays as it is.
    debug : raise the error instead
    """
    try:
        code = command()
        sys.stdout.flush()
    except BevatronError as error:
        if debug:
            raise
        from bevatron.arguments import as_typed, typed_arguments

        message = str(error) if options is None else as_typed(str(error), options)
        message = typed_arguments(message)
        print(f"error: {message}", file=sys.stderr)  # noqa: T201
        return EXIT_MISTAKE
    except BrokenPipeError:
        # That is not a failure of ours.
        print_no_more()
        return 0
    except OSError as error:
        if debug or error.errno not in _FIXABLE:
            raise
        where = f"{error.filename}: " if error.filename else ""
        if not where:
            print_no_more()  # it may be what cannot be written, and would fail again at the end
        print(f"error: {where}{error.strerror}", file=sys.stderr)  # noqa: T201
        return EXIT_MISTAKE
    except SystemExit as stop:
        # After --help.
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from bevatron.kernels import too_large_for_this_gpu

        sentence = None if debug else too_large_for_this_gpu(error)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)  # noqa: T201
        return EXIT_MISTAKE
    else:
        return code


def run() -> None:
    """Run the command of this process and exit."""
    # Waiting OpenMP threads sleep; if they spin, they take cores from other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123
        else:  # a name or an Å must not end a run
            stream.reconfigure(errors="backslashreplace")
    code = main()
    # Not imported here: Ctrl-C in the middle of an import leaves a torch that cannot be imported.
    mesh = sys.modules.get("bevatron.parallel.mesh")
    if mesh is not None:
        with suppress(ConfigError):  # of wrong variables, which the command has reported
            if mesh.ranks_from_environment(os.environ)[1] > 1:
                # gloo's threads may outlive the process group, and one that drops a tensor while
                # the interpreter is being taken down aborts the process (SIGABRT) after its work.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
    sys.exit(code)


def _dispatch(command: str, arguments: list[str], *, as_json: bool) -> Outcome:
    """Call the function of a command, whose name is one word or two."""
    from bevatron.recipes import systems

    known = list(dict.fromkeys([*COMMANDS, *(name for s in systems() for name in s.commands)]))
    group = [name.partition(" ")[2] for name in known if name.startswith(f"{command} ")]
    if group:
        if arguments and arguments[0] in {"-h", "--help", "--help-all"}:
            return _group_help(command, group)
        if not arguments or arguments[0] not in group:
            raise ConfigError(f"`bevatron {command}` needs one of: {', '.join(group)}")
        command, arguments = f"{command} {arguments[0]}", arguments[1:]
    elif command not in known:
        first = sorted({name.partition(" ")[0] for name in known})
        close = get_close_matches(command, first, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(first)}"
        raise ConfigError(f"there is no command '{command}' ({hint})")
    from bevatron.arguments import call
    from bevatron.cli.help import asks_for_help, command_help, json_result

    typed = f"bevatron {command}"
    if command in COMMANDS:
        function = load_command(command)
    else:
        from bevatron.recipes.dispatch import system_command

        function, arguments, typed = system_command(command, arguments)
    if as_json and not json_result(function):
        raise ConfigError(f"--json: `bevatron {command}` has no result to print as JSON")
    if command == "train":
        return function(arguments)
    if asks_for_help(arguments):
        say(command_help(function, typed))
        return 0
    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    return call(function, arguments, typed)


def load_command(command: str) -> Callable[..., Outcome]:
    """Import the function of a command that belongs to no system."""
    module, _, name = COMMANDS[command].partition(":")
    function: Callable[..., Outcome] = getattr(import_module(f"{__name__}.{module}"), name)
    return function


def _group_help(command: str, group: Iterable[str]) -> int:
    """Print the first line of each command of a group."""
    from bevatron.recipes.dispatch import having

    for name in group:
        full = f"{command} {name}"
        function = load_command(full) if full in COMMANDS else having(full)[0].command(full)
        say(f"bevatron {full}: {(function.__doc__ or '').splitlines()[0]}")
    return 0
