"""The learning rate as a function of progress, and decisions from validation.

There is no hidden state: all that changes is in `Decisions`, which goes into checkpoints.
"""

import math
from dataclasses import dataclass

from bevatron.train.settings import ScheduleConfig


@dataclass
class Decisions:
    """Decisions made from validations so far.

    Attributes
    ----------
    best, best_epoch, best_step
        Smallest monitored metric of this stage and when it was; -1 = not yet.
    without_improvement : validations since
    plateau_scale : factor of the plateau schedule on the learning rate
    plateau_best, plateau_wait : its own best and the validations since
    reached : whether a validation of this stage has reached its target
    """

    best: float | None = None
    best_epoch: int = -1
    best_step: int = -1
    without_improvement: int = 0
    plateau_scale: float = 1.0
    plateau_best: float | None = None
    plateau_wait: int = 0
    reached: bool = False

    def take(self, value: float, epoch: int, step: int, schedule: ScheduleConfig) -> bool:
        """Record a validation; return whether it is the best so far."""
        finite = math.isfinite(value)
        margin = schedule.threshold * abs(self.plateau_best or 0.0)
        if finite and (self.plateau_best is None or value < self.plateau_best - margin):
            self.plateau_best, self.plateau_wait = value, 0
        else:
            self.plateau_wait += 1
            if self.plateau_wait > schedule.patience:
                self.plateau_scale *= schedule.factor
                self.plateau_wait = 0
        improved = finite and (self.best is None or value < self.best)
        if improved:
            self.best, self.best_epoch, self.best_step = value, epoch, step
            self.without_improvement = 0
        else:
            self.without_improvement += 1
        return improved

    def forget_best(self) -> None:
        """Let the next validation be the best."""
        self.best, self.best_epoch, self.best_step = None, -1, -1

    def begin_stage(self) -> None:
        """Reset for a new stage, which weights errors differently."""
        self.forget_best()
        self.plateau_best, self.plateau_wait, self.without_improvement = None, 0, 0
        self.reached = False


def learning_rate(
    schedule: ScheduleConfig,
    lr: float,
    *,
    step: int,
    epoch: int,
    fraction: float,
    epochs: int,
    plateau_scale: float = 1.0,
) -> float:
    """Compute the learning rate of one optimiser step.

    Parameters
    ----------
    schedule : see `ScheduleConfig`
    lr : the rate before schedule and warm-up
    step : steps done since the beginning
    fraction : part of the current epoch that is done, in [0, 1)
    epochs : length of the run
    plateau_scale : factor of the plateau schedule

    Examples
    --------
    >>> config = ScheduleConfig(kind="exponential", gamma=0.5, warmup_steps=4)
    >>> learning_rate(config, 1.0, step=0, epoch=0, fraction=0.0, epochs=10)
    0.25
    >>> learning_rate(config, 1.0, step=90, epoch=2, fraction=0.5, epochs=10)
    0.25
    """
    if schedule.stage_two_start is not None and epoch >= schedule.stage_two_start:
        return schedule.stage_two_lr
    now = float(epoch) if schedule.per_epoch else epoch + fraction
    end = min(epochs, schedule.stage_two_start or epochs)
    value = lr
    if schedule.kind == "exponential":
        every = schedule.gamma_steps
        value = lr * schedule.gamma ** (epoch if every is None else step // every)
    elif schedule.kind in {"cosine", "linear"}:
        begin = min(schedule.warmup_epochs, end)
        done = min(max((now - begin) / max(end - begin, 1e-12), 0.0), 1.0)
        left = 1 - done if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        value = schedule.lr_min + (lr - schedule.lr_min) * left
    elif schedule.kind == "plateau":
        value = lr * plateau_scale
    value = max(value, schedule.lr_min)
    warm = 1.0
    if schedule.warmup_steps:
        warm = min(warm, (step + 1) / schedule.warmup_steps)
    if schedule.warmup_epochs:
        # The very first step has a rate above zero, however long the epoch is; only a rate that
        # changes per epoch starts, as in GPS++, with a whole epoch of zero.
        least = 0.0 if schedule.per_epoch else 1e-3
        warm = min(warm, max(now, least) / schedule.warmup_epochs)
    return value * warm
