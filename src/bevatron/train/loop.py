"""The training loop, to be read in one sitting.

`fit` opens the processes and the run's folder, restores a checkpoint if there is one, and runs
the epochs: plan, load, step, validate, decide, save. What an epoch is, the course of the run says:
every sample once, or so many steps on drawn samples. All decisions come from values that are
already added up over the ranks, so that all ranks decide alike.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bevatron.data.loader import LeftOut, Loader
from bevatron.data.processes import own_cpus
from bevatron.errors import ConfigError, LoaderError
from bevatron.garbage import no_garbage_collection
from bevatron.parallel.affinity import keep_near_gpu
from bevatron.parallel.axial import sample_group
from bevatron.parallel.collectives import gather_json, sum_scalars
from bevatron.parallel.data_parallel import equalise
from bevatron.parallel.mesh import Mesh, open_mesh
from bevatron.parallel.threads import threads_for
from bevatron.train.capture.cuda_graphs import NotCapturableError
from bevatron.train.capture.step import captured_step
from bevatron.train.checkpoint import Checkpoint, load_checkpoint
from bevatron.train.console import Console
from bevatron.train.course import Choice, begin_step, course_of, no_metric
from bevatron.train.epochs import EpochPlan, Segment
from bevatron.train.evaluate import (
    Interrupted,
    evaluate_batches,
    evaluation_batches,
    explained_memory,
    make_loader,
)
from bevatron.train.evaluators import Beside, InThread, OnRanks, divide_ranks, serve
from bevatron.train.logger import Logger
from bevatron.train.optim import AveragedWeights, averaged, load_optimizer_tensors, make_optimizer
from bevatron.train.precision import arithmetic, autocast_context, check_autocast, dtype_of
from bevatron.train.run import FitResult, Run, one_unchanging_batch
from bevatron.train.run_folder import RunFolder, Saver
from bevatron.train.signals import StopRequests
from bevatron.train.state import TrainState, seed_everything
from bevatron.train.step import LaunchedStep, note_loss, size_of_batches, train_step

FEW_STEPS = 20
"""Fewer steps in an epoch cause a warning."""


def fit(run: Run, trainer: "Callable[..., Trainer] | None" = None) -> FitResult:
    """Train as a run says, or resume from its checkpoint.

    Under torchrun or srun every process calls this with an equal run. Raises BevatronError for
    anything that a user can fix, see `bevatron.errors`.

    Parameters
    ----------
    run : what to train
    trainer : makes the trainer in place of `Trainer`; profiling has its own

    Returns
    -------
    FitResult
        Also of a run that was stopped by one of `STOP_SIGNALS` and has saved its state; the model
        then has its last weights. After a finished run it has its final ones.
    """
    config, stops = run.settings.train, StopRequests()
    with ExitStack() as stack:
        stack.push(stops)  # caught until the last process has left: another may still save
        whole = stack.enter_context(open_mesh(config.device, config.timeout_minutes * 60))
        # Not before: a signal ends a process that waits for the others, there is nothing to save.
        stops.__enter__()
        near = keep_near_gpu(whole) if config.affinity else None
        division = divide_ranks(run, whole)
        mesh = whole if division is None else division.mesh
        if division is not None and division.evaluates:
            stack.enter_context(arithmetic(config, _threads(run, mesh)))
            return serve(run, division, whole.rank)
        folder = RunFolder(run.folder)
        if mesh.is_main:
            stack.enter_context(folder.claimed())
        checkpoint = folder.open(run, mesh)
        threads = _threads(run, mesh) if checkpoint is None else checkpoint.record.threads
        stack.enter_context(run.sharing.joined(mesh))
        stack.enter_context(arithmetic(config, threads))
        if config.collect_every is not None:  # the loop collects itself
            stack.enter_context(no_garbage_collection())
        console = Console(folder.log, active=mesh.is_main, shown=run.shown_metrics)
        stack.callback(console.close)
        state = begin_state(run, mesh, checkpoint)
        logger = Logger(run, mesh, console, checkpoint)
        stack.callback(logger.close)
        if mesh.is_main:
            folder.write_config(run)
        if checkpoint is not None:
            for reason in folder.passed_over:
                console.say(f"{reason}; going on from {checkpoint.path.name}, which is intact")
            logger.resumed(checkpoint, run, mesh)
            folder.settle(checkpoint, state.progress.decisions, mesh)
        saver = stack.enter_context(Saver(run, state, folder, logger, mesh))
        if near is not None:
            console.say(near)
        if mesh.device.type == "cpu":
            console.say(f"CPU threads: {torch.get_num_threads()} of {own_cpus()} usable cores")
        made = (trainer or Trainer)(run, mesh, state, logger, saver, stops)
        stack.callback(made.close)
        if division is not None:
            made.beside = OnRanks(division)
        elif config.evaluate_beside:
            made.beside = stack.enter_context(closing(InThread(run, state.model, mesh)))
        result = made.walk()
        if made.beside is not None:
            made.beside.dismiss(result)
        return result


def _threads(run: Run, mesh: Mesh) -> int | None:
    """Choose the threads of a new run on the CPU by the size of its batches."""
    if mesh.device.type != "cpu" or not len(run.train):
        return None
    name, counts = next(iter(run.sizes.items()))
    batch = run.settings.batch
    most = int(counts.sum())
    if batch.algorithm == "fixed_count":
        most = round(batch.size * float(counts.mean()))
    elif batch.capacity != "auto":
        most = min(most, batch.capacities(run.sizes).get(name, most))
    return threads_for(max(most, int(counts.max())))


def begin_state(run: Run, mesh: Mesh, checkpoint: Checkpoint | None) -> TrainState:
    """Bring the model to the device and make the optimiser; restore the checkpoint."""
    optim, config = run.settings.optim, run.settings.train
    model = run.model.to(mesh.device, dtype_of(config.dtype))
    check_autocast(run.task, config)
    # A model loaded for further training may be in eval mode.
    model.train()
    equalise(model, mesh)
    ema = AveragedWeights(model, *optim.decays) if optim.decays else None
    state = TrainState(model, make_optimizer(model, optim, ema), ema, generators=run.generators)
    if checkpoint is None:
        if run.optimizer_tensors:
            load_optimizer_tensors(model, state.optimizer, run.optimizer_tensors)
        seed_everything(config.seed, mesh.rank)
    else:
        load_checkpoint(checkpoint, state, config.seed, mesh)
    return state


@dataclass(frozen=True)
class StepInFlight:
    """A launched step with what is logged of it once it is over.

    Attributes
    ----------
    num_batches : batches of this rank in it
    waited : seconds that it waited for its batches
    numbers : what was random in it
    """

    launched: LaunchedStep
    num_batches: int
    lr: float
    waited: float
    numbers: Mapping[str, Any]


class Trainer:
    """Runs the epochs in one process; all processes do the same."""

    def __init__(
        self,
        run: Run,
        mesh: Mesh,
        state: TrainState,
        logger: Logger,
        saver: Saver,
        stops: StopRequests,
    ) -> None:
        self.run, self.mesh, self.state = run, mesh, state
        self.logger, self.saver, self.stops = logger, saver, stops
        compiled = run.settings.train.compile
        self.model: torch.nn.Module = torch.compile(state.model) if compiled else state.model  # type: ignore[assignment]
        self.captured = captured_step(run, state, mesh, logger.console.say)
        self.metrics: dict[str, float] = {}
        self.stopped_by: str | None = None
        collate, loader = run.task.collate, run.settings.loader
        self.planner = run.sharing.planner(mesh)
        self.course = course_of(run, self.planner)
        self._open_loader()
        self.prefetched: tuple[int, EpochPlan | None] = (-1, None)
        self.beside: Beside | None = None
        self.valid_loader: Loader | None = None
        self._valid_batches = 0
        if run.valid is not None:
            sizes = run.valid_sizes if run.valid_sizes is not None else {}
            batches = evaluation_batches(sizes, run.settings.batch, self.planner)
            strict = replace(loader, leave_out=0)
            self._valid_batches = len(batches)
            group = sample_group()
            self.valid_loader = make_loader(run.valid, batches, collate, strict, mesh, group)

    def close(self) -> None:
        """End the loaders' workers, and drop the graphs."""
        if self.captured is not None:
            self.captured.close()
        self.loader.close()
        if self.valid_loader is not None:
            self.valid_loader.close()

    def walk(self) -> FitResult:
        """Run the epochs that are left, save, and write the final weights after the last."""
        progress = self.state.progress
        progress.finished = None  # it may be resumed with more epochs or patience
        for line in self.run.notes:
            self.logger.console.say(line)
        self._warn_of_samples_per_step()
        if progress.pending is not None:
            self._resume_validation()
        while self.stopped_by is None and not self._is_over():
            begins = self.course.begin(progress)
            if begins is not None:
                self.logger.console.say(begins)
            self.run.task.begin_epoch(progress.epoch)
            self._train_epoch()
            if self.stopped_by is None:
                self._end_epoch()
        self.logger.console.end()
        self.saver.checkpoint()
        self.saver.wait()
        result = self.saver.result(self.stopped_by, self.metrics)
        if self.stopped_by is not None:
            self.logger.console.say(
                f"stopped by {self.stopped_by} after step {progress.step}; saved, can be resumed"
            )
            return result
        return self.saver.finish(result)

    def _resume_validation(self) -> None:
        """Continue the validation that was running when the checkpoint was written."""
        progress = self.state.progress
        if self.beside is not None:
            self.beside.hand_over(lambda: self.state.pending or {})
            return
        assert progress.pending is not None
        if progress.pending["epoch"] == progress.epoch:
            progress.pending = None  # these weights are validated once more when the epoch ends
            return
        with suppress(Interrupted):
            self._take_pending()

    def _warn_of_few_steps(self, epoch: EpochPlan) -> None:
        """Warn of batches so large that the weights rarely change."""
        run = self.run
        steps = -(-epoch.num_batches // run.settings.optim.accumulate)
        if steps < FEW_STEPS and not one_unchanging_batch(run):
            total = steps * run.settings.train.epochs
            self.logger.console.say(
                f"warning: only {steps} step{'s' if steps > 1 else ''} per epoch, {total} in all; "
                f"lower {size_of_batches(run)} or train for more epochs"
            )

    def _warn_of_samples_per_step(self) -> None:
        """Warn of steps that are known to make training fail, or leave processes without work."""
        most, fewest = self.run.most_samples, self.planner.world
        for stage in self.run.stages:
            count, why = stage.config.samples_per_step, ""
            if most is not None and count > most:
                why = f"training of this kind is known to fail above {most}"
            elif count < fewest:
                why = f"fewer than {fewest} leave processes without a sample"
            if why:
                self.logger.console.say(
                    f"warning: stages.{stage.name}.samples_per_step is {count}; {why}"
                )

    def _is_over(self) -> bool:
        self.state.progress.finished = self.course.over(self.state.progress)
        return self.state.progress.finished is not None

    def _train_epoch(self) -> None:
        """Train on the batches that are left of this epoch, ``accumulate`` of them per step."""
        run, progress = self.run, self.state.progress
        every = run.settings.checkpoint.every_steps
        epoch = self._plan_epoch()
        accumulate = epoch.accumulate or run.settings.optim.accumulate
        if not progress.step and not run.stages:
            self._warn_of_few_steps(epoch)
        segment, before = epoch.segments[-1], epoch.num_batches - len(epoch.batches)
        self.logger.console.begin_epoch(
            progress.epoch,
            run.settings.train.epochs,
            progress.step_in_epoch,
            progress.step_in_epoch + -(-len(epoch.batches) // accumulate),
            self.course.steps(progress),
        )
        self.logger.begin_batches()
        group: list[Any] = []
        places: list[int] = []
        in_flight: list[StepInFlight] = []
        for loaded in self.loader:
            group.append(loaded)
            places.append(loaded.position)
            if len(group) < accumulate and len(places) < len(epoch.batches):
                continue
            fraction = (before + len(places) - len(group)) / epoch.num_batches
            step = progress.step + len(in_flight)
            lr = self.course.learning_rate(progress, step, fraction)
            numbers, choice = begin_step(run, progress, step)
            samples = sum(float(epoch.batches[one.position][1].sum()) for one in group)
            samples *= self.planner.world / self.mesh.world  # counted once where ranks share them
            asks = {"save": float(self.saver.time_due()), "samples": samples}
            lacking = [one for loaded in group for one in loaded.left_out]
            if run.settings.loader.leave_out:
                asks["left_out"] = float(len(lacking))
            launched = self._launch([one.batch for one in group], lr, asks, choice)
            if launched.notes.get("left_out"):
                self._note_left_out(lacking, step)
            waited = sum(one.waited_seconds for one in group)
            in_flight.append(StepInFlight(launched, len(group), lr, waited, numbers))
            group = []
            self.stopped_by = self.stops.agreed(launched.notes)
            step = progress.step + len(in_flight)
            save = self.stopped_by or launched.notes["save"] or (every and step % every == 0)
            # A captured step is read when the next is launched, so that the GPU never waits.
            while len(in_flight) > (0 if save or self.captured is None else 1):
                self._settle(in_flight.pop(0), segment)
            if save:
                self._note_overtaken(segment, epoch.first, places)
                self.saver.checkpoint()
            if self.stopped_by:
                break
        for step_in_flight in in_flight:
            self._settle(step_in_flight, segment)
        if self.stopped_by is None:
            self._prefetch()

    def _launch(
        self, batches: list[Any], lr: float, asks: Mapping[str, float], choice: Choice = ()
    ) -> LaunchedStep:
        """Launch a step; one that is not captured is over when this returns."""
        notes = {**self.stops.notes(), **asks}
        if self.captured is not None:
            try:
                return self._log_capture(self.captured(batches, lr=lr, notes=notes, choice=choice))
            except NotCapturableError as error:
                if self.run.settings.train.cuda_graphs:
                    raise ConfigError(
                        f"train.cuda_graphs: no step can be captured, {error}"
                    ) from error
                self.logger.console.say(f"steps are not captured as CUDA graphs: {error}")
                self.captured.release()
                self.captured = None
        result = train_step(
            self.run, self.state, self.model, batches, lr=lr, mesh=self.mesh, notes=notes
        )
        return LaunchedStep(result.notes, lambda: result)

    def _log_capture(self, launched: LaunchedStep) -> LaunchedStep:
        seconds = launched.capture_seconds
        if seconds and self.mesh.device.type == "cuda":
            self.logger.console.say(f"captured CUDA graphs in {seconds:.1f} s")
        return launched

    def _settle(self, done: "StepInFlight", segment: Segment) -> None:
        progress, result = self.state.progress, done.launched.result()
        progress.step += 1
        progress.step_in_epoch += 1
        progress.samples += round(result.notes["samples"])
        segment.done += done.num_batches
        note_loss(progress, result.loss)
        seconds = done.launched.capture_seconds
        self.logger.step(progress, result, done.lr, done.waited, seconds, done.numbers)
        every = self.run.settings.train.collect_every
        if every and self.state.progress.step % every == 0:
            gc.collect()

    def _note_left_out(self, lacking: Sequence[LeftOut], step: int) -> None:
        """Log the samples that a step lacks on all ranks, and end the run after too many."""
        progress, most = self.state.progress, self.run.settings.loader.leave_out
        found = [
            one for rank in gather_json([asdict(o) for o in lacking], self.mesh) for one in rank
        ]
        progress.left_out += len(found)
        for one in found:
            self.logger.console.say(f"left out: {one['name']}: {one['reason']}")
        self.logger.write({"kind": "left out", "step": step + 1, "samples": found})
        if progress.left_out > most:
            raise LoaderError(
                f"{progress.left_out} samples could not be read, of which loader.leave_out allows "
                f"{most}; the last is {found[-1]['name']}: {found[-1]['reason']}"
            )

    def _prefetch(self) -> None:
        """Plan the next epoch; workers load it, if need be while this one validates."""
        epoch = self.course.plan_next(self.state.progress)
        if epoch is not None:
            self.loader.set_batches(epoch.batches)
            self.prefetched = self.state.progress.epoch + 1, epoch

    def _plan_epoch(self) -> EpochPlan:
        """Plan the rest of the epoch, and log it if it was repacked."""
        progress = self.state.progress
        number, epoch = self.prefetched
        if epoch is None or number != progress.epoch:
            epoch = self.course.plan(progress, progress.segments)
            self.loader.set_batches(epoch.batches)
        progress.segments = epoch.segments
        if epoch.changed:
            note = {"epoch": progress.epoch, "step": progress.step, "repacked": True}
            progress.changes.append(note)
            self.logger.write({"kind": "repacked", **note})
            self.logger.console.say(
                f"epoch {progress.epoch + 1}: the samples left after step {progress.step} are "
                f"repacked, {len(epoch.batches)} batches per rank"
            )
        if self.captured is not None:
            batches = [] if self.run.stages else epoch.of_all_ranks()
            shapes = self.captured.plan(batches, epoch.accumulate)
            if shapes is not None:
                self.logger.console.say(shapes)
        return epoch

    def _note_overtaken(self, segment: Segment, first: int, places: list[int]) -> None:
        """Record which batches overtook others within the loader window, on all ranks."""
        if self.run.settings.loader.window > 1:
            taken = {*range(first), *(first + place for place in places)}
            prefix = set(range(segment.done))
            gaps = gather_json([sorted(prefix - taken), sorted(taken - prefix)], self.mesh)
            segment.skipped = [skipped for skipped, _ in gaps]
            segment.ahead = [ahead for _, ahead in gaps]

    def _end_epoch(self) -> None:
        """Validate, decide, log the epoch and save."""
        progress, settings = self.state.progress, self.run.settings
        number = progress.epoch + 1
        lr = self.course.learning_rate(progress, progress.step, 1.0)
        try:
            save = self._validated(self.logger.epoch_record(progress, lr))
        except Interrupted:
            return  # what is saved now is the state before the validation, which is repeated
        if self.course.end(progress):
            self.loader.close()
            self._open_loader()
            self.prefetched = (-1, None)
        every = settings.checkpoint.every_epochs
        if self._is_over() or save or (every and number % every == 0):
            self.saver.checkpoint()

    def _validated(self, record: dict[str, Any]) -> bool:
        """Validate the epoch, or hand it over; take what a validation beside training has found.

        Returns
        -------
        bool
            Whether there is something to save.
        """
        progress, save = self.state.progress, False
        before = progress.pending
        if before is not None and before["epoch"] != progress.epoch:
            save = self._take_pending()
        if self.run.valid is None or not self.course.validates(progress):
            self.logger.epoch(record, {}, 0.0, best=False)
        elif self.beside is None:
            began = time.monotonic()
            save = self._decide(record, self._validate(), time.monotonic() - began)
        elif progress.pending is None:
            self.beside.hand_over(self._averaged_weights)
            self._note_pending(record)
        if progress.pending is not None and self.course.closes(progress):
            save = self._take_pending() or save
        return save

    def _decide(
        self,
        record: Mapping[str, Any],
        valid: Mapping[str, float],
        seconds: float,
        weights: Mapping[str, Tensor] | None = None,
    ) -> bool:
        """Take a validation into account and log its epoch; whether to save.

        ``weights`` are those that were validated, None for the current ones.
        """
        progress, value = self.state.progress, self._monitored(valid)
        epoch, step = record["epoch"], record["step"]
        if not math.isfinite(value):
            name = self.course.monitor(progress).removeprefix("-")
            self.logger.console.say(
                f"epoch {epoch + 1}: {name} is {value} in validation, so these weights cannot be "
                "the best ones; if this persists, lower optim.lr"
            )
        improved = progress.decisions.take(value, epoch, step, self.run.settings.schedule)
        self.course.judge(progress, value)
        self.logger.epoch(record, valid, seconds, best=improved)
        return improved and self.saver.improved(record, valid, weights)

    def _averaged_weights(self) -> dict[str, Tensor]:
        """Return the weights that are validated; they change with the next step."""
        averages = {} if self.state.ema is None else self.state.ema.averages
        return {**self.state.model.state_dict(), **averages}

    def _note_pending(self, record: dict[str, Any]) -> None:
        """Keep the state of an unfinished validation for a checkpoint."""
        self.state.progress.pending = record
        if self.beside is not None and self.beside.weights is not None:
            self.state.pending = self.beside.weights

    def _take_pending(self) -> bool:
        """Wait for the concurrent validation and decide; return whether to save."""
        progress, weights = self.state.progress, self.state.pending
        record = progress.pending
        assert record is not None
        if self.beside is not None:
            self.metrics, seconds = self.beside.result(self._agreed_to_stop)
        else:  # a run that now has no ranks for it
            began, kept = time.monotonic(), self.saver.weights(averages=False)
            try:
                self.state.model.load_state_dict(weights or {})
                valid = self._validate(averages=False)
            finally:
                self.state.model.load_state_dict(kept)
            self.metrics, seconds = valid, time.monotonic() - began
        progress.pending = None
        return self._decide(record, self.metrics, seconds, weights)

    def _agreed_to_stop(self) -> bool:
        self.stopped_by = self.stops.agreed(sum_scalars(self.stops.notes(), self.mesh))
        return self.stopped_by is not None

    def _validate(self, *, averages: bool = True) -> dict[str, float]:
        """Compute the metrics of the (averaged) weights over all ranks."""
        settings = self.run.settings
        with (
            averaged(self.state.model, self.state.ema if averages else None),
            explained_memory(settings.batch),
            autocast_context(settings.train, self.mesh.device),
        ):
            self.metrics = evaluate_batches(
                self.run.task,
                self.model,
                self.logger.console.validating(self.valid_loader or (), self._valid_batches),
                self.mesh,
                dtype_of(settings.train.dtype),
                self._agreed_to_stop,
                None if self.captured is None else self.captured.predict,
            )
        return self.metrics

    def _open_loader(self) -> None:
        data, config = self.course.data(self.state.progress), self.run.settings.loader
        if config.pin is None and self.captured is not None:
            config = replace(config, pin=False)  # it copies batches to page-locked memory itself
        collate = self.run.task.collate
        self.loader = make_loader(data, [], collate, config, self.mesh, sample_group())

    def _monitored(self, metrics: Mapping[str, float]) -> float:
        wanted = self.course.monitor(self.state.progress)
        name = wanted.removeprefix("-")
        if name not in metrics:
            raise no_metric(wanted, metrics)
        return metrics[name] if name == wanted else -metrics[name]
