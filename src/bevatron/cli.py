"""The command ``bevatron``. No logic: each function here calls one function of `recipes`.

Exit codes: 0 done; 2 a mistake that one sentence explains; 130, 138 and 143 a run that Ctrl-C,
SIGUSR1 or SIGTERM stopped and that has saved its state; 1 anything unforeseen, with a traceback.
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bevatron import __version__
from bevatron.arguments import as_typed, call, parse
from bevatron.data.readers.labels import LabelOptions
from bevatron.errors import BevatronError, ConfigError

EXIT_MISTAKE = 2

_USAGE = """\
bevatron {version}: training scientific graph and structure models at the speed of the hardware

  bevatron prepare FILE... --out STORE --cutoff 5   features that do not change, computed once
  bevatron train mace --data FILE --output RUN      train from a file, a store or a YAML file
  bevatron evaluate RUN FILE...                     errors on labelled structures
  bevatron predict RUN FILE OUT                     energies and forces of structures
  bevatron relax RUN FILE OUT                       many geometries at once to their minima
  bevatron convert mace-torch FILE OUT              mace-torch checkpoints, both ways
  bevatron inspect STORE [--plan]                   what is in a store, how batches fill
  bevatron bench store|loader|packing STORE         rates on this machine and these data
  bevatron bench cost|capacity STORE                what a step costs, how large a batch may be
  bevatron bench profile RUN                        where a step's time and memory go
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


