"""One optimiser step, from a rank's batches to new weights, and its errors."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from bevatron.errors import DivergenceError, OutOfMemoryError, ran_out_of_memory
from bevatron.parallel.collectives import gather_json, sum_over_ranks, sum_scalars
from bevatron.parallel.data_parallel import GradientSums
from bevatron.parallel.mesh import Mesh
from bevatron.train.optim import FusedAdamEMA, clip_gradients, set_lr, trained_parameters
from bevatron.train.precision import LossScale, autocast_context, dtype_of
from bevatron.train.run import Run, SamplesTogether
from bevatron.train.state import Progress, TrainState

NAMED_SAMPLES = 6
"""Maximum number of samples of a bad batch in a message."""


@dataclass(frozen=True)
class StepResult:
    """A step's figures over all ranks.

    Attributes
    ----------
    loss, terms : the step's loss and its parts
    grad_norm
        Global norm of the gradient before clipping; infinite or NaN if the step was skipped, see
        `bevatron.train.precision.LossScale`.
    sizes : sizes of all batches, by the names that batches give them
    notes : the caller's notes, summed over ranks
    """

    loss: float
    terms: dict[str, float]
    grad_norm: float
    sizes: dict[str, int]
    notes: dict[str, float]


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device may not have finished.

    Attributes
    ----------
    notes : the caller's notes, summed over ranks
    result : waits for the step; raises an error if the run cannot continue after it
    capture_seconds : spent on capturing CUDA graphs before it was launched
    """

    notes: dict[str, float]
    result: Callable[[], StepResult]
    capture_seconds: float = 0.0


def train_step(
    run: Run,
    state: TrainState,
    model: nn.Module,
    batches: Sequence[Any],
    *,
    lr: float,
    mesh: Mesh,
    notes: Mapping[str, float] | None = None,
) -> StepResult:
    """Step once over this rank's batches; equal to one large batch of all ranks' samples.

    Raises DivergenceError if the loss or the gradient is not finite or the loss has exploded
    (nothing has changed); OutOfMemoryError if the GPU has too little memory.

    Parameters
    ----------
    state : changed in place, except for its progress
    model : the model of ``state``, or a compiled one that shares its weights
    batches : on the CPU
    mesh : all ranks call this together
    notes : numbers to sum over ranks along with the step
    """
    task, settings = run.task, run.settings
    dtype = dtype_of(settings.train.dtype)
    parameters = list(trained_parameters(state.model).values())
    counts, sizes, notes = step_totals(run, batches, notes or {}, mesh)
    normalisers = {
        name: torch.tensor(count, dtype=torch.float64, device=mesh.device)
        for name, count in counts.items()
    }
    scale = _loss_scale(run, state)
    parts: list[Tensor] = []
    names: list[str] = []
    sums_of_gradients = _gradient_sums(state, mesh)
    try:
        for batch in batches:
            moved = batch.to(mesh.device, dtype, non_blocking=True)
            with autocast_context(settings.train, mesh.device):
                loss = task.loss(model, moved, normalisers)
            if loss.total.requires_grad:
                last = len(parts) == len(batches) - 1
                overlapping = sums_of_gradients.overlapping() if last else nullcontext()
                # Python of operators takes less time here than on a thread of autograd's own.
                with overlapping, torch.autograd.set_multithreading_enabled(False):
                    (loss.total if scale is None else loss.total * scale.factor).backward()
            names = sorted(loss.terms)
            scalars = [loss.total.detach(), *(loss.terms[name].detach() for name in names)]
            parts.append(torch.stack([scalar.to(torch.float64) for scalar in scalars]))
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        raise out_of_memory(run, batches[len(parts)], mesh) from error
    sums_of_gradients.finish()
    if scale is not None:
        scale.divide(p.grad for p in parameters)
    sums = sum_over_ranks(torch.stack(parts).sum(0), mesh)
    optim, fused = settings.optim, isinstance(state.optimizer, FusedAdamEMA)
    if fused:
        norm = _fused_update(state, sums[0], lr, settings.train.explode_factor)
    else:
        norm = clip_gradients(parameters, optim.clip, optim.clip_norm == "tensor")
    total, *terms, grad_norm = torch.cat([sums, norm.reshape(1).to(sums)]).tolist()
    result = StepResult(total, dict(zip(names, terms, strict=True)), grad_norm, sizes, notes)
    if scale is not None and math.isfinite(total) and not scale.take(grad_norm):
        state.optimizer.zero_grad()
        return result
    if _diverged(state.progress, total, grad_norm, settings.train.explode_factor):
        state.optimizer.zero_grad()
        losses = [float(part[0]) for part in parts]
        raise divergence(run, state.progress, batches, losses, total, grad_norm, mesh)
    if not fused:
        set_lr(state.optimizer, lr)
        state.optimizer.step()
        state.optimizer.zero_grad()
        if state.ema is not None:
            state.ema.update(state.model)
    return result


def _gradient_sums(state: TrainState, mesh: Mesh) -> GradientSums:
    """Return what sums the gradients of this state's optimiser."""
    optimizer = state.optimizer
    if state.gradient_sums is None:
        if isinstance(optimizer, FusedAdamEMA):
            state.gradient_sums = GradientSums(optimizer.parameters, mesh, optimizer.gradient)
        else:
            state.gradient_sums = GradientSums(trained_parameters(state.model).values(), mesh)
    return state.gradient_sums


