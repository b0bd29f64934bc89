"""What the benchmarks of AlphaFold3 share: crops of a complex, one model, arms to train it.

All arms of a run have the same weights and see the same crops with the same noise, so that their
losses and gradients can be compared. Layers that training starts from zero are drawn, or nothing in
front of them would count. The learning rate is 0: weights stay as they are.
"""

import time
from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from benchmarks.common import arms
from benchmarks.common.arms import GIB, drawn, free, set_policy

from bevatron import kernels
from bevatron.data.packing.draws import Draws, Source
from bevatron.data.proteins.complex_batch import ComplexBatch, collate_complex
from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.sample import SampleSizes
from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.models.alphafold3.diffusion_transformer import DiffusionBlock
from bevatron.models.alphafold3.model import AlphaFold3
from bevatron.models.alphafold3.msa import MsaBlock
from bevatron.models.alphafold3.pairformer import PairformerBlock
from bevatron.models.alphafold3.task import AlphaFold3Task, StepOptions
from bevatron.models.alphafold3.templates import TemplateEmbedder
from bevatron.models.common.folding.checkpointing import Kind
from bevatron.parallel.mesh import Mesh
from bevatron.recipes.alphafold3.data import ComplexDataset
from bevatron.recipes.alphafold3.run import AlphaFold3Run, ComplexStage
from bevatron.recipes.alphafold3.stores import open_complexes
from bevatron.task import StepNumbers
from bevatron.train.capture.step import CapturedStep
from bevatron.train.evaluate import make_loader
from bevatron.train.loop import begin_state
from bevatron.train.run import Run, Stage
from bevatron.train.settings import LoaderConfig
from bevatron.train.step import LaunchedStep, StepResult, train_step
from bevatron.typing import Arrays, IntArray

ROWS, ATOMS_PER_TOKEN = 1024, 24
TRIED = 48
"""Crops that are looked at for some of one padded shape."""


class Crops:
    """Crops of one complex of so many tokens, all of one padded shape, each seen again and again.

    Parameters
    ----------
    store
        Of complexes; the one with the most tokens is taken.
    tokens, rows
        Of a crop.
    different
        Number of different crops.
    length
        Of the data set.
    """

    def __init__(
        self, store: Path, tokens: int, *, rows: int = ROWS, different: int = 4, length: int = 4096
    ) -> None:
        entries = open_complexes(store).lengths("restype")
        entry = int(np.argmax(entries))
        sizes = SampleSizes(CropSizes(tokens=tokens, atoms=ATOMS_PER_TOKEN * tokens), rows)
        self.data = ComplexDataset(store, np.array([[entry, 0, 0]]), sizes)
        self.tokens, self.length = tokens, length
        by_shape: dict[Any, list[int]] = defaultdict(list)
        for seed in range(TRIED):
            batch = collate_complex([self.data.sample(0, seed)], np.zeros(1, np.int64), [1.0])
            shape = _shape_of(batch)
            if shape["tokens"] == tokens:
                by_shape[shape].append(seed)
        if not by_shape:
            raise SystemExit(f"{store}: no complex has {tokens} tokens")
        self.shape = max(by_shape, key=lambda shape: len(by_shape[shape]))
        self.seeds = by_shape[self.shape][:different]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: SupportsIndex) -> Arrays:
        return self.data.sample(0, self.seeds[int(index) % len(self.seeds)])

    def describe(self, index: SupportsIndex) -> str:
        """Name a crop."""
        return f"crop {int(index) % len(self.seeds)}"

    def lengths(self, field: str) -> IntArray:
        """Return what a crop holds at most, for every crop."""
        return np.repeat(self.data.lengths(field), self.length)


def _shape_of(batch: ComplexBatch) -> Any:
    return batch.padding.rounded(batch.padding.size_of(batch.sizes))


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes
    ----------
    name
        In tables.
    kernels
        Which implementation of the operators runs.
    policy
        What the backward pass computes again.
    captured, compiled
        Whether steps are CUDA graphs, and blocks pass through torch.compile.
    """

    name: str
    kernels: str = "auto"
    policy: Kind = "all"
    captured: bool = False
    compiled: bool = False


def built(preset: str, device: torch.device, **changes: Any) -> AlphaFold3:
    """Build a model on the device, none of whose layers is zero."""
    torch.manual_seed(0)
    with device:
        model = AlphaFold3(AlphaFold3Config.preset(preset, **changes))
    drawn(model.to(device))
    return model


def compiled_blocks(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Pass every block of the model through torch.compile."""
    kinds = (PairformerBlock, MsaBlock, DiffusionBlock)
    blocks = [module for module in model.modules() if isinstance(module, kinds)]
    for module in model.modules():
        if isinstance(module, TemplateEmbedder):
            blocks += list(module.blocks)
    return arms.compiled_blocks(blocks)


