"""Description of a run without running it: parameters, batches, steps, memory."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bevatron.data.padding import BatchShape, Paddable
from bevatron.data.padding.size_buckets import choose_shapes
from bevatron.errors import BevatronError
from bevatron.parallel import axial
from bevatron.parallel.mesh import Mesh
from bevatron.task import StepNumbers
from bevatron.train.capture.step import sizes_of_batches
from bevatron.train.course import course_of
from bevatron.train.epochs import Drawn, EpochPlan, IndexedBatch, plan_epoch
from bevatron.train.memory_plan import MemoryPlan, NotPlannableError, plan_memory, would_be_captured
from bevatron.train.run import Run
from bevatron.typing import IntArray

Planned = MemoryPlan | NotPlannableError

COLLATED = 16
"""Samples of which the largest step of a stage is planned."""


def describe(run: Run, num_ranks: int = 1, *, gpu: bool = False) -> dict[str, Any]:
    """Describe a run without running it: parameters, memory, steps.

    Parameters
    ----------
    run : nothing of it changes
    num_ranks : number of processes
    gpu : plan the memory of a GPU, which need not be there; else that of a CPU

    Returns
    -------
    dict
        ``parameters``, ``trained_parameters``, ``batches_per_epoch`` and ``steps_per_epoch`` of
        each rank (of a run in stages ``batches_per_step``), ``steps``, ``fill``, ``imbalance``,
        ``largest_batch``, and ``memory``: a `bevatron.train.memory_plan.MemoryPlan` of the largest
        step of each stage by its name, of a run in epochs under ``""``; or why there is none. Where
        processes share a sample it is that of the first of them.
    """
    mesh = run.sharing.planner(Mesh(world=num_ranks))
    course_of(run, mesh)  # refuses settings that contradict the run
    planned = _describe_stages(run, mesh, gpu) if run.stages else _describe_epochs(run, mesh, gpu)
    parameters = list(run.model.parameters())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        **planned,
    }


def _describe_epochs(run: Run, mesh: Mesh, gpu: bool) -> dict[str, Any]:
    """Plan the first epoch and its largest batch."""
    settings = run.settings
    epoch = plan_epoch(
        run.sizes,
        settings.batch,
        mesh,
        seed=settings.train.seed,
        epoch=0,
        describe=run.train.describe,
    )
    if epoch.plan is None:
        raise BevatronError("there is nothing to train on")
    unit = next(iter(settings.batch.capacities(run.sizes)))
    steps = -(-epoch.num_batches // settings.optim.accumulate)
    return {
        "batches_per_epoch": epoch.num_batches,
        "steps_per_epoch": steps,
        "steps": steps * settings.train.epochs,
        "fill": epoch.plan.fill,
        "imbalance": epoch.plan.imbalance,
        "largest_batch": {unit: _largest(run.sizes, unit, epoch)[1]},
        "memory": {"": _memory_of_epoch(run, epoch, unit, gpu)},
    }


def _largest(sizes: Mapping[str, Any], unit: str, epoch: EpochPlan) -> tuple[IndexedBatch, int]:
    """Return the largest batch of all ranks, and its size."""
    batches = epoch.of_all_ranks()
    loads = [int(sizes[unit][indices].sum()) for indices, _ in batches]
    place = int(np.argmax(loads))
    return batches[place], loads[place]


def _memory_of_epoch(run: Run, epoch: EpochPlan, unit: str, gpu: bool) -> Planned:
    batch = _collated(run, run.train, *_largest(run.sizes, unit, epoch)[0])
    captured, shape = gpu and would_be_captured(run), None
    if captured and isinstance(batch, Paddable):
        sizes = sizes_of_batches(run, batch.padding, epoch.of_all_ranks())
        shape = choose_shapes(batch.padding, sizes).shapes[-1]
    return _planned(run, batch, shape, gpu, captured, StepNumbers(0, run.settings.train.seed))


def _planned(
    run: Run, batch: Any, shape: BatchShape | None, gpu: bool, captured: bool, numbers: StepNumbers
) -> Planned:
    try:
        with axial.one_of(run.sharing.repeats):
            return plan_memory(run, batch, shape=shape, gpu=gpu, captured=captured, numbers=numbers)
    except NotPlannableError as error:
        return error


def _collated(run: Run, data: Any, indices: IntArray, weights: Any) -> Any:
    return run.task.collate([data[int(i)] for i in indices], np.asarray(indices), list(weights))


def _readable(run: Run, data: Any, draws: IntArray, size: int) -> Iterator[Any]:
    """Yield batches of ``size`` samples; one is left out if a sample cannot be read, but not all.

    The loader leaves such a sample out too, or names it.
    """
    failed: Exception | None = None
    found = 0
    for first in range(0, max(len(draws) // size * size, 1), size):
        some = draws[first : first + size]
        try:
            one = _collated(run, data, some, [1.0] * len(some))
        except Exception as error:  # noqa: BLE001  raised below unless others can be read
            failed = error
            continue
        found += 1
        yield one
    if failed is not None and not found:
        raise failed


def _describe_stages(run: Run, mesh: Mesh, gpu: bool) -> dict[str, Any]:
    """Plan the first steps, and the largest sample that the first steps of each stage draw."""
    stage = run.stages[0]
    drawn = Drawn(0, 10 * stage.config.samples_per_step, stage.config.samples_per_step)
    rows = stage.train.rows(0, drawn.count)
    sizes = {name: values[rows] for name, values in stage.sizes.items()}
    epoch = plan_epoch(sizes, run.settings.batch, mesh, seed=0, epoch=0, drawn=drawn)
    unit, counts = next(iter(sizes.items()))
    return {
        "batches_per_step": epoch.accumulate,
        "steps": sum(one.config.steps for one in run.stages),
        "fill": math.nan,
        "imbalance": epoch.plan.imbalance if epoch.plan is not None else 1.0,
        "largest_batch": {unit: max(int(counts[b].sum()) for b, _ in epoch.batches)},
        "memory": {
            one.name: memory_of_stage(run, number, gpu=gpu) for number, one in enumerate(run.stages)
        },
    }


def memory_of_stage(run: Run, number: int, *, gpu: bool) -> Planned:
    """Plan a step over the largest of the samples that a stage draws first.

    Samples of the same length differ otherwise, alignments in depth: of the longest `COLLATED`, the
    largest batch is planned, padded to a shape that holds all of them if steps are captured.
    """
    stage, size = run.stages[number], run.settings.batch.size
    unit = next(iter(stage.sizes))
    rows = stage.train.rows(0, 10 * stage.config.samples_per_step)
    again = np.ones(len(rows), dtype=bool)
    again[np.unique(rows, return_index=True)[1]] = False
    longest = np.lexsort((again, -stage.sizes[unit][rows]))  # of equal ones new samples first
    batches = list(_readable(run, stage.train, longest[:COLLATED], size))
    batch = max(batches, key=lambda one: math.prod(max(n, 1) for n in one.sizes.values()))
    captured = gpu and would_be_captured(run)
    shape: BatchShape | None = None
    if captured and isinstance(batch, Paddable):
        sizes = [batch.padding.size_of(one.sizes) for one in batches]
        shape = batch.padding.rounded(tuple(map(max, zip(*sizes, strict=True))))
    numbers = StepNumbers(0, run.settings.train.seed, number)
    return _planned(run, batch, shape, gpu, captured, numbers)
