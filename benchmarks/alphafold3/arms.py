"""What the benchmarks of AlphaFold3 share: crops of a complex, one model, arms to train it.

All arms of a run have the same weights and see the same crops with the same noise, so that their
losses and gradients can be compared.
"""

from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from benchmarks.common import arms
from benchmarks.common.arms import GIB, Arm, Training, drawn

from bevatron.data.packing.draws import Draws, Source
from bevatron.data.padding import BatchShape, pad
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
from bevatron.parallel.mesh import Mesh
from bevatron.recipes.alphafold3.data import ComplexDataset
from bevatron.recipes.alphafold3.run import AlphaFold3Run, ComplexStage
from bevatron.recipes.alphafold3.stores import open_complexes
from bevatron.task import StepNumbers
from bevatron.train.run import Run, SamplesApart, Sharing, Stage
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


def state_bytes(model: torch.nn.Module) -> int:
    """Count the bytes of weights, gradients, Adam's moments and averaged weights."""
    of_weights = sum(p.numel() * p.element_size() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    return 5 * of_weights + buffers


@dataclass(frozen=True)
class PaddedCollate:
    """Batches of one padded shape: what torch.compile compiles once."""

    shape: BatchShape

    def __call__(self, *samples: Any) -> ComplexBatch:
        """Join samples."""
        return pad(collate_complex(*samples), self.shape)


class Passes(AlphaFold3Task):
    """The task, with as many passes through the trunk in every step."""

    def begin_step(self, numbers: StepNumbers) -> dict[str, int]:
        """Draw all else."""
        chosen = {**super().begin_step(numbers), "cycles": self.most_cycles}
        self.cycles = self.most_cycles
        return chosen


def training_of(
    arm: Arm,
    model: AlphaFold3,
    crops: Crops,
    options: StepOptions,
    *,
    cycles: int = 1,
    mesh: Mesh | None = None,
    sharing: Sharing | None = None,
) -> Training:
    """Make the training of an arm on crops of one length.

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
    mesh, sharing
        Of the ranks that train together; None = one process.
    """
    device = next(model.parameters()).device
    wide = torch.bfloat16 if device.type == "cuda" else None
    task = Passes(cycles, [options], wide)
    if arm.compiled:
        task.collate = PaddedCollate(crops.shape)
    config = AlphaFold3Run.from_values({"train": {"device": device.type}})
    sizes = {"tokens": crops.lengths("tokens")}
    draws = Draws([Source("crops", crops)], seed=0)
    stage = Stage("initial", ComplexStage(steps=1, samples_per_step=1, step=options), draws, sizes)
    settings = replace(
        config.settings,
        optim=replace(config.settings.optim, accumulate=1),
        batch=replace(config.settings.batch, cost={"tokens": 1.0}),
    )
    run = Run(
        model,
        task,
        crops,
        sizes,
        Path("unused"),
        settings,
        stages=[stage],
        sharing=sharing or SamplesApart(),
    )
    return Training(arm, run, mesh)


def peak_gib(model: torch.nn.Module) -> float:
    """Return the peak of the memory in use less weights, gradients and optimiser, GiB."""
    return (torch.cuda.max_memory_allocated() - state_bytes(model)) / GIB
