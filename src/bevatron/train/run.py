"""A complete run: model, task, data and settings. Recipes make it, `fit` trains it."""

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from bevatron.data.dataset import Dataset
from bevatron.data.packing.draws import Draws
from bevatron.files import write_bytes_atomically
from bevatron.parallel import axial
from bevatron.parallel.mesh import Mesh
from bevatron.task import Task, Unchanging
from bevatron.train.settings import Settings, StageConfig
from bevatron.typing import IntArray

Size = TypeVar("Size", bound=float)

WEIGHTS = "weights.safetensors"

SaveModel = Callable[[Path, Mapping[str, Tensor]], None]
"""(folder, state dict) -> writes a self-describing model there, its weights in `WEIGHTS`."""


def save_weights(folder: Path, state_dict: Mapping[str, Tensor]) -> None:
    """Write the weights alone, for runs whose recipe does not describe its model."""
    tensors = {
        name: value.detach().cpu().contiguous().clone() for name, value in state_dict.items()
    }
    write_bytes_atomically(folder / WEIGHTS, save(tensors))


class Sharing(Protocol):
    """Decides how an epoch's samples are divided among ranks.

    Losses and gradients are sums over ranks divided by counts over all ranks, whatever a rank
    holds. So ranks may divide the samples, or each sample into parts; only who takes which batches
    differs.
    """

    @property
    def repeats(self) -> int:
        """Number of ranks that hold the same batch, whose sizes are counted once."""

    def planner(self, mesh: Mesh) -> Mesh:
        """Return this rank among those that have batches of their own."""

    def joined(self, mesh: Mesh) -> AbstractContextManager[object]:
        """Join the ranks of a sample for the length of a ``with`` block; all enter it together."""


@dataclass(frozen=True)
class SamplesApart:
    """Data parallelism: each rank has its own batches."""

    repeats = 1

    def planner(self, mesh: Mesh) -> Mesh:
        """Return the mesh itself."""
        return mesh

    def joined(self, mesh: Mesh) -> AbstractContextManager[object]:
        """Do nothing."""
        del mesh
        return nullcontext()


@dataclass(frozen=True)
class SamplesInGroups:
    """Every so many consecutive ranks compute a sample together; see `bevatron.parallel.axial`.

    Those on one machine make whole samples in turns, each for all of them
    (`bevatron.parallel.turns`). Samples are functions of their index and seed, so a run goes on
    with groups of any size.

    Attributes
    ----------
    repeats : ranks of a group
    """

    repeats: int

    def planner(self, mesh: Mesh) -> Mesh:
        """Return the place of this rank's group among the groups."""
        return axial.data_mesh(mesh, self.repeats)

    def joined(self, mesh: Mesh) -> AbstractContextManager[object]:
        """Let the model divide samples among the ranks of a group."""
        return axial.shared(mesh, self.repeats)


@dataclass(frozen=True)
class SamplesTogether:
    """Every rank takes every batch and holds a part of each sample, such as a block of a graph.

    The data set gives each rank its part; model and task exchange what parts need of each other.

    Examples
    --------
    >>> SamplesTogether().planner(Mesh(rank=3, world=8)).world
    1
    """

    repeats = 1

    def planner(self, mesh: Mesh) -> Mesh:
        """Return a mesh of one."""
        return Mesh(device=mesh.device)

    def joined(self, mesh: Mesh) -> AbstractContextManager[object]:
        """Do nothing: the data set joins them."""
        del mesh
        return nullcontext()


@dataclass(frozen=True)
class FitResult:
    """The outcome of a run.

    Attributes
    ----------
    folder : the run's folder
    finished
        Why the run is over: ``epochs``, ``patience``, or of a run in stages ``steps``, ``target``
        (the last stage has reached it) or ``target missed``. None if it was stopped and can be
        resumed.
    stopped_by : name of the signal that stopped it: SIGTERM, SIGUSR1, SIGHUP, SIGINT
    epochs, steps : done so far
    metrics : results of the last validation
    best, best_epoch : smallest monitored metric and the epoch after which it was measured, from 0
    seconds : training time over all resumes
    """

    folder: Path
    finished: str | None
    stopped_by: str | None
    epochs: int
    steps: int
    metrics: Mapping[str, float]
    best: float | None
    best_epoch: int
    seconds: float

    @property
    def exit_code(self) -> int:
        """0 if the run is over, else 128 plus the signal's number, as shells have it.

        SIGHUP 129, SIGINT 130, SIGUSR1 138, SIGTERM 143; a batch script requeues on 138 and 143.
        """
        return 128 + signal.Signals[self.stopped_by] if self.stopped_by else 0


