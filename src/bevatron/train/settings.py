"""Settings of a training run: optimiser, schedule, batches, loader, checkpoints, the run itself.

Every optimisation has its own switch, so an ablation is a sweep over configurations.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bevatron.errors import ConfigError

log = logging.getLogger("bevatron.settings")


def _expect(fine: bool, key: str, what: str, found: object) -> None:
    """Refuse a value, naming its key and what was expected."""
    if not fine:
        raise ConfigError(f"{key}: expected {what}, got {found}")


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser and what happens to gradients and averaged weights around it.

    Attributes
    ----------
    algorithm
        ``adam`` (weight decay added to the gradient), ``amsgrad`` (Adam with the largest second
        moment so far, mace's default) or ``adamw`` (weight decay apart from the gradient).
    lr : learning rate before schedule and warm-up
    weight_decay : weight decay of the parameters that the model selects (all by default)
    betas : Adam's decay rates of the first and second moment
    eps : Adam's epsilon, added to the root of the second moment
    clip : maximum norm of the gradient; None = no clipping
    clip_norm
        Whether that norm is of the whole gradient (``global``) or of each parameter's by itself
        (``tensor``, GPS++).
    accumulate : batches per rank and optimiser step (gradient accumulation)
    ema
        Decay of the exponential moving average of the weights, which is what is validated and
        kept, in step n at most (1 + n) / (10 + n); None = the weights themselves. Of several decays
        the first is validated; the other averages become models of their own at the end, in folders
        such as ``ema-0.9999``.
    fused
        Clip, step and average in a few kernels of our own instead of torch's; the default on a GPU.
    """

    algorithm: Literal["adam", "amsgrad", "adamw"] = "amsgrad"
    lr: float = 0.01
    weight_decay: float = 5e-7
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float | None = 10.0
    clip_norm: Literal["global", "tensor"] = "global"
    accumulate: int = 1
    ema: float | tuple[float, ...] | None = 0.99
    fused: bool | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        _expect(self.lr > 0, "optim.lr", "a number above 0", self.lr)
        decay = self.weight_decay
        _expect(decay >= 0, "optim.weight_decay", "0 or more", decay)
        fine = all(0 <= beta < 1 for beta in self.betas)
        _expect(fine, "optim.betas", "two in [0, 1)", self.betas)
        _expect(self.eps > 0, "optim.eps", "a number above 0", self.eps)
        fine = self.clip is None or self.clip > 0
        _expect(fine, "optim.clip", "a number above 0", self.clip)
        _expect(self.accumulate >= 1, "optim.accumulate", "1 or more", self.accumulate)
        fine = all(0 < decay < 1 for decay in self.decays)
        _expect(fine, "optim.ema", "numbers in (0, 1)", self.ema)
        fine = len({*self.decays}) == len(self.decays)
        _expect(fine, "optim.ema", "different numbers", self.ema)

    @property
    def decays(self) -> tuple[float, ...]:
        """Decays of all averages of the weights."""
        if self.ema is None:
            return ()
        return self.ema if isinstance(self.ema, tuple) else (self.ema,)


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule.

    Attributes
    ----------
    kind
        ``constant``; ``exponential`` (times ``gamma`` every epoch); ``cosine`` (to ``lr_min`` at
        the last epoch, changing every step); ``linear`` (likewise, on a straight line);
        ``plateau`` (times ``factor`` once the monitored metric has not improved for ``patience``
        validations).
    gamma : decay factor of ``exponential``
    gamma_steps : steps between the decays of ``exponential``; None = one epoch
    factor : decay factor of ``plateau``
    patience : validations without improvement before ``plateau`` decays
    threshold : smallest relative improvement that counts for ``plateau``
    lr_min : lower bound of the learning rate
    warmup_steps : steps over which the learning rate rises linearly from 0
    warmup_epochs : the same in epochs; the longer one counts
    per_epoch
        The learning rate changes from epoch to epoch only. With a warm-up in epochs the first
        epoch then has rate 0, as GPS++ was trained.
    stage_two_start
        Epoch (from 0) at which the second stage begins: the learning rate becomes ``stage_two_lr``
        and stays, the best epoch and patience are counted anew, the average of the weights
        (``optim.ema``) goes on. A loss with a second stage (MACE: ``loss.stage_two``, energies
        times 1000) takes its weights. None = no second stage.
    stage_two_lr : learning rate of the second stage
    """

    kind: Literal["constant", "exponential", "cosine", "linear", "plateau"] = "plateau"
    gamma: float = 0.9993
    gamma_steps: int | None = None
    factor: float = 0.8
    patience: int = 50
    threshold: float = 1e-4
    lr_min: float = 0.0
    warmup_steps: int = 0
    warmup_epochs: float = 0.0
    per_epoch: bool = False
    stage_two_start: int | None = None
    stage_two_lr: float = 1e-3

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        _expect(0 < self.gamma <= 1, "schedule.gamma", "a number in (0, 1]", self.gamma)
        fine = self.gamma_steps is None or self.gamma_steps >= 1
        _expect(fine, "schedule.gamma_steps", "1 or more", self.gamma_steps)
        _expect(0 < self.factor < 1, "schedule.factor", "a number in (0, 1)", self.factor)
        for name in ("patience", "threshold", "lr_min", "warmup_steps", "warmup_epochs"):
            value = getattr(self, name)
            _expect(value >= 0, f"schedule.{name}", "0 or more", value)
        rate, start = self.stage_two_lr, self.stage_two_start
        _expect(rate > 0, "schedule.stage_two_lr", "a number above 0", rate)
        fine = start is None or start >= 0
        _expect(fine, "schedule.stage_two_start", "an epoch from 0", start)


@dataclass(frozen=True)
class StageConfig:
    """One stage of a run whose samples are drawn; such a run is counted in steps, not epochs.

    A system adds keys of its own, such as the length of a crop.

    Attributes
    ----------
    steps : length of the stage
    samples_per_step
        Samples of one optimiser step over all ranks. Each rank takes its part in batches of
        ``batch.size``.
    evaluate_every : steps between validations; the last step is always validated
    lr : learning rate before schedule and warm-up; None = ``optim.lr``
    schedule
        The stage's own schedule, counted from its first step; None = that of the run, which goes
        on.
    target : value that the monitored metric must reach by the end of the stage, or the run ends
    ends_at_target : end the stage as soon as the target is reached
    """

    steps: int
    samples_per_step: int
    evaluate_every: int = 500
    lr: float | None = None
    schedule: ScheduleConfig | None = None
    target: float | None = None
    ends_at_target: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name in ("steps", "samples_per_step", "evaluate_every"):
            _expect(getattr(self, name) >= 1, name, "1 or more", getattr(self, name))
        _expect(self.lr is None or self.lr > 0, "lr", "a number above 0", self.lr)
        if self.ends_at_target and self.target is None:
            raise ConfigError("ends_at_target: needs a target")


OLD_UNIT = "nodes"
"""Name of the unit in which samples are measured, in the old key ``batch.cost_nodes``."""


def with_named_costs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Convert plain values of ``batch`` that have old keys for the cost.

    Examples
    --------
    >>> with_named_costs({"size": 3, "cost_nodes": 1.0, "cost_edges": 0.5, "cost_constant": 0.0})
    {'size': 3, 'cost': {'nodes': 1.0, 'edges': 0.5}}
    >>> with_named_costs({"cost_nodes": 1.0, "cost_edges": 0.0, "cost_constant": 0.0})
    {'cost': None}
    """
    values = dict(batch)
    old = {name: values.pop(f"cost_{name}", None) for name in (OLD_UNIT, "edges", "constant")}
    given = {name: float(weight) for name, weight in old.items() if weight is not None}
    cost = values.get("cost")
    if given:
        before = {OLD_UNIT: 1.0} if cost is None else cost
        cost = {name: weight for name, weight in {**before, **given}.items() if weight}
        cost = None if cost == {OLD_UNIT: 1.0} else cost
    return {**values, "cost": cost}


