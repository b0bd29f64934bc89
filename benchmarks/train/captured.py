"""Captured steps on a GPU: the host's time for one, and shapes that change at random.

    python -m benchmarks.train.captured [--passes 10]

Host time is what a step takes the CPU while the GPU is idle: checking, padding and copying the
batch, launching, and reading the figures once they are there. After the wait for the GPU the CPU's
caches are cold, more or less so from second to second: a tenth of the steps are below the second
figure. In training the GPU works on the step before meanwhile, and is read when the next is
launched: "as in training" is the median launch without the wait. The steps are those of MACE and
GPS++ on the bundled data with their default models; GPS++ in batches of at most 256 molecules.

Then MACE learns from crystals of 20 lengths in random order, as drawn samples come: a step is
launched kernel by kernel the first time that its shape is seen and replayed afterwards.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from ase.build import bulk
from benchmarks.common.arguments import add_out, script_parser
from benchmarks.common.report import write_result
from benchmarks.common.training import repeated
from benchmarks.train.start import FILES

from bevatron.data.neighbours import add_neighbours
from bevatron.data.packing import Draws, Source
from bevatron.data.samples import unlabelled_structure
from bevatron.models.mace import MACE, LossConfig, MaceConfig, MaceTask
from bevatron.parallel.mesh import Mesh
from bevatron.recipes import recipe
from bevatron.recipes.mace.data import batch_sizes
from bevatron.train.capture.step import CapturedStep
from bevatron.train.epochs import pack_samples
from bevatron.train.loop import begin_state
from bevatron.train.run import Run, Stage
from bevatron.train.settings import OptimConfig, Settings, StageConfig, TrainConfig

LENGTHS = [round(4 * 2 ** (k / 4)) for k in range(20)]
"""Cells of the crystals, of 4 atoms each; no two have the same shape."""

STEPS = 900


def captured(run: Run, device: torch.device) -> CapturedStep:
    mesh = Mesh(device=device)
    return CapturedStep(run, begin_state(run, mesh, None), mesh, print)


def batches_of(run: Run, number: int) -> list[Any]:
    """Collate the first batches of an epoch."""
    planned = pack_samples(run.sizes, None, run.settings.batch, 1, 0, 0).flat(0)[:number]
    return [run.task.collate([run.train[int(k)] for k in i], i, w.tolist()) for i, w in planned]


def host_time(system: str, device: torch.device, more: dict[str, Any]) -> dict[str, Any]:
    """Time the host's part of steps, each of which begins on an idle GPU."""
    config, build = recipe(system)
    with tempfile.TemporaryDirectory() as folder:
        values = {"output": folder, "data": {"train": [str(FILES[system])]}, **more}
        run: Run = build(config.from_values(values))
        step, batches = captured(run, device), batches_of(run, 16)
        step.plan(pack_samples(run.sizes, None, run.settings.batch, 1, 0, 0).flat(0))
        wholes, replays, readings = [], [], []
        notes = {"save": 0.0, "samples": 1.0}
        for k in range(STEPS):
            _wait(device)
            began = time.perf_counter()
            waiting = step([batches[k % len(batches)]], lr=1e-4, notes=notes)
            launched = time.perf_counter()
            _wait(device)
            ready = time.perf_counter()
            waiting.result()
            readings.append(time.perf_counter() - ready)
            wholes.append(launched - began + readings[-1])
            replays.append(ready - began)
        training = _as_in_training(step, batches, notes)
        graph = _launch_alone(step, device)
        step.close()
    calm = STEPS // 3
    sizes = ", ".join(f"{value:,} {name}" for name, value in batches[0].sizes.items())
    return {
        "what": f"{system}: {sizes}",
        "host us": round(1e6 * median(wholes[calm:])),
        "a tenth below us": round(1e6 * float(np.quantile(wholes[calm:], 0.1))),
        "launch as in training us": round(1e6 * training),
        "of it the graph's launch us": round(1e6 * graph),
        "of it reading us": round(1e6 * median(readings[calm:])),
        "ms a step": round(1e3 * median(replays[calm:]), 2),
    }


