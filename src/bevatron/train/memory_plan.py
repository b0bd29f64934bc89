"""The peak memory of a training step, planned without a GPU and without the memory.

Model, task and batch are copied as tensors without storage (torch's fake tensors), and one step of
the trainer runs on them. Whatever it allocates is counted until it is freed: activations that
autograd keeps or recomputes, gradients, moments, averages, and the workspaces of operators,
whose functions run with their launches left out. A captured step is planned with the memory that
its graph's pool holds, gaps included.
"""

import copy
import dataclasses
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bevatron.data.packing.draws import batches_per_step
from bevatron.data.padding import BatchShape, Paddable
from bevatron.data.padding.static_batch import layout_of
from bevatron.errors import BevatronError
from bevatron.kernels.shared.custom_op import bodies
from bevatron.kernels.shared.launch import planned_for_gpu
from bevatron.parallel.data_parallel import GradientSums
from bevatron.parallel.mesh import Mesh, ranks_from_environment
from bevatron.task import Batch, Numbered, StepNumbers, Unchanging
from bevatron.train.capture.gradients import GradientBuckets
from bevatron.train.capture.step import obstacle
from bevatron.train.capture.step_graphs import is_whole_step
from bevatron.train.memory_segments import BLOCK_BYTES, Segments
from bevatron.train.optim import (
    AveragedWeights,
    FusedAdamEMA,
    clip_gradients,
    make_optimizer,
    trained_parameters,
)
from bevatron.train.precision import autocast_context, dtype_of
from bevatron.train.profiling.autograd_memory import SavedBytes, saved_bytes_by_module
from bevatron.train.run import Run
from bevatron.train.state import TrainState


class NotPlannableError(BevatronError):
    """The memory of a step depends on values of its batch."""


WORKSPACE_BYTES = 2**25
"""cuBLAS takes as much for every thread and stream that multiplies, since Hopper; less before."""

WORKSPACES_LAUNCHED, WORKSPACES_CAPTURED = 2, 3
"""Backward passes have a thread of their own. Both passes are captured on a stream of its own,
after a forward pass on the usual one."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a training step on one device.

    Attributes
    ----------
    weights : parameters and buffers, twice if a copy is validated beside training
    optimizer : gradients, moments and averages, as far as they stay
    batch : the batch, with the copy of it that is under way while a captured step runs
    workspaces : what cuBLAS keeps
    peak : most that is in use at a time, all of it together, and the gaps
    gaps : what the pool of a captured step's graph holds beyond what is in use at a time
    """

    weights: int
    optimizer: int
    batch: int
    workspaces: int
    peak: int
    gaps: int = 0

    @property
    def activations(self) -> int:
        """Memory of the step in addition to what is always held."""
        stays = self.weights + self.optimizer + self.batch + self.workspaces
        return self.peak - self.gaps - stays


def plan_memory(
    run: Run,
    batch: Batch,
    *,
    shape: BatchShape | None = None,
    gpu: bool = True,
    captured: bool = True,
    numbers: StepNumbers | None = None,
) -> MemoryPlan:
    """Plan the memory of a step over one batch.

    Raises NotPlannableError if a step on a GPU looks at values. On a CPU such a step is carried out
    and counted.

    Parameters
    ----------
    run : model, task and settings; nothing of it changes
    batch : on the CPU
    shape : to which the batch is padded, if it is
    gpu : plan for a GPU, whether there is one or not; else for a CPU
    captured : the step is captured as a CUDA graph, see `would_be_captured`
    numbers : numbers of the step, for tasks whose steps differ; those of the first by default
    """
    numbers = numbers or StepNumbers(0, run.settings.train.seed)
    if isinstance(batch, Unchanging):
        batch = _with_what_is_derived(run, batch)
    try:
        with _copies(run, batch, gpu=gpu) as (live, copied):
            step = _Step(*_set_up(run, *copied[:2], numbers), live, captured=gpu and captured)
            planned = step.planned(copied[2], shape)
    except NotPlannableError:
        if gpu:
            raise
    else:
        return _with_workspaces(planned, captured) if gpu else planned
    copied = copy.deepcopy((run.model, run.task, batch))
    with LiveBytes() as live:  # references may look at values: they have to have some
        step = _Step(*_set_up(run, *copied[:2], numbers), live, captured=False)
        return step.planned(copied[2], shape)


def kept_by_module(
    run: Run, batch: Batch, shape: BatchShape | None = None
) -> dict[str, SavedBytes]:
    """Plan what autograd saves on a GPU for the backward pass of a step, by module, most first.

    Raises NotPlannableError as `plan_memory` does.

    Parameters
    ----------
    run : model, task and settings; nothing of it changes
    batch : on the CPU
    shape : to which the batch is padded, if it is
    """
    with _copies(run, batch, gpu=True) as (live, copied):
        numbers = StepNumbers(0, run.settings.train.seed)
        step = _Step(*_set_up(run, *copied[:2], numbers), live, captured=True)
        return step.kept(copied[2], shape)


