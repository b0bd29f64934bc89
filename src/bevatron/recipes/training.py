"""Starting a training run from a recipe's name or a YAML file."""

import dataclasses
import math
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from bevatron.arguments import value_of
from bevatron.config import merged, to_dict
from bevatron.data.processes import own_cpus, start_fork_server
from bevatron.errors import CheckpointError, ConfigError, DamagedError
from bevatron.files import SCRATCH
from bevatron.output import note, say
from bevatron.parallel.collectives import barrier
from bevatron.parallel.mesh import open_mesh, parse_device, ranks_from_environment, start_gpu
from bevatron.recipes import SYSTEMS, recipe, system
from bevatron.recipes.dispatch import system_and_values
from bevatron.recipes.run_config import LARGE_MODEL
from bevatron.recipes.starter import check_filled
from bevatron.train.checkpoint import list_checkpoints, read_intact
from bevatron.train.description import Planned, describe
from bevatron.train.loop import fit
from bevatron.train.memory_plan import MemoryPlan
from bevatron.train.restarts import restarted
from bevatron.train.run import FitResult, Run

WORTH_A_FORK_SERVER = 4
"""CPUs from which on worker processes are expected, and one can import what they need meanwhile."""

Resume = Literal["never", "auto", "must"]


def configuration(
    name: str, arguments: Sequence[str] = (), changes: Mapping[str, Any] | None = None
) -> Any:
    """Build the configuration that command-line arguments then override.

    Raises ConfigError for an unknown recipe or key, and for a preset that a file overrides
    completely.

    Parameters
    ----------
    name : a recipe, or a YAML file whose key ``recipe`` names one (default mace)
    arguments : only ``--preset`` is read: it sets defaults
    changes : values over those of the file
    """
    chosen, values = system_and_values(name)
    cls, _ = recipe(chosen)
    preset = value_of("--preset", arguments)
    values = merged(values, changes or {})
    try:
        config = cls.from_values(values)
        if preset is None or preset == config.preset:
            return config
        changed = cls.from_values({**values, "preset": preset})
    except ConfigError as error:
        raise ConfigError(str(error) if name in SYSTEMS else f"{name}: {error}") from None
    if dataclasses.replace(changed, preset=config.preset) == config:
        raise ConfigError(
            f"--preset {preset}: changes nothing, because {name} gives every key that it sets; "
            "leave it out, or take those keys out of the file"
        )
    return changed


def start(config: Any, *, resume: Resume = "never", dry_run: bool = False) -> int:
    """Train, or with ``dry_run`` print what the run would be, and return the exit code.

    Raises CheckpointError if the run must be resumed and there is none; BevatronError for errors of
    the user.
    """
    if dry_run:
        _describe(config)
        return 0
    run = begin(config, resume)
    result = fit(run)
    if ranks_from_environment(os.environ)[0] == 0:
        _print_what_next(result, run.model_options)
    return result.exit_code


def begin(config: Any, resume: Resume = "never") -> Run:
    """Build the run of a configuration, to be trained; see `start`."""
    if resume not in get_args(Resume):
        expected = ", ".join(map(repr, get_args(Resume)))
        raise ConfigError(f"resume: expected one of {expected}, got {resume!r}")
    check_filled(to_dict(config))
    folder = Path(config.output)
    refuse_file(folder)
    checkpoints, metrics = folder / "checkpoints", folder / "metrics.jsonl"
    there = checkpoints.is_dir() and any(checkpoints.iterdir())
    begun = there or (metrics.is_file() and metrics.stat().st_size > 0)
    if resume == "must":
        if not there:
            raise CheckpointError(f"{folder}: holds no checkpoint to resume from")
        _check_newest(checkpoints)
    goes_on = restarted(folder, os.environ) if resume == "never" and begun else None
    if goes_on is not None:
        resume = "auto"
    if resume == "never" and begun:
        raise ConfigError(
            f'{folder}: holds a run already; `resume="auto"` resumes it, another '
            "folder begins a new one"
        )
    if own_cpus() >= WORTH_A_FORK_SERVER:
        start_fork_server()
    start_gpu(config.train.device)
    _, build = recipe(config.recipe)
    run: Run = build(config, resume=resume != "never")
    if goes_on is not None:
        run.notes = [goes_on, *run.notes]
    return run