@dataclass(frozen=True)
class BatchConfig:
    """Batching of samples.

    Attributes
    ----------
    algorithm
        ``balanced`` (full batches of equal cost), ``algorithm1`` (Firoz et al. 2025),
        ``streaming`` (greedy, in random order) or ``fixed_count`` (``size`` samples each).
    capacity
        Largest batch of one rank: a number of what the samples are measured in (atoms, nodes), or
        numbers by name, such as ``{atoms: 1024, edges: 60000}``; ``auto``: chosen by the recipe.
        For structures that is the smallest batch that trains within 5 % of the GPU's highest rate,
        leaves 100 steps an epoch and fits into memory, measured when the run begins; 256 atoms on a
        CPU.
    size : samples per batch of ``fixed_count``
    cost
        What is balanced over ranks: weights by name, such as ``{atoms: 1.0, edges: 0.29}``, and
        ``constant`` for a sample by itself. None = what the samples are measured in.
    order : which batch ``algorithm1`` serves first
    oversized
        A sample above capacity: ``refuse`` stops and names it, ``alone`` gives it a batch of its
        own.
    cost_nodes : old key of ``cost``: the weight of what the samples are measured in
    cost_edges : old key of ``cost``
    cost_constant : old key of ``cost``
    """

    algorithm: Literal["balanced", "algorithm1", "streaming", "fixed_count"] = "balanced"
    capacity: int | dict[str, int] | Literal["auto"] = 256
    size: int = 10
    cost: dict[str, float] | None = None
    order: Literal["emptiest", "fullest"] = "emptiest"
    oversized: Literal["refuse", "alone"] = "refuse"
    cost_nodes: InitVar[float | None] = None
    cost_edges: InitVar[float | None] = None
    cost_constant: InitVar[float | None] = None

    def __post_init__(
        self, cost_nodes: float | None, cost_edges: float | None, cost_constant: float | None
    ) -> None:
        """Refuse values out of range; convert old keys."""
        given = {"cost_nodes": cost_nodes, "cost_edges": cost_edges, "cost_constant": cost_constant}
        cost = with_named_costs({"cost": self.cost, **given})["cost"]
        if cost != self.cost:
            object.__setattr__(self, "cost", cost)
            log.warning("batch.cost_nodes and related keys are now batch.cost: %s", cost)
        capacity = self.capacity
        values = capacity.values() if isinstance(capacity, dict) else [capacity]
        fine = all(value == "auto" or value > 0 for value in values)
        _expect(fine, "batch.capacity", "more than 0", capacity)
        _expect(capacity != {}, "batch.capacity", "a number", capacity)
        for name, weight in (self.cost or {}).items():
            _expect(weight >= 0, f"batch.cost.{name}", "0 or more", weight)
        _expect(self.size >= 1, "batch.size", "1 or more", self.size)

    def capacities(self, counted: Iterable[str] = ()) -> dict[str, int]:
        """Return the capacity by name.

        Raises ConfigError if it is ``auto`` and has not been measured.

        Parameters
        ----------
        counted
            Names of what is counted; the first, which a plain number needs, is what samples are
            measured in.
        """
        if isinstance(self.capacity, dict):
            return dict(self.capacity)
        names = list(counted)
        if isinstance(self.capacity, int) and names:
            return {names[0]: self.capacity}
        raise ConfigError("batch.capacity: 'auto' is measured by a recipe; give a number here")

    def costs(self, counted: Iterable[str]) -> dict[str, float]:
        """Return the weights of a sample's cost by name, without zeros; see `capacities`."""
        names = list(counted)
        weights = {names[0]: 1.0} if self.cost is None else self.cost
        return {
            names[0] if name == OLD_UNIT and OLD_UNIT not in names else name: weight
            for name, weight in weights.items()
            if weight
        }