@dataclass(frozen=True)
class BesideGraphs:
    """How steps are launched beside the memory that the graphs of captured steps hold.

    Such are the first over batches of a new shape, and those that warm up before a capture.

    Attributes
    ----------
    set_up : called with the model before one, as `Stage.set_up` is after it; it changes no result
    graph_bytes : most memory for the graphs
    """

    set_up: Callable[[torch.nn.Module], None]
    graph_bytes: int


@dataclass(frozen=True)
class Stage:
    """A stage of a run whose samples are drawn.

    Attributes
    ----------
    name : as in the configuration
    config : its length, samples per step, learning rate and target
    train : what is drawn, with the stage's own crops and mixture; its seed is that of the run
    sizes
        Named counts of the samples of all sources, in their order, [n] each: ranks get about the
        same ``batch.cost`` of them.
    set_up : called with the model before steps of the stage: what is computed again in them, say
    beside : of steps that are launched beside captured ones; None = as all others
    """

    name: str
    config: StageConfig
    train: Draws
    sizes: Mapping[str, IntArray]
    set_up: Callable[[torch.nn.Module], None] | None = None
    beside: BesideGraphs | None = None


@dataclass
class Run:
    """Everything that `bevatron.train.fit` needs.

    Attributes
    ----------
    model, task : what is trained and by which loss
    train, sizes
        Samples and their named counts, [n] each. The first is what samples are measured in: a
        plain ``batch.capacity`` and ``batch.cost`` mean it.
    folder : where the run writes
    settings : see `bevatron.train.settings`
    valid, valid_sizes : the same of the validation set, None without one
    config
        The whole configuration as plain values, for config.yaml and for the list of changes on
        resume.
    identity
        Plain values that make the run what it is (model, loss, data): it is not resumed with
        others.
    monitor : validation metric that decides what is best; `TrainConfig.monitor` overrides it
    stage_two_monitor : the same from the second stage on; None = as before it
    resume : resume from the newest checkpoint in ``folder``, if there is one
    checkpoint : resume from this checkpoint of ``folder`` instead; newer ones are removed
    save_model : writes a model folder
    shown_metrics : validation metrics that the console shows after an epoch; none given: all
    size_names
        What logs and messages call sizes of batches, where not by their own name:
        ``{"graphs": "molecules"}``.
    size_setting
        What messages call the setting that makes batches smaller, and its value, where that is none
        of ``batch``: ``"`molecules` (now 32)"``.
    notes : lines for the start of the log: what was found in the data
    model_options
        What commands that use the model are shown with at the end, such as `` --head new``.
    sharing : whether ranks divide the samples, or each sample among all or some of them
    optimizer_tensors
        State that the optimiser of a new run starts from, as
        `bevatron.train.optim.optimizer_tensors` names it; none = as usual.
    generators
        Random number generators of the run's own, such as those of a mask that ranks share, by
        name: in the same state on all ranks, saved and restored with it.
    before_end
        Called on all ranks, with the final weights in the model, for what they measure together.
    stages
        Stages of drawn samples, counted in steps; none = epochs in which every sample occurs once.
        With stages, ``train`` and ``sizes`` are those of the first.
    most_samples
        Samples of a step above which training is known to fail, of which a run in stages is warned.
    on_end
        Called on rank 0 when the run is over and its weights are written, e.g. for the report; a
        line that it returns is logged.
    """

    model: nn.Module
    task: Task[Any]
    train: Dataset
    sizes: Mapping[str, IntArray]
    folder: Path
    settings: Settings = field(default_factory=Settings)
    valid: Dataset | None = None
    valid_sizes: Mapping[str, IntArray] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    monitor: str = "loss"
    stage_two_monitor: str | None = None
    resume: bool = False
    checkpoint: Path | None = None
    save_model: SaveModel = save_weights
    shown_metrics: Sequence[str] = ()
    size_names: Mapping[str, str] = field(default_factory=dict)
    size_setting: str = ""
    notes: Sequence[str] = ()
    model_options: str = ""
    sharing: Sharing = field(default_factory=SamplesApart)
    optimizer_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    generators: Mapping[str, torch.Generator] = field(default_factory=dict)
    stages: Sequence[Stage] = ()
    most_samples: int | None = None
    before_end: Callable[[Mesh], None] | None = None
    on_end: Callable[[FitResult, Path], str | None] | None = None

    def named(self, sizes: Mapping[str, Size]) -> dict[str, Size]:
        """Return the sizes of a batch under the names that logs and messages use."""
        return {self.size_names.get(name, name): size for name, size in sizes.items()}


def example_batch(run: Run) -> Any:
    """Collate the first training sample by itself."""
    return run.task.collate([run.train[0]], np.zeros(1, dtype=np.int64), [1.0])


def one_unchanging_batch(run: Run) -> bool:
    """Whether every step is over the same batch, which can stay on the device."""
    return len(run.train) == 1 and isinstance(example_batch(run), Unchanging)
