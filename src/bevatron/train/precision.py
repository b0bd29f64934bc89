"""Precision: types of weights and matmuls, TF32, the loss scale of float16, determinism."""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from bevatron.errors import ConfigError
from bevatron.task import AllowsAutocast
from bevatron.train.settings import TrainConfig


def dtype_of(name: str) -> torch.dtype:
    """Return torch's type of a name from the configuration.

    Examples
    --------
    >>> dtype_of("float64")
    torch.float64
    """
    return {"float32": torch.float32, "float64": torch.float64}[name]


def autocast_context(config: TrainConfig, device: torch.device) -> AbstractContextManager[None]:
    """Compute matmuls in the type of ``train.autocast`` for the length of a ``with`` block.

    Weights are cast again every time, also inside a CUDA graph.
    """
    if config.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, config.autocast), cache_enabled=True)


def check_autocast(task: object, config: TrainConfig) -> None:
    """Refuse ``train.autocast`` for a task that does not allow it.

    Raises ConfigError if it was asked for.
    """
    if config.autocast is not None and not isinstance(task, AllowsAutocast):
        raise ConfigError(
            f"train.autocast: this model does not allow matmuls in {config.autocast}; leave it out"
        )


@contextmanager
def arithmetic(config: TrainConfig, threads: int | None) -> Iterator[None]:
    """Set threads, TF32 and deterministic algorithms for a ``with`` block.

    Sums over threads depend on their number in the last bits, so it is part of a run's state.

    Parameters
    ----------
    config : ``threads`` is used if set
    threads : else this many, from a checkpoint or chosen for a new run; None = as torch finds it
    """
    before = (
        torch.get_num_threads(),
        torch.backends.cuda.matmul.fp32_precision == "tf32",  # allow_tf32 may raise if that is set
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )
    wanted = config.threads or threads
    if wanted is not None and wanted != before[0]:
        torch.set_num_threads(wanted)
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.backends.cudnn.allow_tf32 = config.tf32
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        if torch.get_num_threads() != before[0]:
            torch.set_num_threads(before[0])
        torch.backends.cuda.matmul.allow_tf32 = before[1]
        torch.backends.cudnn.allow_tf32 = before[2]
        if torch.are_deterministic_algorithms_enabled() != before[3]:
            torch.use_deterministic_algorithms(mode=before[3])  # imports torch._dynamo


FIRST = 2.0**16
"""Initial factor, which soon grows to the largest that does not overflow."""
LEAST = 1.0
"""Lower bound: a gradient that overflows without a factor is not a matter of scale."""
PATIENCE = 2000
"""Steps in a row without overflow after which the factor is doubled."""


@dataclass
class LossScale:
    """The loss scale, a factor that keeps small gradients of float16 matmuls from vanishing.

    float16 underflows below 6e-8. The loss is multiplied by the factor before the backward pass and
    gradients are divided by it afterwards, in float32. If one overflows, the step is skipped and
    the factor halved; after `PATIENCE` steps without overflow it is doubled. bfloat16 has the range
    of float32 and needs none of it. The factor goes into checkpoints.

    Attributes
    ----------
    factor : loss scale of the next step
    sound_steps : steps without overflow since it last changed
    """

    factor: float = FIRST
    sound_steps: int = 0

    def divide(self, gradients: Iterable[Tensor | None]) -> None:
        """Divide gradients by the factor, in place."""
        found = [gradient for gradient in gradients if gradient is not None]
        if found:
            torch._foreach_mul_(found, 1.0 / self.factor)

    def take(self, grad_norm: float) -> bool:
        """Update from a step's gradient; return False if the step must be skipped.

        A gradient that overflows at the smallest factor is left to the check for divergence.

        Examples
        --------
        >>> scale = LossScale(factor=8.0)
        >>> scale.take(float("inf")), scale.factor
        (False, 4.0)
        >>> scale.take(0.5), scale.factor
        (True, 4.0)
        """
        if not math.isfinite(grad_norm):
            skipped = self.factor > LEAST
            self.factor, self.sound_steps = max(self.factor / 2, LEAST), 0
            return not skipped
        self.sound_steps += 1
        if self.sound_steps == PATIENCE:
            self.factor, self.sound_steps = self.factor * 2, 0
        return True