def _check_newest(checkpoints: Path) -> None:
    """Refuse a damaged newest checkpoint, which ``auto`` would pass over."""
    for path in list_checkpoints(checkpoints)[-1:]:
        try:
            read_intact(path)
        except DamagedError as error:
            raise DamagedError(
                f'{error}; `resume="auto"` continues from the newest intact checkpoint'
            ) from None


def refuse_file(folder: Path) -> None:
    """Refuse a run's folder that is a file, or is inside one; ConfigError naming the file."""
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"output: {path} is a file; name a folder for the run, a new one")


def _print_what_next(result: FitResult, options: str) -> None:
    """Print where the report is and which commands use the model, or how to resume."""
    folder, quoted = result.folder, shlex.quote(str(result.folder))
    if result.finished is None:
        say("the same command with --resume auto resumes")
        return
    if (folder / "report.html").is_file():
        say(f"report: {folder / 'report.html'}")
    say(
        f"errors on other data: bevatron evaluate {quoted} DATA{options}; "
        f"predictions: bevatron predict {quoted} FILE OUT{options}"
    )


def _describe(config: Any) -> None:
    """Build a run in a folder that is removed again, and print what it would be."""
    check_filled(to_dict(config))
    output = Path(config.output).absolute()
    scratch = output.with_name(f".{output.name}{SCRATCH}")
    created = [path for path in scratch.parents if not path.exists()]
    _, build = recipe(config.recipe)
    try:
        run: Run = build(dataclasses.replace(config, output=scratch))
        # A GPU that is named need not be there: its memory is planned.
        gpu = parse_device(run.settings.train.device, "train.device").type == "cuda"
        with open_mesh(run.settings.train.device if torch.cuda.is_available() else "cpu") as mesh:
            if mesh.is_main:
                parameters = sum(weight.numel() for weight in run.model.parameters())
                if parameters > LARGE_MODEL:
                    note(f"planning a step of {parameters / 1e6:.0f} million parameters: minutes")
                # Nor need the processes of the run be there.
                training = max(mesh.world - run.settings.train.evaluation_ranks, 1)
                # A sample of a stage is a crop, not a whole chain or complex.
                samples = "samples" if run.stages else system(config.recipe).samples
                _print_description(describe(run, training, gpu=gpu), run, training, samples)
            barrier(mesh)
    finally:
        if ranks_from_environment(os.environ)[0] == 0:
            shutil.rmtree(scratch, ignore_errors=True)
            for path in created:
                with suppress(OSError):
                    path.rmdir()


def _print_description(found: Mapping[str, Any], run: Run, num_ranks: int, samples: str) -> None:
    rows = {
        "parameters": f"{found['parameters']:,} ({found['trained_parameters']:,} trained)",
        f"training {samples}": f"{len(run.train):,}",
        f"validation {samples}": f"{len(run.valid) if run.valid is not None else 0:,}",
        "ranks": f"{num_ranks}",
        "ranks a sample": f"{run.sharing.repeats}",
        **_described_steps(found),
        "fill of the batches": f"{found['fill']:.1%}",
        "slowest rank over mean": f"{found['imbalance'] - 1:.1%}",
        **dict(_described_memory(name, plan) for name, plan in found["memory"].items()),
    }
    if run.sharing.repeats == 1:
        del rows["ranks a sample"]
    if math.isnan(found["fill"]):  # batches of a fixed number of samples have no capacity to fill
        del rows["fill of the batches"]
    width = max(map(len, rows))
    for name, value in rows.items():
        say(f"{name:<{width}}  {value}")


def _described_memory(stage: str, plan: Planned) -> tuple[str, str]:
    title = f"peak memory of a step{f' of {stage}' if stage else ''}"
    if not isinstance(plan, MemoryPlan):
        return title, f"unknown: {plan}"
    mib = [f"{number / 2**20:,.0f}" for number in (plan.peak, plan.weights, plan.optimizer)]
    rest = f"{(plan.peak - plan.weights - plan.optimizer) / 2**20:,.0f}"
    return (title, f"{mib[0]} MiB: weights {mib[1]}, optimiser {mib[2]}, the largest batch {rest}")


def _described_steps(found: Mapping[str, Any]) -> dict[str, str]:
    if "batches_per_step" in found:
        per_step, steps = f"{found['batches_per_step']:,}", f"{found['steps']:,}"
        return {"batches per step and rank": per_step, "steps": steps}
    return {
        "batches per epoch and rank": f"{found['batches_per_epoch']:,}",
        "steps": f"{found['steps']:,} ({found['steps_per_epoch']:,} per epoch)",
    }
