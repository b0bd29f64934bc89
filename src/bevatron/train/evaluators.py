"""Validation on ranks of its own, beside training.

Rank 0 copies the (averaged) weights to the host and broadcasts them in a group of its own while
training goes on. The evaluating ranks keep the validation set in memory, its largest batches first.
Orders and results pass through the store of the process group, which nobody waits at.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore

from bevatron.data.loader import LoadedBatch
from bevatron.errors import ConfigError
from bevatron.parallel.collectives import sum_scalars
from bevatron.parallel.mesh import Mesh, divide
from bevatron.train.evaluate import (
    Interrupted,
    evaluate_batches,
    evaluation_batches,
    explained_memory,
    make_loader,
)
from bevatron.train.precision import autocast_context, check_autocast, dtype_of
from bevatron.train.run import FitResult, Run, SamplesApart
from bevatron.train.settings import LoaderConfig
from bevatron.train.snapshot import HostFile
from bevatron.train.state import seed_everything

PIECE_BYTES = 2**28
"""Largest piece that is broadcast at once."""

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Division:
    """How the processes are divided.

    Attributes
    ----------
    mesh : this process among those that do the same
    evaluates : whether it validates
    handover : the group of rank 0 and the evaluating ranks
    """

    mesh: Mesh
    evaluates: bool
    handover: Any


def divide_ranks(run: Run, mesh: Mesh) -> Division | None:
    """Divide the processes as ``train.evaluation_ranks`` says; None if all of them train.

    Raises ConfigError if no process is left to train, or there is nothing that they could validate.
    """
    config = run.settings.train
    count, key = config.evaluation_ranks, "train.evaluation_ranks"
    if not count:
        return None
    if count >= mesh.world:
        raise ConfigError(
            f"{key}: {count} of {mesh.world} process{'es' if mesh.world > 1 else ''} would "
            "validate and none would train; start more processes"
        )
    if run.valid is None:
        raise ConfigError(f"{key}: needs validation data")
    if not isinstance(run.sharing, SamplesApart):
        raise ConfigError(f"{key}: not where the processes share each sample; leave it out")
    own, handover = divide(mesh, count, config.timeout_minutes * 60)
    return Division(own, mesh.rank >= mesh.world - count, handover)


class Channel:
    """Orders by number, and their answers, in the store of the process group.

    All ranks open as many of them, one for each run.
    """

    _runs: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
        # Several runs may share a process group: none reads what one before it has left.
        self._store = PrefixStore(f"bevatron/evaluators-{next(self._runs)}", store)

    def put(self, name: str, value: Mapping[str, Any]) -> None:
        """Leave a value."""
        self._store.set(name, json.dumps(value))

    def get(self, name: str) -> Any:
        """Return a value that is there, else None."""
        return json.loads(self._store.get(name)) if self._store.check([name]) else None


class Beside:
    """The side of the ranks that train; all of them call its methods."""

    def __init__(self, division: Division) -> None:
        self.mesh, self._group = division.mesh, division.handover
        self._channel, self._number = Channel(), 0
        self._sent: list[Any] = []
        self.weights: HostFile | None = None

    def hand_over(self, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """Copy rank 0's weights to the host and begin to send them.

        The weights before must have been validated: their copy is overwritten.
        """
        self._number += 1
        if not self.mesh.is_main:
            return
        values = weights()
        if self.weights is None:
            self.weights = HostFile(values)
        with torch.no_grad():
            self.weights.copy(values)
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._channel.put(f"order {self._number}", {"validate": True})
        self._sent = [
            distributed.broadcast(piece, src=0, group=self._group, async_op=True)
            for piece in self.weights.memory.split(PIECE_BYTES)
        ]

    def result(self, stopped: Callable[[], bool]) -> tuple[dict[str, float], float]:
        """Return metrics and seconds of the validation of what was handed over last.

        Raises Interrupted if ``stopped`` returned True.

        Parameters
        ----------
        stopped : whether to stop, asked again and again on all ranks
        """
        name = f"answer {self._number}"
        while True:
            there = self.mesh.is_main and self._channel.get(name) is not None
            if sum_scalars({"there": float(there)}, self.mesh)["there"]:
                break
            if stopped():
                raise Interrupted
            time.sleep(POLL_SECONDS)
        for work in self._sent:
            work.wait()
        found = self._channel.get(name)
        return dict(found["metrics"]), float(found["seconds"])

    def dismiss(self, result: FitResult) -> None:
        """Tell the evaluating ranks that the run is over or has stopped."""
        if self.mesh.is_main:
            values = {**asdict(result), "folder": str(result.folder)}
            self._channel.put("over", values)


def serve(run: Run, division: Division, global_rank: int) -> FitResult:
    """Validate what the training ranks hand over until they dismiss this one."""
    mesh, channel = division.mesh, Channel()
    config = run.settings.train
    model = run.model.to(mesh.device, dtype_of(config.dtype))
    check_autocast(run.task, config)
    seed_everything(config.seed, global_rank)
    received = HostFile(model.state_dict())
    batches: list[LoadedBatch[Any]] = []
    number = 1
    while True:
        # In this order: what was ordered before the end is seen by all ranks or by none.
        over = channel.get("over")
        if channel.get(f"order {number}") is None:
            if over is not None:
                return FitResult(**{**over, "folder": Path(over["folder"])})
            time.sleep(POLL_SECONDS)
            continue
        for piece in received.memory.split(PIECE_BYTES):
            distributed.broadcast(piece, src=0, group=division.handover)
        model.load_state_dict(received.tensors)
        began = time.monotonic()
        batches = batches or _largest_first(run, mesh)
        with suppress(Interrupted):
            metrics = _validate(run, model, batches, mesh, channel)
            if mesh.is_main:
                seconds = time.monotonic() - began
                channel.put(f"answer {number}", {"metrics": metrics, "seconds": seconds})
        number += 1


def _largest_first(run: Run, mesh: Mesh) -> list[LoadedBatch[Any]]:
    """Load this rank's part of the validation set, the largest batches first."""
    assert run.valid is not None
    sizes = run.valid_sizes or {}
    planned = evaluation_batches(sizes, run.settings.batch, mesh)
    costs = next(iter(sizes.values()))
    ordered = sorted(planned, key=lambda batch: -int(costs[batch[0]].sum()))
    loader = LoaderConfig(workers=0, sample_timeout=run.settings.loader.sample_timeout)
    with make_loader(run.valid, ordered, run.task.collate, loader, mesh) as loaded:
        return list(loaded)


def _validate(
    run: Run,
    model: torch.nn.Module,
    batches: list[LoadedBatch[Any]],
    mesh: Mesh,
    channel: Channel,
) -> dict[str, float]:
    """Compute the metrics over all evaluating ranks, unless these are dismissed meanwhile."""

    def dismissed() -> bool:
        over = float(channel.get("over") is not None)
        return bool(sum_scalars({"over": over}, mesh)["over"])

    settings = run.settings
    with explained_memory(settings.batch), autocast_context(settings.train, mesh.device):
        return evaluate_batches(
            run.task, model, batches, mesh, dtype_of(settings.train.dtype), dismissed
        )
