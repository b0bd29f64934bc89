"""`bevatron bench profile`: time and memory of a run's steps.

The run is built from its configuration and trains some steps from new weights; the results are
printed, drawn and written to the folder ``profile`` of the run.
"""

import dataclasses
import time
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bevatron import __version__
from bevatron.errors import ConfigError
from bevatron.files import write_json_atomically
from bevatron.output import counted
from bevatron.parallel.collectives import gather_json
from bevatron.parallel.mesh import open_mesh, parse_device
from bevatron.recipes import recipe
from bevatron.recipes.training import configuration
from bevatron.train.profiling.autograd_memory import SavedBytes
from bevatron.train.profiling.steps import Memory, Profile, profile_steps
from bevatron.train.profiling.timeline import (
    COMMUNICATION,
    HOST,
    Gains,
    Total,
    by_class,
    by_name,
    classify,
    gains,
    occupation,
    waiting_shares,
)
from bevatron.train.report import plots
from bevatron.train.run import Run

Rows = list[dict[str, Any]]
Report = list[tuple[str, Rows]]

LONGEST = 15
"""Number of kernels and modules printed; the JSON file has all."""

PARTS = ("computing", "overlapped", "communicating", "idle")

MEMORY = {
    "weights": "weights and buffers",
    "gradients": "gradients",
    "optimizer": "optimiser",
    "averages": "averaged weights",
    "activations": "activations",
    "temporary": "temporary, at the peak",
    "peak": "peak of the run",
    "reserved": "reserved on the device (with CUDA graphs)",
}
"""Parts of the memory -> their names in the report."""

GAINS = {
    "host": "host work cost nothing",
    "data": "batches were always ready",
    "ranks": "no rank waited for another",
    "communication": "communication cost nothing",
}


def profile_folder(
    source: Path,
    steps: int | None = None,
    warm: int = 10,
    device: str | None = None,
    out: Path | None = None,
) -> tuple[Report, list[str]]:
    """Profile the steps of a run's folder or of a YAML file; the run's own files stay unchanged.

    Under torchrun every process calls this; only the first returns something to print. Raises
    BevatronError for errors of the user.

    Parameters
    ----------
    source : folder of a run or a configuration
    steps
        Steps to time, and then as many to trace; by default 50 on a GPU and 3 elsewhere, where
        each operator is traced: 10 steps of AlphaFold2's ``small`` take 13 GB.
    warm : warm-up steps before them
    device : overrides that of the configuration
    out : folder for profile.json and the figures; ``profile`` in the run's folder by default

    Returns
    -------
    Titles with tables, and lines about the files written.
    """
    for name, number in (("steps", steps), ("warm", warm)):
        if number is not None and number < 1:
            raise ConfigError(f"--{name}: expected 1 or more, got {number}")
    config, folder = _configuration(source)
    if device is not None:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, device=device))
    with TemporaryDirectory(prefix="bevatron-profile-") as elsewhere:
        # Reuses the run's prepared data; without a run, nothing is left behind.
        place = folder.absolute() if folder.is_dir() else Path(elsewhere)
        _, build = recipe(config.recipe)
        with chdir(_trained_from(folder, Path(config.output))):
            run: Run = build(dataclasses.replace(config, output=place))
            if steps is None:
                on_gpu = parse_device(run.settings.train.device, "train.device").type == "cuda"
                steps = 50 if on_gpu else 3
            found = profile(run, steps, warm)
    if found is None:
        return [], []
    return report(found), write(found, out or folder / "profile")


def profile(run: Run, steps: int = 50, warm: int = 10) -> dict[str, Any] | None:
    """Profile the steps of a run that is already built.

    Returns
    -------
    dict or None
        Plain values: ``step`` and its ``gains`` in ms, and for each of ``ranks`` how its device
        spent the time, by class, by kernel, and its memory. None on ranks other than the first.
    """
    # Opened here too, so that the ranks can be gathered after the run has closed its own.
    with open_mesh(run.settings.train.device, run.settings.train.timeout_minutes * 60) as mesh:
        measured = profile_steps(run, steps, warm)
        collectives = [
            span.duration for span in measured.spans if classify(span.name) == COMMUNICATION
        ]
        share = waiting_shares(gather_json(collectives, mesh))[mesh.rank]
        ranks = gather_json(_summary(measured, share), mesh)
        if not mesh.is_main:
            return None
        on_gpu = mesh.device.type == "cuda"
        name = torch.cuda.get_device_name(mesh.device) if on_gpu else "CPU"
    mean = {key: sum(rank["gains"][key] for rank in ranks) / len(ranks) for key in GAINS}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "on_gpu": on_gpu,
        "versions": {"bevatron": __version__, "torch": torch.__version__},
        "steps": steps,
        "captured": measured.captured,
        "step": sum(rank["step"] for rank in ranks) / len(ranks),
        "gains": mean,
        "ranks": ranks,
    }