@contextmanager
def _copies(
    run: Run, batch: Batch, *, gpu: bool
) -> Iterator[tuple["LiveBytes", tuple[nn.Module, Any, Any]]]:
    """Copy model, task and batch as tensors without memory, whose bytes are counted."""
    # Imported here: it takes a second, which no other command should wait for.
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeCopyMode,
        FakeTensorMode,
    )

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), FakeCopyMode(fake):
        warnings.simplefilter("ignore")
        copied = copy.deepcopy((run.model, run.task, batch))
    try:
        with _planning(fake, gpu=gpu) as live:
            yield live, copied
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise NotPlannableError(
            f"the memory of a step depends on values of its batch ({error.func})"
        ) from error


def _with_workspaces(plan: MemoryPlan, captured: bool) -> MemoryPlan:
    held = WORKSPACE_BYTES * (WORKSPACES_CAPTURED if captured else WORKSPACES_LAUNCHED)
    return dataclasses.replace(plan, workspaces=held, peak=plan.peak + held)


def _set_up(run: Run, model: nn.Module, task: Any, numbers: StepNumbers) -> tuple[Run, bool]:
    """Return the run with copies that are set up for a step, and whether a batch is all of it."""
    set_up = run.stages[numbers.stage].set_up if run.stages else None
    if set_up is not None:
        set_up(model)
    if isinstance(task, Numbered):
        task.begin_step(numbers)
    run = dataclasses.replace(run, model=model, task=task)
    world, batches = ranks_from_environment(os.environ)[1], run.settings.optim.accumulate
    if run.stages:
        per_step = run.stages[numbers.stage].config.samples_per_step
        batches = batches_per_step(per_step, world, run.settings.batch.size)
    return run, is_whole_step(batches, world)


def _with_what_is_derived(run: Run, batch: Any) -> Any:
    """Let a model derive from a batch what is kept with it, such as orders of edges.

    That depends on values, which a copy without memory does not have.
    """
    dtype = dtype_of(run.settings.train.dtype)
    model, batch = copy.deepcopy(run.model).to("cpu", dtype), batch.to("cpu", dtype)
    run.task.loss(model, batch, run.task.normalisers(batch)).total.backward()
    return batch


@contextmanager
def _planning(fake: Any, *, gpu: bool) -> Iterator["LiveBytes"]:
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # kernels look at the addresses of tensors without memory
        if gpu:
            stack.enter_context(planned_for_gpu())
        if gpu and find_spec("triton") is not None:
            from bevatron.kernels.shared.triton_compile import nothing_launched

            stack.enter_context(nothing_launched())
        stack.enter_context(torch.random.fork_rng([]))
        stack.enter_context(fake)
        yield stack.enter_context(LiveBytes())


def would_be_captured(run: Run) -> bool:
    """Whether the steps of a run would be captured as CUDA graphs on a GPU."""
    if run.settings.train.cuda_graphs is False:
        return False
    state: Any = TrainState(run.model, torch.optim.Adam(run.model.parameters()), None)
    return obstacle(run, state, Mesh(device=torch.device("cuda"))) is None


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are allocated in a ``with`` block and still in use.

    Operators of bevatron run as what they are made of, so that their workspaces count too.

    Attributes
    ----------
    now, peak : bytes in use, and most so far
    pool : holds what is allocated from now on, if that is followed

    Examples
    --------
    >>> with LiveBytes() as live:
    ...     x = torch.zeros(256, dtype=torch.float32)
    ...     x = x + 1
    >>> live.now, live.peak
    (1024, 2048)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.pool: Segments | None = None
        self._known: dict[int, weakref.ref[Any]] = {}

    def note(self, tensors: Iterable[Any]) -> None:
        """Count the storages of tensors that were made elsewhere."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._note(tensor)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001  torch has no other name for a storage without memory
        if key in self._known:
            return
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        pool = self.pool
        block = pool.take(size) if pool is not None and size else None

        def freed(_: object) -> None:
            del self._known[key]
            self.now -= size
            if pool is not None and block is not None:
                pool.give(block)

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it has allocated."""
        del types
        if func is torch.ops.prim.device.default:
            return func(*args)
        body = bodies.get(func.name())
        if body is None:
            found = func(*args, **(kwargs or {}))
        else:
            with self:
                found = body(*args, **(kwargs or {}))
        self.note(tree_leaves(found))
        return found