def _dispatch(command: str, arguments: list[str]) -> int:
    if command == "train":
        return train(arguments)
    commands: dict[str, Callable[..., int | None]] = {
        "prepare": prepare,
        "evaluate": evaluate,
        "predict": predict,
        "relax": relax,
        "inspect": inspect,
        "env": env,
        "demo": demo,
    }
    groups: dict[str, dict[str, Callable[..., int | None]]] = {
        "convert": {"mace-torch": convert_from_mace_torch, "to-mace-torch": convert_to_mace_torch},
        "bench": {
            "store": bench_store,
            "loader": bench_loader,
            "packing": bench_packing,
            "cost": bench_cost,
            "capacity": bench_capacity,
            "profile": bench_profile,
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
            _say(f"bevatron {command} {name}: {(function.__doc__ or '').splitlines()[0]}")
        return 0
    if not arguments or arguments[0] not in group:
        raise ConfigError(f"`bevatron {command}` goes on with one of: {', '.join(group)}")
    return call(group[arguments[0]], arguments[1:], f"bevatron {command} {arguments[0]}") or 0


def _positional(metavar: str) -> Any:
    return tyro.conf.arg(metavar=metavar)


Files = Annotated[tuple[Path, ...], tyro.conf.Positional, _positional("FILE ...")]
Model = Annotated[Path, tyro.conf.Positional, _positional("MODEL")]
Source = Annotated[Path, tyro.conf.Positional, _positional("SOURCE")]
Out = Annotated[Path, tyro.conf.Positional, _positional("OUT")]
RunFolder = Annotated[Path, tyro.conf.Positional, _positional("RUN")]
StoreFolder = Annotated[Path, tyro.conf.Positional, _positional("STORE")]
Labels = Annotated[LabelOptions, tyro.conf.arg(name="labels")]


def prepare(
    files: Files,
    out: Path,
    cutoff: float,
    labels: Labels = LabelOptions(),  # noqa: B008  frozen
    samples_per_shard: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> None:
    """Check labels and compute neighbours once, in parallel, into a store.

    Killed at any moment and started again it continues. Started by srun or mpirun on many nodes
    the processes share the work.

    Parameters
    ----------
    files
        Files of structures: extended XYZ (also .gz), anything ASE reads, ASE databases, .aselmdb.
    out
        Folder of the store.
    cutoff
        Of the neighbours, Å; that of the model to be trained.
    labels
        Under which names the labels are found.
    samples_per_shard
        None chooses.
    workers
        Processes; None = all usable cores.
    overwrite
        Replace a store of other inputs in this folder.
    """
    from bevatron.recipes.structures import prepare_structures

    store = prepare_structures(
        files,
        out,
        cutoff,
        labels,
        samples_per_shard=samples_per_shard,
        workers=workers,
        overwrite=overwrite,
    )
    _say(*store.manifest["report"], f"{len(store)} structures are in {out}")


@dataclass(frozen=True)
class TrainOptions:
    """How to start.

    Attributes
    ----------
    resume
        ``never``: the folder must not hold a run; ``auto``: go on if it does; ``must``: it has to.
    dry_run
        Print parameters, memory and steps, and leave.
    """

    resume: Literal["never", "auto", "must"] = "never"
    dry_run: bool = False


def train(arguments: list[str]) -> int:
    """Train: the first argument is a recipe or a YAML file, the rest changes its configuration."""
    from bevatron.recipes.training import configuration, start

    if not arguments or arguments[0] in {"-h", "--help"}:
        _say("usage: bevatron train RECIPE|FILE.yaml [--data FILE...] [--output RUN] [--KEY VALUE]")
        _say("       bevatron train mace --help lists all keys")
        return 0 if arguments else EXIT_MISTAKE
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
    """Write out an option that has a short name."""
    option, equals, value = argument.partition("=")
    return {"--data": "--data.train", "--out": "--output"}.get(option, option) + equals + value


def _train_command(config: type) -> Any:
    """Make the class of which tyro reads a recipe's configuration and how to start."""

    @dataclass(frozen=True)
    class Command:
        run: Annotated[config, tyro.conf.arg(name="")]  # type: ignore[valid-type]
        options: Annotated[TrainOptions, tyro.conf.arg(name="")]

    return Command


def evaluate(
    model: Model,
    files: Files,
    labels: Labels = LabelOptions(),  # noqa: B008
    head: str | None = None,
    device: str = "cpu",
    dtype: Literal["float64", "float32"] = "float64",
    capacity: int = 1024,
    out: Path | None = None,
) -> None:
    """Print the errors of a model on labelled structures, in all and per group, file and element.

    Parameters
    ----------
    model
        A run or a model folder.
    files
        Files of structures or prepared stores.
    labels
        Under which names the labels are found.
    head
        Read-out for all structures; by default the one that each structure names.
    device
        cpu, cuda or cuda:N.
    dtype
        Precision.
    capacity
        Atoms of a batch at most.
    out
        Also write the tables to this JSON file.
    """
    from bevatron.recipes.evaluation import evaluate_files, print_tables

    print_tables(
        evaluate_files(
            model,
            files,
            labels=labels,
            head=head,
            device=device,
            dtype=dtype,
            capacity=capacity,
            out=out,
        )
    )


def predict(
    model: Model,
    source: Source,
    out: Out,
    committee: tuple[Path, ...] = (),
    prefix: str = "predicted_",
    head: str | None = None,
    device: str = "cpu",
    dtype: Literal["float64", "float32"] = "float64",
    capacity: int = 1024,
) -> None:
    """Write energies, forces and stress of structures beside what the file holds already.

    Parameters
    ----------
    model
        A run or a model folder.
    source
        Structures, anything that ASE reads.
    out
        Extended XYZ to write.
    committee
        Further models: their mean is written, and the spread.
    prefix
        Begins the names of the results.
    head
        Read-out of a model with several.
    device
        cpu, cuda or cuda:N.
    dtype
        Precision.
    capacity
        Atoms of a batch at most.
    """
    from bevatron.recipes.prediction import predict_file

    done = predict_file(
        [model, *committee],
        source,
        out,
        prefix=prefix,
        head=head,
        device=device,
        dtype=dtype,
        capacity=capacity,
    )
    _say(f"{done} structures are in {out}")


def relax(
    model: Model,
    source: Source,
    out: Out,
    fmax: float = 0.05,
    steps: int = 500,
    cell: bool = False,
    device: str = "cpu",
    dtype: Literal["float64", "float32"] = "float64",
) -> None:
    """Relax many structures at once to minima of their energy (FIRE).

    Parameters
    ----------
    model
        A run or a model folder.
    source
        Structures, anything that ASE reads.
    out
        Extended XYZ to write.
    fmax
        Converged once no atom feels more, eV/Å.
    steps
        At most.
    cell
        Relax the cells too.
    device
        cpu, cuda or cuda:N.
    dtype
        Precision.
    """
    from bevatron.recipes.prediction import relax_file

    result = relax_file(model, source, out, fmax, steps, cell, device=device, dtype=dtype)
    _say(f"{int(result.converged.sum())} of {len(result.structures)} converged; they are in {out}")


def convert_from_mace_torch(
    file: Source, out: Out, trust: bool = False, config: Path | None = None
) -> None:
    """Make a model folder of a mace-torch checkpoint.

    Parameters
    ----------
    file
        A ``.model`` file, which is a pickle and needs mace-torch and --trust; or a state dict
        (``.pt``, ``.safetensors``) with --config, which need neither.
    out
        The model folder.
    trust
        Unpickle the file. A pickle can run any code that is in it.
    config
        JSON file of mace-torch's configuration, for a state dict.
    """
    from bevatron.recipes.conversion import from_mace_torch_file

    _say(from_mace_torch_file(file, out, trust=trust, config=config))


def convert_to_mace_torch(model: Model, out: Out) -> None:
    """Write a run or a model folder as a mace-torch checkpoint.

    Parameters
    ----------
    model
        A run or a model folder.
    out
        ``NAME.model``, which needs mace-torch; or ``NAME.pt``, a state dict, with the
        configuration beside it in ``NAME.json``, which does not.
    """
    from bevatron.recipes.conversion import to_mace_torch_file

    _say(to_mace_torch_file(model, out))


def inspect(
    store: StoreFolder,
    out: Path | None = None,
    plan: bool = False,
    capacity: int | None = None,
    ranks: int = 8,
) -> None:
    """Print and draw what is in a store.

    Parameters
    ----------
    store
        A prepared store.
    out
        Folder for figures and inspect.html; STORE-inspect by default.
    plan
        Also show how fixed-count batches, Algorithm 1 and balanced batches fill the ranks.
    capacity
        Atoms of a batch at most, for --plan.
    ranks
        Processes that share an epoch, for --plan.
    """
    from bevatron.recipes.inspect import PlanOptions, inspect_store

    options = PlanOptions(capacity=capacity, ranks=ranks) if plan else None
    _say(f"figures: {inspect_store(store, out, options)}")


def bench_store(store: StoreFolder) -> None:
    """Measure how long it takes to open a store and to read a sample.

    Parameters
    ----------
    store
        A prepared store.
    """
    from bevatron.recipes.benchmarks import store_rates

    _print_rows(store_rates(store))


def bench_loader(
    store: StoreFolder, capacity: int = 1024, workers: tuple[int, ...] = (0, 1, 2)
) -> None:
    """Measure how many structures a second reach the step for numbers of worker processes.

    Parameters
    ----------
    store
        A prepared store.
    capacity
        Atoms of a batch at most.
    workers
        Numbers to try.
    """
    from bevatron.recipes.benchmarks import loader_rates

    _print_rows(loader_rates(store, capacity, workers))


def bench_packing(store: StoreFolder, capacity: int = 1024, ranks: int = 8) -> None:
    """Compare how the packing algorithms fill batches and balance ranks.

    Parameters
    ----------
    store
        A prepared store.
    capacity
        Atoms of a batch at most.
    ranks
        Processes that share an epoch.
    """
    from bevatron.recipes.benchmarks import packing_figures

    _print_rows(packing_figures(store, capacity, ranks))


def bench_cost(
    store: StoreFolder,
    model: str = "default",
    device: str = "auto",
    dtype: Literal["float32", "float64"] = "float32",
    most: int = 4096,
) -> None:
    """Fit what a training step costs by atoms, edges and structures, for balanced batches.

    Parameters
    ----------
    store
        A prepared store.
    model
        A preset, a run or a model folder.
    device
        auto, cpu, cuda or cuda:N.
    dtype
        Precision.
    most
        Atoms of the largest batch.
    """
    from bevatron.recipes.benchmarks import cost_model, step_meter

    rows, lines = cost_model(step_meter(store, model, device, dtype), most)
    _print_rows(rows)
    _say(*lines)


def bench_capacity(
    store: StoreFolder,
    model: str = "default",
    device: str = "auto",
    dtype: Literal["float32", "float64"] = "float32",
    most: int = 65536,
    out: Path = Path("capacity.png"),
) -> None:
    """Measure atoms per second by the size of a batch, and on a GPU the largest that fits.

    Parameters
    ----------
    store
        A prepared store.
    model
        A preset, a run or a model folder.
    device
        auto, cpu, cuda or cuda:N.
    dtype
        Precision.
    most
        Atoms of the largest batch.
    out
        Picture to write.
    """
    from bevatron.recipes.benchmarks import capacity_curve, step_meter

    rows, lines = capacity_curve(step_meter(store, model, device, dtype), most, out)
    _print_rows(rows)
    _say(*lines)


def bench_profile(
    run: RunFolder,
    steps: int = 50,
    warm: int = 10,
    device: str | None = None,
    out: Path | None = None,
) -> None:
    """Trace steps of a run: time by kind of work, idle time, memory by module, what would help.

    The run itself is not touched: the steps begin with new weights in a folder of their own.

    Parameters
    ----------
    run
        Folder of a run, or a YAML file.
    steps
        To time, and then to trace.
    warm
        Steps before; more if there are shapes of batches still to be recorded.
    device
        auto, cpu, cuda or cuda:N instead of that of the run.
    out
        Folder for profile.json and pictures; ``profile`` in the run's folder by default.
    """
    from bevatron.recipes.profiling import profile_folder

    tables, lines = profile_folder(run, steps, warm, device, out)
    for title, rows in tables:
        _say(f"\n{title}")
        _print_rows(rows)
    _say(*lines)


def env() -> None:
    """Print versions, devices, and what runs here or why it does not."""
    from bevatron.recipes.environment import describe_environment

    for title, rows in describe_environment():
        width = max((len(name) for name, _ in rows), default=0)
        _say(title, *(f"  {name:<{width}}  {value}" for name, value in rows))


def demo(out: Out = Path("demo-run")) -> int:
    """Train a small potential on bundled data, evaluate it, draw the pictures, run dynamics.

    Parameters
    ----------
    out
        Folder for everything that it makes.
    """
    from bevatron.ase import BevatronCalculator
    from bevatron.recipes.demo import run_demo

    return run_demo(out, BevatronCalculator)


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows of equal keys as a table."""
    if not rows:
        return
    cells = [list(rows[0])] + [[str(value) for value in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        _say("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _say(*lines: str) -> None:
    for line in lines:
        print(line)  # noqa: T201