def _configuration(source: Path) -> tuple[Any, Path]:
    """Read the configuration of a run's folder or of a file; return it with the run's folder."""
    if not source.exists():
        raise ConfigError(f"{source}: there is no such run or YAML file")
    if not source.is_dir():
        config = configuration(str(source))
        return config, Path(config.output)
    path = source / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{source}: holds no config.yaml; expected the folder of a run")
    return configuration(str(path)), source


def _trained_from(folder: Path, output: Path) -> Path:
    """Return the folder to which a run's relative paths refer."""
    place, parts = folder.resolve(), output.parts
    if output.is_absolute() or place.parts[-len(parts) :] != parts:
        return Path.cwd()
    return place.parents[len(parts) - 1]


def _summary(measured: Profile, waiting_share: float) -> dict[str, Any]:
    """Turn the profile of one rank into plain values; times in ms per step, sizes in bytes."""
    steps, window = measured.steps, measured.window
    spent = occupation(measured.spans, window)
    names = by_name(measured.spans, measured.calls)
    on_gpu = measured.mesh.device.type == "cuda"
    gained = gains(
        measured.spans,
        window,
        steps,
        step=measured.untraced if on_gpu else None,
        data=measured.data,
        ranks=measured.ranks,
        waiting_share=waiting_share,
    )

    def per_step(total: Total) -> dict[str, float]:
        return {"ms": total.time / steps / 1e6, "count": total.count / steps}

    traced, step = spent.window / steps, measured.untraced
    idle = max(1 - (traced - spent.idle / steps) / max(step, 1.0), 0.0)
    if not on_gpu:
        # Tracing slows a CPU's operators as much as the work between them.
        idle, slower = spent.idle / max(spent.window, 1), traced / max(step, 1.0)
        gained = Gains(*(value / slower for value in dataclasses.astuple(gained)))
    return {
        "rank": measured.mesh.rank,
        "step": step / 1e6,
        "traced_step": traced / 1e6,
        "sizes": measured.sizes,
        "shares": spent.shares(),
        "idle_untraced": idle,
        "launches": measured.launches / steps,
        "host_only": spent.idle / steps / 1e6,
        "classes": {name: per_step(total) for name, total in by_class(names).items()},
        "kernels": {name: per_step(total) for name, total in names.items()},
        "gains": {key: value / 1e6 for key, value in dataclasses.asdict(gained).items()},
        "memory": _memory(measured.memory),
    }


def _memory(memory: Memory) -> dict[str, Any]:
    values = dataclasses.asdict(memory)
    kept: dict[str, SavedBytes] = memory.activations
    values["modules"] = {name: dataclasses.asdict(saved) for name, saved in kept.items()}
    values["activations"] = sum(saved.total for saved in kept.values())
    return values


def report(found: dict[str, Any]) -> Report:
    """Format a profile as tables for the terminal."""
    ranks, first = found["ranks"], found["ranks"][0]
    kind = "GPU" if found["on_gpu"] else "CPU"
    how = "replayed CUDA graphs" if found["captured"] else "launched one by one"
    sizes = ", ".join(f"{value:,.0f} {name}" for name, value in first["sizes"].items())
    called, steps = "launches" if found["on_gpu"] else "calls", counted(found["steps"], "step")
    return [
        (
            f"{kind} time of {steps} ({found['device']}, {how}; {sizes} a step)",
            [_time_row(rank) for rank in ranks],
        ),
        (f"{kind} time by class (rank 0)", _class_rows(first, called)),
        (
            f"longest {'kernels' if found['on_gpu'] else 'operators'} (rank 0)",
            [
                {
                    "name": short(name),
                    "ms": f"{total['ms']:.3f}",
                    "share": f"{total['ms'] / first['traced_step']:.1%}",
                    called: f"{total['count']:.1f}",
                }
                for name, total in list(first["kernels"].items())[:LONGEST]
            ],
        ),
        (f"memory (rank 0; activations of a batch of {_sizes(first)})", _memory_rows(first)),
        ("activations by module (rank 0)", _module_rows(first)),
        (f"a step takes {found['step']:.2f} ms; it would take", _gain_rows(found)),
    ]


def _time_row(rank: dict[str, Any]) -> dict[str, str]:
    return {
        "rank": str(rank["rank"]),
        "ms": f"{rank['step']:.2f}",
        **{part: f"{rank['shares'][part]:.1%}" for part in PARTS},
        "ms traced": f"{rank['traced_step']:.2f}",
        "idle untraced": f"{rank['idle_untraced']:.1%}",
    }


