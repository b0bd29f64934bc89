"""Number formats and how exactly torch computes with them."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

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


def products(config: TrainConfig, device: torch.device) -> AbstractContextManager[None]:
    """Compute matrix products in the type of ``train.autocast`` for a ``with`` block.

    Weights are rounded anew every time, also inside a CUDA graph.
    """
    if config.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, config.autocast), cache_enabled=True)


def check_products(task: object, config: TrainConfig) -> None:
    """Refuse ``train.autocast`` for a task that does not say that it is made for it.

    Raises
    ------
    ConfigError
        If so.
    """
    if config.autocast is not None and not isinstance(task, AllowsAutocast):
        raise ConfigError(
            f"train.autocast: this model is not made for products in {config.autocast}; leave it "
            f"out"
        )


@contextmanager
def arithmetic(config: TrainConfig, threads: int | None) -> Iterator[None]:
    """Set threads, TF32 and deterministic algorithms for a ``with`` block.

    Sums over threads depend on their number in the last bits, so it is part of a run's state.

    Parameters
    ----------
    config
        ``threads`` is used if set.
    threads
        Else this many, the number from a checkpoint; None = as torch finds it.
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
        torch.use_deterministic_algorithms(mode=before[3])