class _Step:
    """A step of the trainer on tensors without memory."""

    def __init__(self, run: Run, whole: bool, live: LiveBytes, *, captured: bool) -> None:
        self._run, self._whole, self._live, self._captured = run, whole, live, captured
        self._config, self._optim = run.settings.train, run.settings.optim
        self._dtype = dtype_of(self._config.dtype)
        model = _cast(run.model, self._dtype).train()
        weights = [*model.parameters(), *model.buffers()]
        live.note(weights)
        beside = self._config.evaluate_beside and run.valid is not None
        self._validated = [torch.empty_like(weight) for weight in weights] if beside else []
        self._weights = live.now
        decays = self._optim.decays
        self._ema = AveragedWeights(model, *decays) if decays else None
        self._optimizer = make_optimizer(model, self._optim, self._ema)
        self._sums = GradientSums(trained_parameters(model).values(), Mesh())
        live.note(parameter.grad for parameter in model.parameters())

    def planned(self, batch: Any, shape: BatchShape | None) -> MemoryPlan:
        """Run the step and return what it took."""
        live, task = self._live, self._run.task
        counts = task.normalisers(batch)
        before = live.now
        batch, _staging = self._on_device(batch, shape)
        size = live.now - before
        if not isinstance(self._optimizer, FusedAdamEMA):
            self._take_step(batch, counts)  # torch's make their moments in the first
        kept = live.now - size - self._weights
        _before = self._gradient_before()
        live.peak = beside = live.now
        live.pool = Segments()
        self._take_step(batch, counts)
        gaps = beside + live.pool.held - live.peak if self._captured else 0
        return MemoryPlan(self._weights, kept, size, 0, live.peak + gaps, gaps)

    def kept(self, batch: Any, shape: BatchShape | None) -> dict[str, SavedBytes]:
        """Return what autograd keeps between forward and backward pass."""
        model, task = self._run.model, self._run.task
        counts = task.normalisers(batch)
        batch, _staging = self._on_device(batch, shape)
        excluded = [*model.parameters(), *model.buffers(), *_tensors_of(batch)]
        return saved_bytes_by_module(model, lambda: task.loss(model, batch, counts).total, excluded)

    def _gradient_before(self) -> Tensor | None:
        """Copy the gradient of a step's earlier parts, which the capture of a part keeps."""
        optimizer = self._optimizer
        if self._captured and not self._whole and isinstance(optimizer, FusedAdamEMA):
            return optimizer.gradient.clone()
        return None

    def _on_device(self, batch: Any, shape: BatchShape | None) -> tuple[Any, list[Any]]:
        """Return the batch as it is on the device, with the copy of it that is under way."""
        if not isinstance(batch, Paddable):
            moved = batch if isinstance(batch, Unchanging) else batch.to("cpu", self._dtype)
            self._live.note(_tensors_of(moved))
            return moved, []
        shape = BatchShape(**dict(batch.sizes)) if shape is None else shape
        layout = layout_of(batch, shape, self._dtype)
        copies = [
            {name: torch.empty(dims, dtype=kind) for name, (kind, dims) in layout.items()}
            for _ in range(2 if self._captured else 1)
        ]
        if dict(shape.lengths).items() <= batch.sizes.items():  # it may have values that count
            for name, tensor in copies[0].items():
                tensor.copy_(getattr(batch, name))
        return batch.over(copies[0]), copies[1:]

    def _take_step(self, batch: Any, counts: Mapping[str, Tensor]) -> None:
        task, model, optimizer = self._run.task, self._run.model, self._optimizer
        with autocast_context(self._config, torch.device("cpu")):
            loss = task.loss(model, batch, counts).total
        if self._captured and isinstance(optimizer, FusedAdamEMA):
            GradientBuckets(optimizer, Mesh()).differentiate(loss)
            del loss
        else:
            loss.backward()
            del loss
            self._sums.finish()
        if isinstance(optimizer, FusedAdamEMA):
            optimizer.step()
            return
        parameters = list(trained_parameters(model).values())
        clip_gradients(parameters, self._optim.clip, self._optim.clip_norm == "tensor")
        optimizer.step()
        optimizer.zero_grad()
        if self._ema is not None:
            self._ema.update(model)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Walk through all tensors of an object, including those derived from it."""
    seen, left = set[int](), [value]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
        elif hasattr(one, "__dict__"):
            left += vars(one).values()


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a model whose tensors have no memory, which `torch.nn.Module.to` cannot."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point() and parameter.dtype != dtype:
                if parameter not in made:
                    made[parameter] = nn.Parameter(
                        parameter.detach().to(dtype), requires_grad=parameter.requires_grad
                    )
                setattr(module, name, made[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype != dtype:
                setattr(module, name, buffer.to(dtype))
    return model