def _class_rows(rank: dict[str, Any], called: str) -> Rows:
    rows: Rows = []
    host = {"ms": rank["host_only"], "count": rank["launches"]}
    for name, total in {**rank["classes"], f"{HOST} only": host}.items():
        rows.append(
            {
                "class": name,
                "ms": f"{total['ms']:.3f}",
                "share": f"{total['ms'] / rank['traced_step']:.1%}",
                called: f"{total['count']:.1f}",
            }
        )
    if not rank["launches"]:
        rows[-1][called] = ""
    return rows


def _sizes(rank: dict[str, Any]) -> str:
    """Name the first sizes of a batch, by which it is known; profile.json has all."""
    sizes = list(rank["memory"]["batch"].items())[:3]
    return ", ".join(f"{size:,} {name}" for name, size in sizes)


def _memory_rows(rank: dict[str, Any]) -> Rows:
    memory = rank["memory"]
    return [
        {"for": label, "MiB": f"{memory[key] / 2**20:,.2f}"}
        for key, label in MEMORY.items()
        if memory[key] is not None
    ]


def _module_rows(rank: dict[str, Any]) -> Rows:
    whole = max(rank["memory"]["activations"], 1)
    return [
        {
            "module": name,
            "forward MiB": f"{saved['forward'] / 2**20:,.2f}",
            "inner gradient MiB": f"{saved['gradient'] / 2**20:,.2f}",
            "share": f"{(saved['forward'] + saved['gradient']) / whole:.1%}",
        }
        for name, saved in list(rank["memory"]["modules"].items())[:LONGEST]
    ]


def _gain_rows(found: dict[str, Any]) -> Rows:
    step = found["step"]
    gains = {GAINS[key]: gained for key, gained in found["gains"].items()}
    gains["all of these"] = sum(gains.values())
    return [
        {"if": what, "ms": f"{step - gained:.2f}", "gained": f"{gained / step:.1%}"}
        for what, gained in gains.items()
    ]


def short(name: str, most: int = 90) -> str:
    """Shorten the name of a kernel: no return type and no arguments.

    Examples
    --------
    >>> short("void at::native::vectorized_elementwise_kernel<4, f>(int, f, std::array<char*, 2>)")
    'at::native::vectorized_elementwise_kernel<4, f>'
    """
    name = name.removeprefix("void ").replace("(anonymous namespace)", "{anonymous}")
    depth = 0
    for place, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and "::" in name:
            name = name[:place]
            break
    return name if len(name) <= most else name[: most - 3] + "..."


def write(found: dict[str, Any], folder: Path) -> list[str]:
    """Write profile.json, profile.png and activations.png; return lines that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomically(folder / "profile.json", found, ConfigError)
    plots.save(_overview(found), folder / "profile.png")
    plots.save(_activations(found["ranks"][0]), folder / "activations.png")
    return [f"written: {folder / 'profile.json'}, profile.png, activations.png"]


def _overview(found: dict[str, Any]) -> Any:
    ranks, first = found["ranks"], found["ranks"][0]
    kind = "GPU" if found["on_gpu"] else "CPU"
    known = {label: memory_of(first, key) for key, label in list(MEMORY.items())[:-2]}
    classes = {name: total["ms"] for name, total in first["classes"].items()}
    classes[f"{HOST} only"] = first["host_only"]
    step = found["step"]
    left = {"now": step, **{GAINS[key]: step - value for key, value in found["gains"].items()}}
    left["all of these"] = step - sum(found["gains"].values())
    return plots.stacks(
        [
            plots.Stacks(
                f"{kind} time",
                "share of the time (%)",
                [f"rank {rank['rank']}" for rank in ranks],
                {part: [100 * rank["shares"][part] for rank in ranks] for part in PARTS},
            ),
            _bars(f"{kind} time by class", "ms per step", classes),
            _bars("Memory", "MiB", known),
            _bars("Step time, if", "ms", left),
        ]
    )


def memory_of(rank: dict[str, Any], key: str) -> float:
    """Return one kind of a rank's memory in MiB; 0 if it was not measured."""
    return float(rank["memory"][key] or 0) / 2**20


def _bars(title: str, xlabel: str, values: dict[str, float]) -> plots.Stacks:
    return plots.Stacks(title, xlabel, list(values), {"": list(values.values())})


def _activations(rank: dict[str, Any]) -> Any:
    modules = dict(list(rank["memory"]["modules"].items())[: 2 * LONGEST])
    names: Sequence[str] = list(modules)
    parts = {
        label: [modules[name][key] / 2**20 for name in names]
        for key, label in (("forward", "forward pass"), ("gradient", "inner gradient"))
    }
    parts = {label: values for label, values in parts.items() if any(values)} or parts
    return plots.stacks([plots.Stacks("Activations by module", "MiB", names, parts)], columns=1)
