"""A system from outside the package whose samples are drawn: crops of texts, two data sets.

The model reads a crop several times (recycles), the number of which all ranks share, with dropout
whose mask follows from the step's seed and the draw. It scores the vowels of a crop.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tiny
import torch
from torch import nn

from bevatron.data.packing import Draws, Source
from bevatron.task import Loss
from bevatron.train import Run, Stage, StageConfig
from bevatron.train.settings import BatchConfig


@dataclass(frozen=True)
class CropBatch:
    """Letters [B, L], scores [B], weights [B]."""

    letters: torch.Tensor
    score: torch.Tensor
    weight: torch.Tensor
    sample_indices: np.ndarray

    @property
    def sizes(self):
        return {"crops": len(self.score), "letters": self.letters.numel()}

    def to(self, device, dtype=None, non_blocking=False):
        score, weight = self.score.to(device, dtype), self.weight.to(device, dtype)
        return replace(self, letters=self.letters.to(device), score=score, weight=weight)

    def pin_memory(self):
        return self


def collate(samples, indices, weights):
    return CropBatch(
        torch.from_numpy(np.stack([sample["letters"] for sample in samples])),
        torch.tensor([float(sample["score"]) for sample in samples], dtype=torch.float64),
        torch.tensor(weights, dtype=torch.float64),
        np.asarray(indices, dtype=np.int64),
    )


class CroppedTexts:
    """Texts of 12 to 60 letters, of which a sample is a random crop."""

    def __init__(self, count, seed, crop):
        random = np.random.default_rng(seed)
        self.texts = [random.integers(0, 26, random.integers(12, 61)) for _ in range(count)]
        self.crop, self.name = crop, f"text of {seed}"
        self.slow_seconds = 0.0  # of every fifth sample

    def __len__(self):
        return len(self.texts)

    def sample(self, index, seed):
        text = self.texts[index]
        time.sleep(0.0 if seed % 5 else self.slow_seconds)
        start = np.random.default_rng(seed).integers(0, len(text) - self.crop + 1)
        return self._scored(text[start : start + self.crop])

    def __getitem__(self, index):
        return self._scored(self.texts[index][: self.crop])

    def _scored(self, letters):
        score = np.array(np.isin(letters, [0, 4, 8, 14, 20]).mean())
        return {"letters": letters, "score": score}

    def describe(self, index):
        return f"{self.name}, number {index}"

    def lengths(self, field):
        return np.array([len(text) for text in self.texts], dtype=np.int64)


class Reader(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        torch.manual_seed(0)
        self.letter = nn.Embedding(26, width)
        self.again = nn.Linear(width, width)
        self.score = nn.Linear(width, 1)

    def forward(self, batch, recycles=0, masks=1.0):
        state = self.letter(batch.letters).mean(1)
        for _ in range(recycles):
            state = state + torch.tanh(self.again(state))
        return {"score": self.score(state * masks).squeeze(1)}


class ErrorSums:
    names = "loss", "closeness"

    def __init__(self):
        self.values = torch.zeros(2, dtype=torch.float64)

    def update(self, batch, outputs):
        errors = batch.weight * (outputs["score"] - batch.score) ** 2
        added = torch.stack([errors.sum(), batch.weight.sum()])
        self.values = self.values.to(added.device) + added

    def sums(self):
        return self.values

    def load_sums(self, sums):
        self.values = sums

    def compute(self):
        loss = float(self.values[0] / self.values[1])
        return {"loss": loss, "closeness": 1 - loss}


class KilledError(Exception):
    """Ends a run that has no time to save anything."""


class RecycledTask:
    """A task whose steps differ by numbers; it keeps what it has seen."""

    collate = staticmethod(collate)

    def __init__(self, killed_in_step=None):
        self.killed_in_step = killed_in_step
        self.seen: list[tuple[int, list[int]]] = []
        self.numbers = None

    def begin_epoch(self, epoch):
        pass

    def begin_step(self, numbers):
        if numbers.step == self.killed_in_step:
            raise KilledError
        self.numbers = numbers
        self.recycles = numbers.draw("recycles", below=4)
        return {"recycles": self.recycles}

    def constants(self):
        return ()

    def normalisers(self, batch):
        return {"crops": batch.weight.sum()}

    def loss(self, model, batch, normalisers):
        counted = [int(i) for i, w in zip(batch.sample_indices, batch.weight, strict=True) if w]
        self.seen.append((self.numbers.step, counted))
        masks = torch.stack([self.mask(number) for number in batch.sample_indices])
        found = model(batch, self.recycles, masks)["score"]
        scale = [1.0, 0.5][self.numbers.stage]
        total = scale * (batch.weight * (found - batch.score) ** 2).sum() / normalisers["crops"]
        return Loss(total, {"score": total.detach()})

    def mask(self, number):
        generator = torch.Generator().manual_seed(self.numbers.draw(f"dropout of {number}"))
        return (torch.rand(5, generator=generator, dtype=torch.float64) < 0.8) / 0.8

    def predict(self, model, batch):
        return {name: value.detach() for name, value in model(batch, recycles=3).items()}

    def metrics(self):
        return ErrorSums()


FIRST = StageConfig(steps=7, samples_per_step=4, evaluate_every=3)
SECOND = StageConfig(steps=5, samples_per_step=8, evaluate_every=2, lr=0.005)


def make_stage(name, config, crop, seed=0):
    """A stage of crops of so many letters."""
    books, letters = CroppedTexts(9, 1, crop), CroppedTexts(5, 2, crop)
    weights = np.minimum(books.lengths("letters"), 40.0)
    draws = Draws([Source("books", books, weights, 3.0), Source("letters", letters)], seed)
    return Stage(name, config, draws, {"letters": draws.lengths("letters")})


def make_run(
    folder: Path, *, task=None, resume=False, first=FIRST, second=SECOND, size=1, seed=0, **groups
) -> Run:
    """A run in two stages, of crops of 8 and of 12 letters."""
    stages = [make_stage("short", first, 8, seed), make_stage("long", second, 12, seed)]
    valid = CroppedTexts(6, 3, 12)
    groups = {"optim": {"lr": 0.02, "ema": 0.9}, "train": {"seed": seed}, **groups}
    settings = replace(
        tiny.settings(**groups), batch=BatchConfig(algorithm="fixed_count", size=size)
    )
    return Run(
        model=Reader(),
        task=task or RecycledTask(),
        train=stages[0].train,
        sizes=stages[0].sizes,
        folder=Path(folder),
        settings=settings,
        valid=valid,
        valid_sizes={"letters": valid.lengths("letters")},
        identity={"model": {"width": 5}},
        resume=resume,
        stages=stages,
        most_samples=6,
    )


def draws_by_step(seen):
    """The numbers of the draws of each step."""
    found: dict[int, list[int]] = {}
    for step, numbers in seen:
        found[step] = sorted(found.get(step, []) + list(numbers))
    return found
