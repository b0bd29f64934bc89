"""The course of a run: what is planned next, at which learning rate, and when it is over.

There are two. `Epochs` uses every sample once per epoch. `Stages` draws samples and counts steps;
for the loop, what lies between two of its validations is an epoch too. Both keep all that changes
in `Progress`, so that a resumed run continues as if it had not been stopped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from bevatron.data.dataset import Dataset
from bevatron.data.packing.randomness import STEPS, counted_words
from bevatron.errors import ConfigError
from bevatron.output import counted
from bevatron.parallel.mesh import Mesh
from bevatron.task import Numbered, StepNumbers
from bevatron.train.epochs import Drawn, EpochPlan, Segment, plan_epoch
from bevatron.train.run import Run, Stage
from bevatron.train.schedule import learning_rate
from bevatron.train.settings import ScheduleConfig
from bevatron.train.state import Progress

Choice = tuple[tuple[str, int], ...]
"""A task's choices for a step, by name: `bevatron.task.Numbered`."""


class Course(Protocol):
    """Decides what the loop does next; a function of settings and progress alone."""

    def data(self, progress: Progress) -> Dataset:
        """Return what the batches of this epoch index."""

    def begin(self, progress: Progress) -> str | None:
        """Begin an epoch; return a line for the log where a stage begins with it."""

    def plan(self, progress: Progress, segments: Sequence[Segment]) -> EpochPlan:
        """Plan what is left of this epoch."""

    def plan_next(self, progress: Progress) -> EpochPlan | None:
        """Plan the epoch after this one, once all its steps are done; None if there is none."""

    def learning_rate(self, progress: Progress, step: int, fraction: float) -> float:
        """Compute the learning rate after these steps and this fraction of the epoch."""

    def validates(self, progress: Progress) -> bool:
        """Whether this epoch ends with a validation."""

    def monitor(self, progress: Progress) -> str:
        """Name the metric that decides, with a minus where larger is better."""

    def judge(self, progress: Progress, value: float) -> None:
        """Record the monitored value of a validation of this stage."""

    def closes(self, progress: Progress) -> bool:
        """Whether a stage or the run ends with this epoch, as far as is known."""

    def end(self, progress: Progress) -> bool:
        """Count an epoch; whether a stage begins."""

    def over(self, progress: Progress) -> str | None:
        """Return why the run is finished, None if it is not."""

    def steps(self, progress: Progress) -> tuple[int, int] | None:
        """Return the steps done and those of the whole run; None if it counts epochs."""


def course_of(run: Run, planner: Mesh) -> Course:
    """Return the course of a run.

    Raises ConfigError if settings contradict the run, or there is no metric of that name.

    Parameters
    ----------
    run : a run with stages is counted in steps
    planner : this rank among those that have batches of their own
    """
    monitor = run.settings.train.monitor
    if monitor is not None and monitor.removeprefix("-") not in run.task.metrics().names:
        raise no_metric(monitor, run.task.metrics().names)
    return Stages(run, planner) if run.stages else Epochs(run, planner)


def no_metric(monitor: str, known: Iterable[str]) -> ConfigError:
    """Say that a validation does not have the metric that a user wants to monitor."""
    name = monitor.removeprefix("-")
    return ConfigError(
        f"train.monitor: '{name}' is not a metric of this validation set "
        f"(known: {', '.join(sorted(known))})"
    )


def begin_step(run: Run, progress: Progress, step: int) -> tuple[dict[str, Any], Choice]:
    """Tell the task what is random in the step after ``step`` others.

    Returns
    -------
    (numbers, choice)
        What is logged of it, and what a captured step has a graph for.
    """
    if not isinstance(run.task, Numbered):
        return {}, ()
    word = counted_words(run.settings.train.seed, STEPS, step, 1)[0, 0]
    numbers = StepNumbers(step, int(word) >> 1, progress.stage)
    chosen = dict(run.task.begin_step(numbers))
    # As text: not every reader of JSON keeps 63 bits of a number.
    logged = {"stage": numbers.stage, "seed": str(numbers.seed), **chosen}
    return logged, tuple(sorted(chosen.items()))


def _next_epoch(progress: Progress) -> None:
    progress.epoch += 1
    progress.step_in_epoch, progress.segments, progress.sums = 0, [], {}