def _as_in_training(step: CapturedStep, batches: list[Any], notes: dict[str, float]) -> float:
    """Return the seconds of a launch while the GPU works on the step before."""
    seconds, before = [], None
    for k in range(STEPS):
        began = time.perf_counter()
        waiting = step([batches[k % len(batches)]], lr=1e-4, notes=notes)
        seconds.append(time.perf_counter() - began)
        if before is not None:
            before.result()
        before = waiting
    return median(seconds[STEPS // 3 :])


def _launch_alone(step: CapturedStep, device: torch.device) -> float:
    """Return the seconds that CUDA takes to launch the graph of a step."""
    seconds = []
    assert step._graphs is not None  # noqa: SLF001
    for graph in [*step._graphs._graphs.values()] * 20:  # noqa: SLF001
        _wait(device)
        began = time.perf_counter()
        graph.run()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def crystals(cutoff: float) -> list[Any]:
    """Make a rattled crystal of every length, with neighbours and labels."""
    random = np.random.default_rng(0)
    samples = []
    for cells in LENGTHS:
        atoms = bulk("Cu", "fcc", a=3.6, cubic=True).repeat((cells, 1, 1))
        atoms.positions += random.normal(0, 0.05, atoms.positions.shape)
        sample = unlabelled_structure(atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc)
        sample["energy"] = np.array(-3.5 * len(atoms))
        sample["forces"] = random.normal(0, 0.5, atoms.positions.shape)
        samples.append(add_neighbours(sample, cutoff))
    return samples


def lengths(device: torch.device, passes: int) -> dict[str, Any]:
    """Step over all lengths in random order, again and again."""
    torch.manual_seed(0)
    config = MaceConfig().with_data(
        atomic_numbers=(29,), atomic_energies=((-3.0,),), avg_num_neighbors=40.0
    )
    data = repeated(crystals(config.r_max), len(LENGTHS), "crystal")
    draws = Draws([Source("crystals", data)], seed=0)
    sizes = batch_sizes(data)
    stage = Stage("drawn", StageConfig(steps=1, samples_per_step=1), draws, sizes)
    settings = Settings(
        optim=OptimConfig(lr=1e-4), train=TrainConfig(dtype="float32", explode_factor=None)
    )
    run = Run(MACE(config), MaceTask(LossConfig()), data, sizes, Path(), settings, stages=[stage])
    step = captured(run, device)
    held, seconds = [], []
    random = np.random.default_rng(0)
    for turn in range(passes):
        for k in random.permutation(len(LENGTHS)).tolist():
            batch = run.task.collate([data[k]], np.array([k]), [1.0])
            began = time.perf_counter()
            step([batch], lr=1e-4).result()
            seconds.append((turn, time.perf_counter() - began))
        held.append(torch.cuda.memory_reserved(device) if device.type == "cuda" else 0)
    graphs = step._graphs  # noqa: SLF001
    assert graphs is not None
    after = len(LENGTHS) * (passes - 1)
    hits = after - (graphs.num_launched - len(LENGTHS))
    step.close()
    return {
        "what": f"{len(LENGTHS)} shapes in random order, {passes} passes",
        "replayed after the first pass %": round(100 * hits / after, 1),
        "GiB after 2 passes": round(held[1] / 2**30, 2),
        "GiB at the end": round(held[-1] / 2**30, 2),
        "ms a step": round(1e3 * median(s for turn, s in seconds if turn > 1), 2),
    }


def measure(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> Sequence[Any]:
    """Add a row for each measurement, written as soon as it is there."""
    device = torch.device(arguments.device)
    steps = {"train": {"dtype": "float32", "device": arguments.device}}
    work = [
        lambda: host_time("mace", device, steps),
        lambda: host_time("gpspp", device, {**steps, "molecules": arguments.molecules}),
    ]
    if arguments.passes:
        work.append(lambda: lengths(device, arguments.passes))
    for one in work:
        rows.append(one())
        write_result(
            "train/captured",
            rows,
            (__doc__ or "").split("\n\n", 2)[2],
            device=device.type,
            folder=arguments.out,
        )
    return rows


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--passes", type=int, default=10, help="0 = no lengths")
    parser.add_argument("--molecules", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    add_out(parser)
    measure(parser.parse_args(), [])


if __name__ == "__main__":
    main()