def _fused_update(
    state: TrainState, loss: Tensor, lr: float, explode_factor: float | None
) -> Tensor:
    """Update, unless the device finds the step unsound as `_diverged` does; return the norm."""
    optimizer = cast("FusedAdamEMA", state.optimizer)
    optimizer.loss.copy_(loss)
    optimizer.largest_loss = largest_loss(state.progress, explode_factor)
    set_lr(optimizer, lr)
    optimizer.step()
    return optimizer.grad_norm


def _loss_scale(run: Run, state: TrainState) -> LossScale | None:
    """Return the loss scale that a step in float16 needs, else None."""
    if run.settings.train.autocast != "float16":
        return None
    if state.progress.loss_scale is None:
        state.progress.loss_scale = LossScale()
    return state.progress.loss_scale


def step_totals(
    run: Run, batches: Sequence[Any], notes: Mapping[str, float], mesh: Mesh
) -> tuple[dict[str, float], dict[str, int], dict[str, float]]:
    """Add up normalisers, sizes and notes over batches and ranks, in one reduction on the host.

    Ranks that share a sample all count it in the normalisers, since each has its loss. Of a sample
    in parts each rank counts its own, and the first rank the sample.
    """
    in_parts = isinstance(run.sharing, SamplesTogether)
    values = {("note", name): v for name, v in notes.items()}
    for batch in batches:
        found = {("count", name): float(v) for name, v in run.task.normalisers(batch).items()}
        sizes = dict(batch.sizes)
        if in_parts and not mesh.is_main:
            sizes[next(iter(sizes))] = 0
        found |= {("size", name): v for name, v in sizes.items()}
        for key, value in found.items():
            values[key] = values.get(key, 0.0) + value
    groups: dict[str, dict[str, float]] = {"count": {}, "size": {}, "note": {}}
    for (kind, name), value in sum_scalars(values, mesh).items():
        groups[kind][name] = value
    repeats = run.sharing.repeats
    counted = {name: int(value) // repeats for name, value in groups["size"].items()}
    return groups["count"], counted, groups["note"]


def note_loss(progress: Progress, loss: float) -> None:
    """Update the recent average of the loss: the mean of the first 20, then exponential."""
    progress.loss_steps += 1
    weight = max(1 / progress.loss_steps, 0.05)
    progress.loss_average += weight * (loss - progress.loss_average)


def _diverged(
    progress: Progress, loss: float, grad_norm: float, explode_factor: float | None
) -> bool:
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return True
    return loss > largest_loss(progress, explode_factor)


def largest_loss(progress: Progress, explode_factor: float | None) -> float:
    """Return the loss above which it counts as exploded; infinity while the average is too new."""
    if explode_factor is None or progress.loss_steps < 10 or progress.loss_average <= 0:
        return math.inf
    return explode_factor * progress.loss_average


def divergence(
    run: Run,
    progress: Progress,
    batches: Sequence[Any],
    losses: Sequence[float],
    loss: float,
    grad_norm: float,
    mesh: Mesh,
) -> DivergenceError:
    """Name the samples of the worst batch of all ranks: not finite or with the largest loss.

    Parameters
    ----------
    batches, losses : those of this rank; all ranks call this together
    loss, grad_norm : those of the whole step
    """
    badness = [value if math.isfinite(value) else math.inf for value in losses]
    worst = max(range(len(batches)), key=badness.__getitem__)
    indices = batches[worst].sample_indices
    data = run.stages[progress.stage].train if run.stages else run.train
    names = [data.describe(int(i)) for i in indices[:NAMED_SAMPLES]]
    mine = {
        "finite": math.isfinite(losses[worst]),
        "loss": losses[worst] if math.isfinite(losses[worst]) else 0.0,
        "names": names,
        "more": len(indices) - len(names),
    }
    found = max(gather_json(mine, mesh), key=lambda one: (not one["finite"], one["loss"]))
    samples = "; ".join(found["names"]) + (f"; and {found['more']} more" if found["more"] else "")
    if not math.isfinite(loss):
        what = f"the loss became {loss}"
    elif not math.isfinite(grad_norm):
        what = f"the gradient became {grad_norm}"
    else:
        what = f"the loss rose to {loss:.4g} from an average of {progress.loss_average:.4g}"
    where = f"epoch {progress.epoch + 1}"
    if run.stages:
        where = f"stage {run.stages[progress.stage].name}"
    return DivergenceError(
        f"{what} in step {progress.step + 1} ({where}), the weights before it are intact; check "
        f"the samples of this batch ({samples}) or lower optim.lr"
    )


def out_of_memory(run: Run, batch: Any, mesh: Mesh) -> OutOfMemoryError:
    """Describe the batch that ran out of memory and the setting to lower."""
    sizes = ", ".join(f"{count} {name}" for name, count in run.named(batch.sizes).items())
    if len(batch.sample_indices) == 1:
        return OutOfMemoryError(
            f"{mesh.device} ran out of memory at a single sample of {sizes}; make the model "
            "smaller, set train.dtype to a shorter type, or divide the sample among several "
            "processes where the recipe can"
        )
    more = f" and raise optim.accumulate (now {run.settings.optim.accumulate}) by as much"
    return OutOfMemoryError(
        f"{mesh.device} ran out of memory at a batch of {sizes}; lower {size_of_batches(run)}"
        f"{'' if run.stages else more}, or set train.dtype to float32"
    )


def size_of_batches(run: Run) -> str:
    """Name the setting that makes batches smaller, and its value."""
    config = run.settings.batch
    if config.algorithm == "fixed_count":
        return f"batch.size (now {config.size} samples)"
    if run.size_setting:
        return run.size_setting
    limits = run.named(config.capacities(run.sizes)).items()
    return f"batch.capacity (now {', '.join(f'{value} {name}' for name, value in limits)})"