@dataclass(frozen=True)
class LoaderConfig:
    """Loading of batches.

    Attributes
    ----------
    workers
        Processes that read and collate; 0 = in the training process. None = on a GPU in a thread
        of it while batches take under a millisecond, else as many processes as the CPUs allow; on
        a CPU 0. A reader that may crash its process needs processes: give their number.
    window
        1 = strict order of the plan; n = a ready batch may overtake up to n - 1 slow ones (faster
        on uneven data, but a run does not repeat to the last bit).
    prefetch : maximum number of batches in preparation or ready; None = two per worker
    sample_timeout : seconds after which a sample counts as hanging; None = never
    leave_out
        How many training samples of the whole run may be left out because they cannot be read, or
        not in time, at the second attempt either: each is logged with its name. One more ends the
        run. Where samples are drawn, another draw takes the place of one that is left out.
    pin
        Use page-locked memory, so that transfers overlap with work; None = on a GPU, where steps
        are not captured.
    stage_to : node-local folder to copy the store to first, once per machine
    """

    workers: int | None = None
    window: int = 1
    prefetch: int | None = None
    sample_timeout: float | None = 120.0
    leave_out: int = 0
    pin: bool | None = None
    stage_to: Path | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        workers, prefetch, seconds = self.workers, self.prefetch, self.sample_timeout
        _expect(workers is None or workers >= 0, "loader.workers", "0 or more", workers)
        _expect(self.window >= 1, "loader.window", "1 or more", self.window)
        _expect(self.leave_out >= 0, "loader.leave_out", "0 or more", self.leave_out)
        _expect(prefetch is None or prefetch >= 1, "loader.prefetch", "1 or more", prefetch)
        fine = seconds is None or seconds > 0
        _expect(fine, "loader.sample_timeout", "more than 0 seconds", seconds)


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of the run is written and what is kept.

    Attributes
    ----------
    every_steps
        Steps between checkpoints; None = not counted in steps. A checkpoint is always written at
        the end and on SIGTERM, SIGUSR1, SIGHUP and Ctrl-C.
    every_epochs : the same in epochs
    every_minutes : the same in minutes
    keep : how many checkpoints are kept, newest first
    best : whether the weights with the best monitored metric are kept in the folder ``best``
    best_seconds
        An epoch that improves on the best is saved, with a checkpoint, unless the last saving is
        fewer seconds ago; then it waits in memory until they are over, or until there is another
        reason to save. So epochs of milliseconds do not wait for the disk, and a kill costs no
        more than this time beyond the other intervals. 0 = at once.
    final : which weights become the run's model: the best validated ones or the last
    """

    every_steps: int | None = None
    every_epochs: int | None = 1
    every_minutes: float | None = None
    keep: int = 2
    best: bool = True
    best_seconds: float = 10.0
    final: Literal["best", "last"] = "best"

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name in ("every_steps", "every_epochs", "every_minutes"):
            value = getattr(self, name)
            _expect(value is None or value > 0, f"checkpoint.{name}", "more than 0", value)
        seconds = self.best_seconds
        _expect(self.keep >= 1, "checkpoint.keep", "1 or more", self.keep)
        _expect(seconds >= 0, "checkpoint.best_seconds", "0 or more", seconds)


@dataclass(frozen=True)
class TrainConfig:
    """The run as a whole.

    Attributes
    ----------
    epochs : number of passes over the samples
    seed : seed of weights, batches and random numbers
    dtype : type of weights and batches
    device : ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:N``
    monitor
        The validation metric by which the best epoch, early stopping and the plateau schedule go
        (smaller is better; with a minus before it, as in ``-accuracy``, larger is); None = what the
        recipe names.
    patience : validations without improvement after which the run ends; None = never
    evaluate_every : epochs between validations; the last epoch is always validated
    evaluation_ranks
        Number of processes, the last ones, that validate while the others go on training. What a
        validation decides (best weights, patience, plateau, target) is decided where the next one
        is due, at the same step on all ranks whenever it was ready; only the end of a stage or of
        the run waits for its own. 0 = all processes stop training to validate.
    evaluate_beside
        The one process validates a copy of the weights in a thread while training goes on, on a GPU
        on a stream of its own; the validation set stays in memory. Decided as with
        ``evaluation_ranks``.
    threads
        CPU threads of torch; None = as the checkpoint says, for a new run one for each 32 atoms or
        nodes of a batch, but no more than usable cores or OMP_NUM_THREADS.
    affinity : keep each process and its workers to its share of the CPU cores nearest to its GPU
    explode_factor
        A loss this many times above its recent average stops the run; None = only NaN and
        infinity do.
    deterministic : only algorithms that repeat to the last bit (slower on a GPU)
    tf32 : use TF32 (10 bits of mantissa) in float32 matmuls on a GPU
    autocast
        Matmuls of float32 in this type, weights and sums staying float32, for models that allow it;
        None = in float32. With float16 the loss is scaled, see
        `bevatron.train.precision.LossScale`, and steps are not captured as CUDA graphs.
    compile : pass the model through torch.compile
    cuda_graphs
        Capture whole steps as CUDA graphs over a few padded shapes of batches and replay them, so
        that launching costs nothing; a step's figures are then read one step later. None = on a
        GPU where model and task allow it.
    collect_every
        Steps between garbage collections in place of Python's automatic ones; None = Python's own.
    log_every : steps between lines of metrics.jsonl; the epoch's averages take in every step
    tensorboard : also write metrics for TensorBoard (extra ``tensorboard``)
    wandb : also send metrics to Weights & Biases (extra ``wandb``)
    wandb_project : name of the project at Weights & Biases
    timeout_minutes : minutes after which a collective that some rank never joins is an error
    """

    epochs: int = 100
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float64"
    device: str = "auto"
    monitor: str | None = None
    patience: int | None = None
    evaluate_every: int = 1
    evaluation_ranks: int = 0
    evaluate_beside: bool = False
    threads: int | None = None
    affinity: bool = True
    explode_factor: float | None = 1e4
    deterministic: bool = False
    tf32: bool = False
    autocast: Literal["bfloat16", "float16"] | None = None
    compile: bool = False
    cuda_graphs: bool | None = None
    collect_every: int | None = None
    log_every: int = 1
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "bevatron"
    timeout_minutes: float = 30.0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        _expect(self.epochs >= 0, "train.epochs", "0 or more", self.epochs)
        _expect(
            0 <= self.seed < 2**63, "train.seed", "a whole number from 0 to 2^63 - 1", self.seed
        )
        for name in ("evaluate_every", "log_every", "patience", "collect_every"):
            value = getattr(self, name)
            _expect(value is None or value >= 1, f"train.{name}", "1 or more", value)
        # Thousands, which no machine has, end the process with a segmentation fault.
        threads = self.threads
        _expect(threads is None or 1 <= threads <= 1024, "train.threads", "1 to 1024", threads)
        ranks = self.evaluation_ranks
        _expect(ranks >= 0, "train.evaluation_ranks", "0 or more", ranks)
        if ranks and self.evaluate_beside:
            raise ConfigError(
                "train.evaluate_beside: is for one process; leave it out, or train.evaluation_ranks"
            )
        factor, minutes = self.explode_factor, self.timeout_minutes
        _expect(factor is None or factor > 1, "train.explode_factor", "more than 1", factor)
        _expect(minutes > 0, "train.timeout_minutes", "more than 0", minutes)
        if self.autocast is not None and self.dtype != "float32":
            raise ConfigError(f"train.autocast: needs train.dtype float32, not {self.dtype}")


@dataclass(frozen=True)
class Settings:
    """All settings of the trainer together."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