@dataclass(frozen=True)
class Epochs:
    """Every sample once per epoch."""

    run: Run
    planner: Mesh

    def data(self, progress: Progress) -> Dataset:
        """Return the training samples."""
        del progress
        return self.run.train

    def begin(self, progress: Progress) -> str | None:
        """Begin the second stage where it is due."""
        start = self.run.settings.schedule.stage_two_start
        if progress.epoch != start or progress.step_in_epoch:
            return None
        progress.decisions.begin_stage()
        progress.loss_steps, progress.loss_average = 0, 0.0
        return f"epoch {progress.epoch + 1}: the second stage begins"

    def plan(self, progress: Progress, segments: Sequence[Segment]) -> EpochPlan:
        """Plan what is left of this epoch."""
        return self._plan(progress.epoch, segments)

    def plan_next(self, progress: Progress) -> EpochPlan | None:
        """Plan the next epoch, unless this one is the last."""
        number = progress.epoch + 1
        return self._plan(number) if number < self.run.settings.train.epochs else None

    def _plan(self, number: int, segments: Sequence[Segment] = ()) -> EpochPlan:
        run = self.run
        return plan_epoch(
            run.sizes,
            run.settings.batch,
            self.planner,
            seed=run.settings.train.seed,
            epoch=number,
            segments=segments,
            describe=run.train.describe,
        )

    def learning_rate(self, progress: Progress, step: int, fraction: float) -> float:
        """Compute it from the schedule."""
        settings = self.run.settings
        return learning_rate(
            settings.schedule,
            settings.optim.lr,
            step=step,
            epoch=progress.epoch,
            fraction=fraction,
            epochs=settings.train.epochs,
            plateau_scale=progress.decisions.plateau_scale,
        )

    def validates(self, progress: Progress) -> bool:
        """Whether it is this epoch's turn; the last is always validated."""
        config, number = self.run.settings.train, progress.epoch + 1
        return number % config.evaluate_every == 0 or number == config.epochs

    def monitor(self, progress: Progress) -> str:
        """Return the metric of this epoch's stage."""
        run, start = self.run, self.run.settings.schedule.stage_two_start
        later = start is not None and progress.epoch >= start
        of_stage = run.stage_two_monitor if later else None
        return run.settings.train.monitor or of_stage or run.monitor

    def judge(self, progress: Progress, value: float) -> None:
        """Decide nothing: patience counts validations by itself."""
        del progress, value

    def closes(self, progress: Progress) -> bool:
        """Whether the stage or the run ends."""
        number = progress.epoch + 1
        last = number >= self.run.settings.train.epochs
        stage_two = number == self.run.settings.schedule.stage_two_start
        return last or stage_two or _worn(self.run, progress)

    def end(self, progress: Progress) -> bool:
        """Count the epoch."""
        _next_epoch(progress)
        return False

    def over(self, progress: Progress) -> str | None:
        """Return ``epochs`` or ``patience``."""
        stage_two = self.run.settings.schedule.stage_two_start
        last_stage = stage_two is None or progress.epoch > stage_two
        if progress.epoch >= self.run.settings.train.epochs:
            return "epochs"
        return "patience" if _worn(self.run, progress) and last_stage else None

    def steps(self, progress: Progress) -> tuple[int, int] | None:
        """Count epochs, not steps."""
        del progress
        return None


