"""Arms of a benchmark of training steps: ways to train one model on the same batches.

All arms share the weights, which stay as they are (the learning rate is 0 if none is set), and see
the same samples with the same dropout, so that their losses and gradients can be compared. Layers
that training starts from zero are drawn, or nothing in front of them would count.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from benchmarks.common.timing import memory_with_graphs

from bevatron import kernels
from bevatron.errors import OutOfMemoryError
from bevatron.kernels import registry
from bevatron.models.common.folding import Checkpointing
from bevatron.models.common.folding.checkpointing import Kind
from bevatron.parallel.axial import sample_group
from bevatron.parallel.mesh import Mesh
from bevatron.train.capture.step import CapturedStep
from bevatron.train.course import begin_step
from bevatron.train.evaluate import make_loader
from bevatron.train.loop import begin_state
from bevatron.train.precision import arithmetic
from bevatron.train.run import Run
from bevatron.train.settings import LoaderConfig
from bevatron.train.step import LaunchedStep, StepResult, train_step

GIB = 2**30
RECOMPILED = 256
"""Graphs of one kind of block, at most."""
STARTED = 0.02
"""Standard deviation of the weights that would start from zero."""

OUT_OF_MEMORY = "out of memory"
"""In place of a time."""
Precision = Literal["bfloat16", "float16", "tf32", "float32"]


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes
    ----------
    name : in tables
    kernels : which implementation of the operators runs
    policy : what the backward pass computes again
    captured, compiled : whether steps are CUDA graphs, and blocks pass through torch.compile
    precision
        Of activations; matmuls of float32 are in TF32 if it is ``tf32``, as in a recipe only then.
    fused : whether Adam is one kernel; of a captured step it always is
    workers : of the loader; None = as many as the trainer takes
    plain : operators of plain PyTorch all the same
    clipped : whether gradients are clipped
    collected : whether Python collects garbage by itself
    """

    name: str
    kernels: str = "auto"
    policy: Kind = "none"
    captured: bool = True
    compiled: bool = False
    precision: Precision = "bfloat16"
    fused: bool = True
    workers: int | None = None
    plain: tuple[str, ...] = ()
    clipped: bool = True
    collected: bool = True

    def implementations(self) -> AbstractContextManager[None]:
        """Return the context in which the arm's operators run."""
        return kernels.use(self.kernels, **dict.fromkeys(self.plain, "reference"))


@dataclass
class Steps:
    """What some steps took, each: seconds from the end of the one before, loader included.

    Those of captured steps on a GPU lie between their ends there. The host sees them late: a launch
    returns only once most of a graph has been handed over.

    Attributes
    ----------
    results : loss, its terms and the gradient's norm
    seconds, waited : of a step, and of it for data
    """

    results: list[StepResult] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


