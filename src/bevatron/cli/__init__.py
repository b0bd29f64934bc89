"""The command ``bevatron``. No logic: each of its functions calls one function of `recipes`.

What is imported here is little, so that ``bevatron --help`` answers at once; the commands, and
torch with them, come when one is called.

Exit codes: 0 done; 2 a mistake that one sentence explains; 130, 138 and 143 a run that Ctrl-C,
SIGUSR1 or SIGTERM stopped and that has saved its state; 1 anything unforeseen, with a traceback.
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from bevatron import __version__
from bevatron.errors import BevatronError, ConfigError

EXIT_MISTAKE = 2

_USAGE = """\
bevatron {version}: training scientific graph and structure models at the speed of the hardware

  bevatron prepare FILE... --out STORE --cutoff 5   features that do not change, computed once
  bevatron prepare molecules.csv --out STORE        the same of molecules: SMILES and targets
  bevatron train mace --data FILE --output RUN      train from a file, a store or a YAML file
  bevatron evaluate RUN FILE...                     errors on labelled structures
  bevatron predict RUN FILE OUT                     energies and forces of structures
  bevatron relax RUN FILE OUT                       many geometries at once to their minima
  bevatron convert mace-torch FILE OUT              mace-torch checkpoints, both ways
  bevatron inspect STORE [--plan]                   what is in a store, how batches fill
  bevatron bench store|loader|packing STORE         rates on this machine and these data
  bevatron bench cost|capacity STORE                what a step costs, how large a batch may be
  bevatron bench profile RUN                        where a step's time and memory go
  bevatron train gpspp --data FILE --output RUN     properties of molecules from SMILES
  bevatron predict RUN FILE OUT [RUN...]            of molecules: one model or an ensemble
  bevatron embed RUN FILE OUT.npz                   what a model makes of molecules
  bevatron train graph --data FILE --output RUN     attention (GAT, AGNN, VA) on one large graph
  bevatron bench graph --vertices N --edges M       times of attention on random graphs and files
  bevatron bench gpspp-ablation STORE --out DIR     what each part of GPS++ is worth
  bevatron env                                      versions, devices, what runs and why not
  bevatron demo [OUT]                               all of it in three minutes

`bevatron COMMAND --help` says more; --debug shows the traceback of an error.
"""


_MENDABLE = {
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
}
"""What a file system refuses and a user can mend."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        print(_USAGE.format(version=__version__))  # noqa: T201
        return 0 if arguments else EXIT_MISTAKE
    if arguments[0] == "--version":
        print(__version__)  # noqa: T201
        return 0
    try:
        return _dispatch(arguments[0], arguments[1:])
    except BevatronError as error:
        if debug:
            raise
        from bevatron.arguments import as_typed

        options = "--data.labels." if arguments[0] == "train" else "--labels."
        message = str(error) if arguments[0] == "convert" else as_typed(str(error), options)
        print(f"error: {message}", file=sys.stderr)  # noqa: T201
        return EXIT_MISTAKE
    except BrokenPipeError:
        # The reader of our output (`| head`) has left; that is no failure of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug or error.errno not in _MENDABLE:
            raise
        where = f"{error.filename}: " if error.filename else ""
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


def run() -> None:
    """Run the command of this process and leave it."""
    code = main()
    if "torch.distributed" in sys.modules:
        from bevatron.parallel.mesh import ranks_from_environment

        if ranks_from_environment(os.environ)[1] > 1:
            # gloo's threads may outlive the process group, and one that drops a tensor while the
            # interpreter is being taken down aborts the process (SIGABRT) after its work is done.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)


def _dispatch(command: str, arguments: list[str]) -> int:
    from bevatron.arguments import call
    from bevatron.cli import bench
    from bevatron.cli.training import train
    from bevatron.recipes.arguments import say
    from bevatron.recipes.gpspp import commands as molecules
    from bevatron.recipes.graph import commands as graph
    from bevatron.recipes.mace import commands as plain

    if command == "train":
        return train(arguments)
    commands: dict[str, Callable[..., int | None]] = {
        "prepare": plain.prepare,
        "evaluate": plain.evaluate,
        "predict": plain.predict,
        "relax": plain.relax,
        "embed": molecules.embed,
        "inspect": plain.inspect,
        "env": plain.env,
        "demo": plain.demo,
    }
    of_kind: dict[str, dict[str | None, Callable[..., int | None]]] = {
        "evaluate": {
            "graph_attention": graph.evaluate_graph,
            "gpspp": molecules.evaluate_molecules,
        },
        "predict": {"graph_attention": graph.predict_graph, "gpspp": molecules.predict_molecules},
    }
    if command in of_kind:
        from bevatron.recipes.kinds import kind_of_model

        others = of_kind[command]
        commands[command] = others.get(kind_of_model(arguments), commands[command])
    groups: dict[str, dict[str, Callable[..., int | None]]] = {
        "convert": {
            "mace-torch": plain.convert_from_mace_torch,
            "to-mace-torch": plain.convert_to_mace_torch,
        },
        "bench": {
            "store": bench.bench_store,
            "loader": bench.bench_loader,
            "packing": bench.bench_packing,
            "cost": bench.bench_cost,
            "capacity": bench.bench_capacity,
            "profile": bench.bench_profile,
            "graph": graph.bench_graph,
            "gpspp-ablation": molecules.bench_gpspp_ablation,
        },
    }
    if command in commands:
        return call(commands[command], arguments, f"bevatron {command}") or 0
    if command not in groups:
        known = sorted([*commands, *groups, "train"])
        close = get_close_matches(command, known, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
        raise ConfigError(f"there is no command '{command}' ({hint})")
    group = groups[command]
    if arguments and arguments[0] in {"-h", "--help"}:
        for name, function in group.items():
            say(f"bevatron {command} {name}: {(function.__doc__ or '').splitlines()[0]}")
        return 0
    if not arguments or arguments[0] not in group:
        raise ConfigError(f"`bevatron {command}` goes on with one of: {', '.join(group)}")
    return call(group[arguments[0]], arguments[1:], f"bevatron {command} {arguments[0]}") or 0
