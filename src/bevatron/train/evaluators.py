"""Validation during training, on ranks of its own or in a thread.

In a thread of the one process that trains, a copy of the model takes the (averaged) weights at the
end of a step; on a GPU it works on a stream of its own.

On ranks of its own, rank 0 copies them to the host and broadcasts them in a group of its own while
training goes on. The evaluating ranks keep the validation set in memory, its largest batches first.
Orders and results pass through the store of the process group, which nobody waits at.
"""

import copy
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore

from bevatron.data.loader import LoadedBatch
from bevatron.errors import ConfigError
from bevatron.parallel.collectives import sum_scalars
from bevatron.parallel.mesh import Mesh, divide
from bevatron.train.capture.cuda_graphs import alone
from bevatron.train.epochs import IndexedBatch
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
    """Division of the processes.

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
        """Store a value."""
        self._store.set(name, json.dumps(value))

    def get(self, name: str) -> Any:
        """Return a value if it is there, else None."""
        return json.loads(self._store.get(name)) if self._store.check([name]) else None


class Beside(Protocol):
    """Validates weights during training; all ranks that train call its methods."""

    def hand_over(self, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """Copy weights and begin to validate them; those before must have been validated."""

    @property
    def weights(self) -> Mapping[str, Tensor] | None:
        """The copy, on rank 0."""

    def result(self, stopped: Callable[[], bool]) -> tuple[dict[str, float], float]:
        """Return metrics and seconds of the validation of what was handed over last.

        Raises Interrupted if ``stopped`` returned True, and what the validation raised.

        Parameters
        ----------
        stopped : whether to stop; polled on all ranks
        """

    def dismiss(self, result: FitResult) -> None:
        """Tell the validating side that the run is over or has stopped."""


class InThread:
    """Validation in a thread of the one process that trains.

    Raises ConfigError if there are several, or there is nothing that could be validated.
    """

    def __init__(self, run: Run, model: torch.nn.Module, mesh: Mesh) -> None:
        if mesh.world > 1:
            raise ConfigError(
                f"train.evaluate_beside: is for one process, there are {mesh.world}; let some of "
                "them validate with train.evaluation_ranks"
            )
        if run.valid is None:
            raise ConfigError("train.evaluate_beside: needs validation data")
        self._run, self._mesh = run, mesh
        self._model = copy.deepcopy(model)
        self._weights = self._model.state_dict()
        self._batches: list[LoadedBatch[Any]] = []
        on_gpu = mesh.device.type == "cuda"
        self._stream = torch.cuda.Stream(mesh.device) if on_gpu else None
        self._thread: threading.Thread | None = None
        self._over = False
        self._found: tuple[dict[str, float], float] | BaseException = Interrupted()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights that are validated."""
        return self._weights

    def hand_over(self, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """Copy weights on the device and begin to validate them, with the task as it is now."""
        values = weights()
        with torch.no_grad():
            torch._foreach_copy_([self._weights[name] for name in values], [*values.values()])
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._mesh.device))
        run = replace(self._run, task=copy.copy(self._run.task))
        self._thread = threading.Thread(
            target=self._validate, args=(run,), name="validation", daemon=True
        )
        self._thread.start()

    def result(self, stopped: Callable[[], bool]) -> tuple[dict[str, float], float]:
        """Wait for the thread."""
        assert self._thread is not None
        while self._thread.is_alive():
            self._thread.join(POLL_SECONDS)
            if stopped():
                raise Interrupted
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found

    def dismiss(self, result: FitResult) -> None:
        """End the thread."""
        del result
        self.close()

    def close(self) -> None:
        """End the thread: one within CUDA when the interpreter ends would abort the process."""
        self._over = True
        if self._thread is not None:
            self._thread.join()

    def _validate(self, run: Run) -> None:
        """Validate; what it raises is raised again where the result is taken."""
        began = time.monotonic()
        try:
            if self._stream is not None:
                torch.cuda.set_device(self._mesh.device)
            with torch.cuda.stream(self._stream):
                self._batches = self._batches or _loaded(run, _planned(run, self._mesh), self._mesh)
                metrics = _validated(
                    run, self._model, self._batches, self._mesh, self._dismissed, alone
                )
            self._found = metrics, time.monotonic() - began
        except BaseException as error:  # noqa: BLE001
            self._found = error

    def _dismissed(self) -> bool:
        time.sleep(0)  # else this thread would take its turn again before one that waits for its
        return self._over


class OnRanks:
    """The side of the ranks that train where others validate."""

    def __init__(self, division: Division) -> None:
        self.mesh, self._group = division.mesh, division.handover
        self._channel, self._number = Channel(), 0
        self._sent: list[Any] = []
        self._file: HostFile | None = None

    @property
    def weights(self) -> Mapping[str, Tensor] | None:
        """Rank 0's copy on the host."""
        return None if self._file is None else self._file.tensors

    def hand_over(self, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """Copy rank 0's weights to the host and begin to send them."""
        self._number += 1
        if not self.mesh.is_main:
            return
        values = weights()
        if self._file is None:
            self._file = HostFile(values)
        with torch.no_grad():
            self._file.copy(values)
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._channel.put(f"order {self._number}", {"validate": True})
        self._sent = [
            distributed.broadcast(piece, src=0, group=self._group, async_op=True)
            for piece in self._file.memory.split(PIECE_BYTES)
        ]

    def result(self, stopped: Callable[[], bool]) -> tuple[dict[str, float], float]:
        """Wait for the answer."""
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

    def dismissed() -> bool:
        over = float(channel.get("over") is not None)
        return bool(sum_scalars({"over": over}, mesh)["over"])

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
        batches = batches or _loaded(run, _largest_first(run, _planned(run, mesh)), mesh)
        with suppress(Interrupted):
            metrics = _validated(run, model, batches, mesh, dismissed)
            if mesh.is_main:
                seconds = time.monotonic() - began
                channel.put(f"answer {number}", {"metrics": metrics, "seconds": seconds})
        number += 1


def _planned(run: Run, mesh: Mesh) -> Sequence[IndexedBatch]:
    return evaluation_batches(run.valid_sizes or {}, run.settings.batch, mesh)


def _largest_first(run: Run, planned: Sequence[IndexedBatch]) -> list[IndexedBatch]:
    costs = next(iter((run.valid_sizes or {}).values()))
    return sorted(planned, key=lambda batch: -int(costs[batch[0]].sum()))


def _loaded(run: Run, planned: Sequence[IndexedBatch], mesh: Mesh) -> list[LoadedBatch[Any]]:
    """Load this rank's part of the validation set."""
    assert run.valid is not None
    given = run.settings.loader
    loader = LoaderConfig(workers=0, sample_timeout=given.sample_timeout, pin=given.pin)
    with make_loader(run.valid, planned, run.task.collate, loader, mesh) as loaded:
        return list(loaded)


def _validated(
    run: Run,
    model: torch.nn.Module,
    batches: list[LoadedBatch[Any]],
    mesh: Mesh,
    dismissed: Callable[[], bool],
    turn: AbstractContextManager[object] | None = None,
) -> dict[str, float]:
    """Compute the metrics over all evaluating ranks, unless these are dismissed meanwhile."""
    settings = run.settings
    with explained_memory(settings.batch), autocast_context(settings.train, mesh.device):
        return evaluate_batches(
            run.task, model, batches, mesh, dtype_of(settings.train.dtype), dismissed, turn=turn
        )
