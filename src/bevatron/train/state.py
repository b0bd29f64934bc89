"""All that changes during a run: weights, optimiser, averages, progress and random numbers."""

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from bevatron.parallel.data_parallel import GradientSums
from bevatron.train.epochs import Segment, segments_from_json
from bevatron.train.optim import AveragedWeights
from bevatron.train.precision import LossScale
from bevatron.train.schedule import Decisions


@dataclass
class Progress:
    """Progress of a run; plain numbers, stored in checkpoints as they are.

    Attributes
    ----------
    step_in_epoch : steps done in the current epoch
    segments : how the current epoch was packed and how far it is
    draw : number of the first draw of the current epoch, where samples are drawn
    stage, stage_began : number of the current stage, from 0, and the steps done before it
    sums : running sums of the current epoch, for its averages
    loss_average, loss_steps
        Recent average of the loss and the steps in it, to notice an explosion.
    samples : samples seen, each counted every time
    left_out : samples that could not be read
    decisions : best metric, patience and plateau
    loss_scale : the factor of the loss, None unless matmuls are in float16
    changes : where the number of ranks, batches or settings changed
    pending
        Record of the epoch whose weights are being validated beside training, None if none are.
    finished : why the run is finished, see `bevatron.train.run.FitResult`; None if it is not
    seconds : time spent, over all resumes
    """

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    segments: list[Segment] = field(default_factory=list)
    draw: int = 0
    stage: int = 0
    stage_began: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    loss_average: float = 0.0
    loss_steps: int = 0
    samples: int = 0
    left_out: int = 0
    decisions: Decisions = field(default_factory=Decisions)
    loss_scale: LossScale | None = None
    changes: list[dict[str, Any]] = field(default_factory=list)
    pending: dict[str, Any] | None = None
    finished: str | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Turn into plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Progress":
        """Turn plain values back."""
        scale = values.get("loss_scale")
        return cls(
            **{
                **values,
                "loss_scale": None if scale is None else LossScale(**scale),
                "segments": segments_from_json(values["segments"]),
                "decisions": Decisions(**values["decisions"]),
            }
        )


@dataclass
class TrainState:
    """The state that a checkpoint saves and a resumed run restores.

    Attributes
    ----------
    model : raw weights, as the optimiser changes them
    optimizer : see `bevatron.train.optim.make_optimizer`
    ema : averaged weights, None if switched off
    gradient_sums
        What sums the gradients that the optimiser takes over ranks; made in the first step.
    generators : random number generators of the run's own, in the same state on all ranks
    pending : weights that are being validated beside training, a copy on rank 0
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: AveragedWeights | None
    progress: Progress = field(default_factory=Progress)
    gradient_sums: GradientSums | None = None
    generators: Mapping[str, torch.Generator] = field(default_factory=dict)
    pending: Mapping[str, Tensor] | None = None


def seed_everything(seed: int, rank: int, step: int = 0) -> None:
    """Seed Python, numpy and torch, differently on every rank."""
    seeds = np.random.SeedSequence([seed, rank, step]).generate_state(3, np.uint64)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]) % 2**32)  # noqa: NPY002  users' code may draw from it
    torch.manual_seed(int(seeds[2]) % 2**63)


def random_state(device: torch.device) -> bytes:
    """Return the state of all random number generators of this process, as safetensors."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    if version != 3 or name != "MT19937":
        raise RuntimeError(f"unknown random number generators: {version}, {name}")
    state: dict[str, Tensor] = {
        "python.words": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy.keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy.position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy.gauss": torch.tensor([cached], dtype=torch.float64),
        "torch.cpu": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["torch.cuda"] = torch.cuda.get_rng_state(device)
    return save(state)


def restore_random_state(data: bytes, device: torch.device) -> None:
    """Restore the state that `random_state` returned."""
    state = load(data)
    gauss = state["python.gauss"].tolist()
    words = tuple(state["python.words"].tolist())
    random.setstate((3, words, gauss[0] if gauss else None))
    position, has_gauss = state["numpy.position"].tolist()
    keys = state["numpy.keys"].numpy().astype(np.uint32)
    np.random.set_state(  # noqa: NPY002
        ("MT19937", keys, position, has_gauss, state["numpy.gauss"].item())
    )
    torch.set_rng_state(state["torch.cpu"])
    if device.type == "cuda" and "torch.cuda" in state:
        torch.cuda.set_rng_state(state["torch.cuda"], device)
