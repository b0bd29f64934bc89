"""The Task protocol: the interface of a model and its data to the trainer.

A task collates samples into a batch, computes the loss and keeps the metrics. The trainer knows
nothing else about a model. Loss and normalisers are separate so that a loss is one global mean:
the counts of all micro-batches and ranks of a step are summed first, and each part of the loss
is a sum divided by that total. Unequal batches therefore stay unbiased, and a step over several
small batches equals the step over one large batch.
"""

import hashlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from bevatron.typing import Arrays, IntArray


class Batch(Protocol):
    """Samples collated for one step."""

    @property
    def sample_indices(self) -> IntArray:
        """Positions of the samples in their data set, in the order of the batch."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Named counts, for logs and messages: ``{"graphs": 4, "atoms": 93, "edges": 3020}``.

        First that of samples, then that of what samples are measured in.
        """

    def to(
        self,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Self:
        """Copy to a device; floating-point tensors to ``dtype``."""

    def pin_memory(self) -> Self:
        """Copy to page-locked memory, so that the transfer to a GPU can overlap with work."""


B = TypeVar("B", bound=Batch)
B_contra = TypeVar("B_contra", bound=Batch, contravariant=True)

Collate = Callable[[Sequence[Arrays], IntArray, Sequence[float]], Any]
"""(samples, their indices, their weights) -> Batch. Picklable: it runs in worker processes.

A weight is 1, or 0 for a repeated sample that must not count in loss, gradient or metrics.
"""


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch.

    Attributes
    ----------
    total : scalar to differentiate: the sum of the weighted terms
    terms
        Each term by name, detached, already normalised and weighted; over all micro-batches and
        ranks of a step they add up to the step's loss.
    """

    total: Tensor
    terms: Mapping[str, Tensor]


class Metrics(Protocol):
    """Running sums of errors that can be added up over batches and ranks."""

    @property
    def names(self) -> Collection[str]:
        """All that `compute` may name; a run refuses to monitor anything else."""

    def update(self, batch: Any, outputs: Mapping[str, Tensor]) -> None:
        """Add a batch."""

    def sums(self) -> Tensor:
        """All running sums as one float64 vector, to be added over ranks."""

    def load_sums(self, sums: Tensor) -> None:
        """Replace the running sums."""

    def compute(self) -> dict[str, float]:
        """Compute the metrics by name; one without any data is left out."""


class Task(Protocol[B_contra]):
    """Loss and metrics of one kind of model on one kind of batch."""

    @property
    def collate(self) -> Collate:
        """Puts samples together; picklable without the model."""

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch, for losses whose weights change during training."""

    def normalisers(self, batch: B_contra) -> dict[str, Tensor]:
        """Count what each term averages over in this batch, without the model.

        Float64 scalars on the CPU or the batch's device; the same keys for every batch.
        """

    def loss(
        self, model: torch.nn.Module, batch: B_contra, normalisers: Mapping[str, Tensor]
    ) -> Loss:
        """Compute the loss, each term divided by the step's total count."""

    def predict(self, model: torch.nn.Module, batch: B_contra) -> dict[str, Tensor]:
        """Run the model for evaluation; the outputs are detached."""

    def metrics(self) -> Metrics:
        """Begin new running sums."""


@dataclass(frozen=True)
class StepNumbers:
    """The randomness of an optimiser step: a function of the run's seed and the step alone.

    Equal on all ranks, without communication, and after a resume.

    Attributes
    ----------
    step : steps done before
    seed : 63 random bits
    stage : number of the stage of the run, from 0

    Examples
    --------
    >>> numbers = StepNumbers(step=40, seed=123)
    >>> [numbers.draw("recycles", below=4), numbers.draw("recycles", below=4)]
    [1, 1]
    """

    step: int
    seed: int
    stage: int = 0

    def draw(self, what: str, below: int = 2**63) -> int:
        """Draw a whole number from 0 to ``below`` - 1; other purposes give independent ones."""
        digest = hashlib.blake2b(f"{self.seed} {what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") * below >> 64


@runtime_checkable
class Numbered(Protocol):
    """A task whose steps differ by numbers that all ranks share: recycles, dropout, a stage."""

    def begin_step(self, numbers: StepNumbers) -> Mapping[str, int]:
        """Set what is random in the next step; predictions do not depend on it.

        Returns
        -------
        dict
            Whatever changes the work of a step, few different values of each: ``{"recycles": 2}``.
            It is logged, and a step that is captured as a CUDA graph has a graph for each. All
            other numbers must reach a graph through tensors that are filled in place.
        """


@runtime_checkable
class Capturable(Protocol):
    """A task whose loss can be captured as a CUDA graph.

    Its loss and backward pass do the same on all batches of one shape and never ask the device for
    a number. Its batches can be padded (`bevatron.data.padding.Paddable`), and then the loss does
    not depend on the padding, or they are `Unchanging`.
    """

    def constants(self) -> Hashable:
        """Return what the loss depends on besides tensors, such as the weights of its stage."""


@runtime_checkable
class Unchanging(Protocol):
    """A batch whose sample gives an equal batch every time, such as one whole graph.

    A run over a single such sample leaves it on the device, and its steps can be captured without
    padding.
    """

    unchanging: Literal[True]


@runtime_checkable
class AllowsAutocast(Protocol):
    """A task whose loss and predictions may be computed with 16-bit products (torch.autocast)."""

    allows_autocast: Literal[True]


@runtime_checkable
class ChecksBatches(Protocol):
    """A model that refuses some batches, which a captured step cannot."""

    def check(self, batch: Any) -> None:
        """Refuse a batch on the CPU that this model cannot work on."""
