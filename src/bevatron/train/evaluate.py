"""Evaluation and prediction with a task's model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevatron.data.dataset import Dataset
from bevatron.data.loader import LoadedBatch, Loader
from bevatron.errors import OutOfMemoryError, ran_out_of_memory
from bevatron.parallel.collectives import sum_over_ranks
from bevatron.parallel.groups import Group
from bevatron.parallel.mesh import Mesh
from bevatron.parallel.threads import few_threads
from bevatron.parallel.turns import turns_of
from bevatron.task import Collate, Task
from bevatron.train.epochs import IndexedBatch, pack_samples
from bevatron.train.settings import BatchConfig, LoaderConfig
from bevatron.typing import IntArray


class Interrupted(Exception):  # noqa: N818  not an error
    """An evaluation was abandoned because the run must stop."""


def evaluate(
    task: Task[Any],
    model: nn.Module,
    dataset: Dataset,
    sizes: Mapping[str, IntArray],
    *,
    batch: BatchConfig | None = None,
    loader: LoaderConfig | None = None,
    mesh: Mesh | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, float]:
    """Compute the metrics of a model over a data set, each sample once over all ranks.

    Parameters
    ----------
    task, model : the model is in eval mode meanwhile; it must be on the mesh's device in ``dtype``
    dataset, sizes : samples and what each uses of a batch's capacity, ``{"atoms": [n], ...}``
    batch, loader : how to batch and load
    mesh : the ranks that share the work; None = this process alone

    Returns
    -------
    dict
        The task's metrics by name, the same on every rank.
    """
    mesh = mesh or Mesh()
    batches = evaluation_batches(sizes, batch or BatchConfig(), mesh)
    with make_loader(dataset, batches, task.collate, loader, mesh) as loaded:
        return evaluate_batches(task, model, loaded, mesh, dtype)


def evaluation_batches(
    sizes: Mapping[str, IntArray], batch: BatchConfig, mesh: Mesh
) -> Sequence[IndexedBatch]:
    """Pack this rank's part of a data set; a sample above capacity gets its own batch."""
    config = replace(batch, oversized="alone")
    return pack_samples(sizes, None, config, mesh.world, 0, 0).flat(mesh.rank)


def evaluate_batches(
    task: Task[Any],
    model: nn.Module,
    batches: Iterable[LoadedBatch[Any]],
    mesh: Mesh,
    dtype: torch.dtype,
    interrupted: Callable[[], bool] = lambda: False,
    predict: Callable[[nn.Module, Any], dict[str, Tensor]] | None = None,
    turn: AbstractContextManager[object] | None = None,
) -> dict[str, float]:
    """Compute the metrics over this and all other ranks' batches.

    Raises Interrupted if ``interrupted`` returned True.

    Parameters
    ----------
    interrupted : asked before every batch, on all ranks
    predict : replaces the task's
    turn : entered for each batch, and for the sums
    """
    metrics, predicted = task.metrics(), predict or task.predict
    turn = turn or nullcontext()
    with in_eval_mode(model):
        for loaded in batches:
            if interrupted():
                raise Interrupted
            with turn:
                moved = loaded.batch.to(mesh.device, dtype, non_blocking=True)
                metrics.update(moved, predicted(model, moved))
    with turn:
        sums = metrics.sums().detach().to("cpu", torch.float64)
    metrics.load_sums(sum_over_ranks(sums, mesh))
    return metrics.compute()


def predict(
    task: Task[Any],
    model: nn.Module,
    dataset: Dataset,
    sizes: Mapping[str, IntArray],
    *,
    batch: BatchConfig | None = None,
    loader: LoaderConfig | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> Iterator[tuple[Any, dict[str, Tensor]]]:
    """Run a model over a data set in its order.

    Yields
    ------
    (batch, outputs)
        Consecutive samples, as many as fit into a batch's capacity, and what `Task.predict`
        returns for them, on ``device``.
    """
    config = batch or BatchConfig()
    strict = replace(loader or LoaderConfig(), window=1)
    mesh = Mesh(device=torch.device(device))
    if config.algorithm == "fixed_count":
        ones = np.ones(len(dataset), dtype=np.int64)
        batches = ordered_batches({"samples": ones}, {"samples": config.size})
    else:
        batches = ordered_batches(sizes, config.capacities(sizes))
    made = make_loader(dataset, batches, task.collate, strict, mesh)
    with in_eval_mode(model), made as loaded_batches:
        for loaded in loaded_batches:
            moved = loaded.batch.to(mesh.device, dtype, non_blocking=True)
            with few_threads(max(loaded.batch.sizes.values(), default=0), mesh.device):
                outputs = task.predict(model, moved)
            yield moved, outputs


def ordered_batches(
    sizes: Mapping[str, IntArray], capacities: Mapping[str, int]
) -> list[IndexedBatch]:
    """Cut the samples, in order, into batches within the capacities.

    A sample above capacity gets its own batch.

    Examples
    --------
    >>> batches = ordered_batches({"atoms": np.array([3, 3, 9, 1])}, {"atoms": 6})
    >>> [indices.tolist() for indices, _ in batches]
    [[0, 1], [2], [3]]
    """
    columns = np.stack([sizes[name] for name in capacities], axis=1)
    limits = np.array(list(capacities.values()))
    batches: list[IndexedBatch] = []
    start, load = 0, np.zeros_like(limits)
    for i, size in enumerate(columns):
        if i > start and (load + size > limits).any():
            batches.append((np.arange(start, i), np.ones(i - start)))
            start, load = i, np.zeros_like(limits)
        load = load + size
    if len(columns) > start:
        batches.append((np.arange(start, len(columns)), np.ones(len(columns) - start)))
    return batches


def make_loader(
    dataset: Dataset,
    batches: Sequence[IndexedBatch],
    collate: Collate,
    config: LoaderConfig | None,
    mesh: Mesh,
    group: Group | None = None,
) -> Loader:
    """Make a loader as a `LoaderConfig` says; without one it has no workers.

    Processes of a ``group`` go through the same batches together, and make them in turns.
    """
    config = config or LoaderConfig(workers=0)
    on_gpu = mesh.device.type == "cuda"
    pin = config.pin if config.pin is not None else on_gpu
    return Loader(
        dataset,
        batches,
        collate,
        # On a CPU, workers would compete with training for the cores.
        workers=config.workers if on_gpu or config.workers is not None else 0,
        window=config.window,
        prefetch=config.prefetch,
        sample_timeout=config.sample_timeout,
        leave_out=config.leave_out > 0,
        pin_memory=pin,
        turns=None if group is None else turns_of(group, mesh),
    )


@contextmanager
def explained_memory(batch: object) -> Iterator[None]:
    """Add advice to an out-of-memory error in the ``with`` block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"the device ran out of memory in validation; lower batch.capacity or batch.size "
            f"(now {batch})"
        ) from error


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode within a ``with`` block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