class Training:
    """Training of an arm with the loader and the step of the trainer.

    Parameters
    ----------
    arm : how
    run : model, task, data and settings; the model is on the device
    mesh : all its ranks train together, the samples divided as the run says; None = one process

    Attributes
    ----------
    lr : learning rate of the next steps
    """

    lr = 0.0

    def __init__(self, arm: Arm, run: Run, mesh: Mesh | None = None) -> None:
        self.arm, self.device = arm, next(run.model.parameters()).device
        optim = run.settings.optim
        settings = replace(
            run.settings,
            loader=LoaderConfig(workers=arm.workers),
            optim=replace(
                optim, fused=None if arm.fused else False, clip=optim.clip if arm.clipped else None
            ),
            train=replace(run.settings.train, explode_factor=None, tf32=arm.precision == "tf32"),
        )
        self.run = replace(run, settings=settings)
        self.mesh = Mesh(device=self.device) if mesh is None else mesh
        set_policy(run.model, arm.policy)
        self.state = begin_state(self.run, self.mesh, None)
        self._captured = CapturedStep(self.run, self.state, self.mesh) if arm.captured else None

    def steps(self, numbers: Sequence[int], seconds: float = math.inf) -> Steps:
        """Train the steps of these numbers, from which follows what is random in them.

        None but the first, of captured steps the second, is begun after so many seconds.
        """
        group = self.run.sharing.planner(self.mesh)
        samples = (number * group.world + group.rank for number in numbers)
        batches = [(np.array([sample]), np.ones(1)) for sample in samples]
        found, waiting = Steps(), list[LaunchedStep]()
        ends: list[torch.cuda.Event] = []
        run = self.run
        # As in the trainer: a captured step is read when the next is launched.
        ahead = self.arm.captured and self.device.type == "cuda"
        given = run.train, batches, run.task.collate, run.settings.loader, self.mesh
        loading = make_loader(*given, sample_group())
        with nullcontext() if self.arm.collected else uncollected(), loading as loader:
            began = first = time.perf_counter()

            def settle() -> None:
                nonlocal began
                found.results.append(waiting.pop(0).result())
                now = time.perf_counter()
                found.seconds.append(now - began)
                began = now

            for number, loaded in zip(numbers, loader, strict=True):
                if len(found.waited) > self.arm.captured and time.perf_counter() - first > seconds:
                    break
                found.waited.append(loaded.waited_seconds)
                waiting.append(self.launch(loaded.batch, number))
                if ahead:
                    ends.append(torch.cuda.Event(enable_timing=True))
                    ends[-1].record()
                while len(waiting) > ahead:
                    settle()
            while waiting:
                settle()
        if ahead:
            torch.cuda.synchronize()
            found.seconds[1:] = [a.elapsed_time(b) / 1e3 for a, b in pairwise(ends)]
        return found

    def launch(self, batch: Any, number: int) -> LaunchedStep:
        """Launch the step of a number over a batch."""
        run, state = self.run, self.state
        _, choice = begin_step(run, state.progress, number)
        with self.arm.implementations(), arithmetic(run.settings.train, None):
            if self._captured is not None:
                return self._captured([batch], lr=self.lr, choice=choice)
            result = train_step(run, state, run.model, [batch], lr=self.lr, mesh=self.mesh)
        return LaunchedStep(result.notes, lambda: result)

    def release(self) -> None:
        """Give back all memory but that of the weights."""
        if self._captured is not None:
            self._captured.release()
        for weight in self.run.model.parameters():
            weight.grad = None
        del self._captured, self.state
        free()


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python from collecting garbage by itself for the length of a ``with`` block."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def drawn(module: torch.nn.Module) -> None:
    """Draw the weights that start from zero."""
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1 and not weight.any():
                weight.normal_(std=STARTED)


def first_batch(run: Run) -> Any:
    """Make the batch of a run's first sample."""
    return run.task.collate([run.train[0]], np.zeros(1, np.int64), [1.0])


def set_policy(model: torch.nn.Module, kind: Kind) -> None:
    """Set what the backward pass computes again, in all stacks."""
    for module in model.modules():
        if isinstance(getattr(module, "checkpointing", None), Checkpointing):
            module.checkpointing = Checkpointing(kind)


@contextmanager
def compiled_blocks(blocks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Pass blocks through torch.compile, static shapes; equal ones are compiled once."""
    torch.compiler.reset()
    for operator in kernels.implementations():
        registry.load(operator, "reference")  # an import would break the graphs
    for block in blocks:
        block.compile(dynamic=False)
    try:
        # Blocks of one kind count together; beyond the limit they would run eagerly, silently.
        with torch._dynamo.config.patch(recompile_limit=RECOMPILED):  # noqa: SLF001  no other way
            yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None  # noqa: SLF001  torch has no other way back
        torch.compiler.reset()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_gib() -> float:
    """Return the most memory in use at once, GiB: by a step, or held by CUDA graphs between steps.

    What a graph holds was in use while it was captured, so the two are not added.
    """
    held = memory_with_graphs(torch.cuda.memory_allocated())
    return max(torch.cuda.max_memory_allocated(), held) / GIB


def or_out_of_memory(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or None where the GPU has too little memory."""
    try:
        return call()
    except (OutOfMemoryError, torch.OutOfMemoryError):
        pass
    free()
    return None


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of two lists, as far as both go.

    Examples
    --------
    >>> difference([1.0, 2.2, 7.0], [1.0, 2.0])
    0.10000000000000009
    """
    pairs = zip(ours, theirs, strict=False)
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