@dataclass(frozen=True)
class Stages:
    """Stages with a number of steps each, on drawn samples.

    Raises ConfigError if settings need epochs or contradict the stages.
    """

    run: Run
    planner: Mesh

    def __post_init__(self) -> None:
        """Refuse settings that have no meaning without epochs."""
        settings = self.run.settings
        if settings.optim.accumulate != 1:
            raise ConfigError(
                "optim.accumulate: follows from samples_per_step, batch.size and the number of "
                "processes where samples are drawn; leave it out"
            )
        check_schedule(settings.schedule, "schedule")
        for stage in self.run.stages:
            if stage.train.seed != settings.train.seed:
                raise ValueError(
                    f"stage {stage.name} draws with seed {stage.train.seed}, the run has "
                    f"{settings.train.seed}"
                )
            if stage.config.schedule is not None:
                check_schedule(stage.config.schedule, f"stages.{stage.name}.schedule")
            if stage.config.target is not None and self.run.valid is None:
                raise ConfigError(f"stages.{stage.name}.target: needs validation data")

    def _stage(self, progress: Progress) -> Stage:
        return self.run.stages[progress.stage]

    def data(self, progress: Progress) -> Dataset:
        """Return the draws of the stage."""
        return self._stage(progress).train

    def begin(self, progress: Progress) -> str | None:
        """Set up the model for the stage; say where one begins."""
        stage = self._stage(progress)
        if stage.set_up is not None:
            stage.set_up(self.run.model)
        if progress.step != progress.stage_began:
            return None
        config = stage.config
        return (
            f"stage {stage.name}: {counted(config.steps, 'step')} of "
            f"{counted(config.samples_per_step, 'sample')} from step {progress.step + 1} on"
        )

    def plan(self, progress: Progress, segments: Sequence[Segment]) -> EpochPlan:
        """Plan what is left until the next validation."""
        if not segments:
            return self._plan(progress, progress.draw, progress.step)
        drawn, config = segments[-1].drawn, self._stage(progress).config
        assert drawn is not None
        planned = self._planned(
            progress, replace(drawn, per_step=config.samples_per_step), segments
        )
        # A stage may have been shortened. Batches that overtook others were of draws further on.
        after = self.run.settings.loader.window - 1
        wanted = max(progress.stage_began + config.steps - progress.step, after)
        beyond = len(planned.batches) // (planned.accumulate or 1) - wanted
        if beyond <= 0:
            return planned
        fewer = drawn.count - beyond * config.samples_per_step
        return self._planned(progress, Drawn(drawn.first, fewer, config.samples_per_step), segments)

    def plan_next(self, progress: Progress) -> EpochPlan | None:
        """Plan what follows the next validation, unless the stage ends with it."""
        if self._is_done(progress):
            return None
        return self._plan(progress, progress.draw + _count(progress), progress.step)

    def _plan(self, progress: Progress, first: int, begin: int) -> EpochPlan:
        """Plan the steps after ``begin`` others and before the next validation."""
        config, done = self._stage(progress).config, begin - progress.stage_began
        left = min(config.evaluate_every - done % config.evaluate_every, config.steps - done)
        count = left * config.samples_per_step
        return self._planned(progress, Drawn(first, count, config.samples_per_step), ())

    def _planned(self, progress: Progress, drawn: Drawn, segments: Sequence[Segment]) -> EpochPlan:
        run, stage = self.run, self._stage(progress)
        rows = stage.train.rows(drawn.first, drawn.count)
        return plan_epoch(
            {name: values[rows] for name, values in stage.sizes.items()},
            run.settings.batch,
            self.planner,
            seed=run.settings.train.seed,
            epoch=progress.epoch,
            segments=segments,
            drawn=drawn,
        )

    def learning_rate(self, progress: Progress, step: int, fraction: float) -> float:
        """Compute it from the schedule of the stage, else that of the run, by the step alone."""
        del fraction
        settings, config = self.run.settings, self._stage(progress).config
        schedule, begin, length = settings.schedule, 0, self._length
        if config.schedule is not None:
            schedule, begin, length = config.schedule, progress.stage_began, config.steps
        return learning_rate(
            schedule,
            config.lr or settings.optim.lr,
            step=step - begin,
            epoch=0,
            fraction=(step - begin) / length,
            epochs=1,
            plateau_scale=progress.decisions.plateau_scale,
        )

    @property
    def _length(self) -> int:
        return sum(stage.config.steps for stage in self.run.stages)

    def validates(self, progress: Progress) -> bool:
        """Return True: an epoch ends where a validation is due."""
        del progress
        return True

    def monitor(self, progress: Progress) -> str:
        """Return the metric of the run."""
        del progress
        return self.run.settings.train.monitor or self.run.monitor

    def judge(self, progress: Progress, value: float) -> None:
        """Compare the metric with the target of the stage."""
        target = self._stage(progress).config.target
        if target is not None:
            larger_is_better = self.monitor(progress).startswith("-")
            progress.decisions.reached |= value <= (-target if larger_is_better else target)

    def closes(self, progress: Progress) -> bool:
        """Whether the stage ends, or patience does."""
        return self._is_done(progress) or _worn(self.run, progress)

    def end(self, progress: Progress) -> bool:
        """Count the draws; start the next stage where this one is over."""
        progress.draw += _count(progress)
        _next_epoch(progress)
        last = progress.stage + 1 == len(self.run.stages)
        if last or not self._is_done(progress) or self._missed(progress):
            return False
        progress.stage, progress.stage_began = progress.stage + 1, progress.step
        progress.decisions.begin_stage()
        progress.loss_steps, progress.loss_average = 0, 0.0
        return True

    def over(self, progress: Progress) -> str | None:
        """Return ``steps``, ``target``, ``target missed`` or ``patience``."""
        last = progress.stage + 1 == len(self.run.stages)
        if progress.step_in_epoch:
            return None
        if self._is_done(progress) and self._missed(progress):
            return "target missed"
        if self._is_done(progress) and last:
            early = progress.step - progress.stage_began < self._stage(progress).config.steps
            return "target" if early else "steps"
        return "patience" if _worn(self.run, progress) and last else None

    def _is_done(self, progress: Progress) -> bool:
        config = self._stage(progress).config
        early = config.ends_at_target and progress.decisions.reached
        return early or progress.step - progress.stage_began >= config.steps

    def _missed(self, progress: Progress) -> bool:
        target = self._stage(progress).config.target
        return target is not None and not progress.decisions.reached

    def steps(self, progress: Progress) -> tuple[int, int] | None:
        """Count what is done and, if no stage ends early, to be done."""
        later = sum(stage.config.steps for stage in self.run.stages[progress.stage :])
        return progress.step, progress.stage_began + later


def _worn(run: Run, progress: Progress) -> bool:
    patience = run.settings.train.patience
    return patience is not None and progress.decisions.without_improvement >= patience


def _count(progress: Progress) -> int:
    drawn = progress.segments[-1].drawn if progress.segments else None
    return 0 if drawn is None else drawn.count


def check_schedule(schedule: ScheduleConfig, key: str) -> None:
    """Refuse a schedule that needs epochs; ConfigError naming what to give instead."""
    if schedule.kind == "exponential" and schedule.gamma_steps is None:
        raise ConfigError(f"{key}.gamma_steps: is needed, this run has no epochs")
    if schedule.warmup_epochs or schedule.per_epoch or schedule.stage_two_start is not None:
        raise ConfigError(
            f"{key}: this run has no epochs; give warmup_steps and stages in place of "
            "warmup_epochs, per_epoch and stage_two_start"
        )