def state_bytes(model: torch.nn.Module, *, ema: bool) -> int:
    """Count the bytes of weights, gradients, Adam's moments and averaged weights."""
    of_weights = sum(p.numel() * p.element_size() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    return of_weights * (5 if ema else 4) + buffers


@dataclass
class Steps:
    """What some steps took.

    Attributes
    ----------
    results
        Loss, its terms and the gradient's norm of each.
    seconds
        Of each on average, the loader included.
    waited
        Of these, for data.
    """

    results: list[StepResult] = field(default_factory=list)
    seconds: float = 0.0
    waited: float = 0.0


class Training:
    """Training of one arm on crops of one length, with the loader and the step of the trainer.

    Parameters
    ----------
    arm
        How.
    model
        On the device; all arms share it.
    crops
        What is trained on.
    options
        Copies and confidences of a step.
    cycles
        Passes through the trunk of every step.
    workers
        Of the loader; None = as many as the trainer takes.
    """

    def __init__(
        self,
        arm: Arm,
        model: AlphaFold3,
        crops: Crops,
        options: StepOptions,
        *,
        cycles: int = 1,
        workers: int | None = None,
    ) -> None:
        device = next(model.parameters()).device
        self.arm, self.model, self.crops = arm, model, crops
        self.device, self.workers = device, workers
        self.mesh = Mesh(device=device)
        set_policy(model, arm.policy)
        wide = torch.bfloat16 if device.type == "cuda" else None
        self.task = AlphaFold3Task(1, [options], wide)
        self.cycles = cycles
        config = AlphaFold3Run.from_values({"train": {"device": device.type}})
        settings = replace(
            config.settings,
            loader=LoaderConfig(workers=workers),
            train=replace(config.settings.train, explode_factor=None),
            optim=replace(config.settings.optim, accumulate=1),
        )
        sizes = {"tokens": crops.lengths("tokens")}
        draws = Draws([Source("crops", crops)], seed=0)
        config_of_stage = ComplexStage(steps=1, samples_per_step=1, step=options)
        stage = Stage("initial", config_of_stage, draws, sizes)
        self.run = Run(model, self.task, crops, sizes, Path("unused"), settings, stages=[stage])
        self.state = begin_state(self.run, self.mesh, None)
        self._captured = CapturedStep(self.run, self.state, self.mesh) if arm.captured else None

    def steps(self, count: int) -> Steps:
        """Train some steps; the crops are the same each time."""
        batches = [(np.array([i]), np.ones(1)) for i in range(count)]
        found = Steps()
        waiting: list[LaunchedStep] = []
        config = self.run.settings.loader
        with make_loader(self.crops, batches, self.task.collate, config, self.mesh) as loader:  # type: ignore[arg-type]
            each = iter(loader)
            first = next(each)
            self._wait()
            begin = time.perf_counter()
            for number in range(count):
                loaded = first if number == 0 else next(each)
                found.waited += loaded.waited_seconds if number else 0.0
                waiting.append(self._launch(loaded.batch, number))
                # As in the trainer: a captured step is read when the next is launched.
                while len(waiting) > (1 if self.arm.captured else 0):
                    found.results.append(waiting.pop(0).result())
            found.results += [launched.result() for launched in waiting]
            self._wait()
            found.seconds = (time.perf_counter() - begin) / count
        found.waited /= count
        return found

    def _launch(self, batch: ComplexBatch, number: int) -> LaunchedStep:
        chosen = self.task.begin_step(StepNumbers(number, seed=number))
        self.task.cycles = self.cycles
        with kernels.use(self.arm.kernels):
            if self._captured is not None:
                return self._captured([batch], lr=0.0, choice=tuple(chosen.items()))
            result = train_step(self.run, self.state, self.model, [batch], lr=0.0, mesh=self.mesh)
        return LaunchedStep(result.notes, lambda: result)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def release(self) -> None:
        """Give back all memory but that of the weights."""
        if self._captured is not None:
            self._captured.release()
        self._captured = None
        for weight in self.model.parameters():
            weight.grad = None
        del self.state, self.run
        free()


def peak_gib(model: torch.nn.Module) -> float:
    """Return the peak of the memory in use less weights, gradients and optimiser, GiB."""
    return (torch.cuda.max_memory_allocated() - state_bytes(model, ema=True)) / GIB
