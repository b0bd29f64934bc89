"""A tiny task for tests of the trainer: energies and forces of clouds of points."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bevatron.task import Loss
from bevatron.train.run import Run
from bevatron.train.settings import (
    BatchConfig,
    CheckpointConfig,
    LoaderConfig,
    OptimConfig,
    ScheduleConfig,
    Settings,
    TrainConfig,
)


class TinyData:
    """Clouds of 1 to ``largest`` points; the labels are functions of the points."""

    def __init__(self, count: int, largest: int = 9, seed: int = 0, sizes=None) -> None:
        random = np.random.default_rng(seed)
        self.num = random.integers(1, largest + 1, count) if sizes is None else np.array(sizes)
        self.points = [random.normal(size=(n, 3)) for n in self.num]

    def __len__(self) -> int:
        return len(self.num)

    def __getitem__(self, index: int):
        points = self.points[index]
        energy = np.cos(points).sum()
        return {"points": points, "energy": np.array(energy), "forces": np.sin(points)}

    def describe(self, index: int) -> str:
        return f"cloud {index}"

    def lengths(self, field: str):
        return self.num.astype(np.int64)

    @property
    def sizes(self):
        return {"atoms": self.num.astype(np.int64), "edges": self.num.astype(np.int64) ** 2}


@dataclass(frozen=True)
class TinyBatch:
    points: torch.Tensor
    graph: torch.Tensor
    energy: torch.Tensor
    forces: torch.Tensor
    weight: torch.Tensor
    indices: np.ndarray

    @property
    def sample_indices(self):
        return self.indices

    @property
    def sizes(self):
        return {"graphs": len(self.energy), "atoms": len(self.points)}

    def to(self, device, dtype=None, non_blocking=False):
        return replace(
            self,
            **{
                name: getattr(self, name).to(device, dtype)
                for name in ("points", "energy", "forces", "weight")
            },
            graph=self.graph.to(device),
        )

    def pin_memory(self):
        names = ("points", "graph", "energy", "forces", "weight")
        return replace(self, **{name: getattr(self, name).pin_memory() for name in names})


def collate(samples, indices, weights):
    num = [len(s["points"]) for s in samples]
    return TinyBatch(
        points=torch.from_numpy(np.concatenate([s["points"] for s in samples])),
        graph=torch.from_numpy(np.repeat(np.arange(len(samples)), num)),
        energy=torch.tensor([float(s["energy"]) for s in samples], dtype=torch.float64),
        forces=torch.from_numpy(np.concatenate([s["forces"] for s in samples])),
        weight=torch.tensor(weights, dtype=torch.float64),
        indices=np.asarray(indices),
    )


class TinyModel(nn.Module):
    """Energy of a point from a small network; the second part is for tests of frozen weights."""

    def __init__(self, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, 1)
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, batch, create_graph=False):
        with torch.enable_grad():
            points = batch.points.detach().requires_grad_()
            per_point = self.second(torch.tanh(self.first(points))).squeeze(-1) + self.shift
            energy = torch.zeros_like(batch.energy).index_add(0, batch.graph, per_point)
            (gradient,) = torch.autograd.grad(energy.sum(), points, create_graph=create_graph)
        return {"energy": energy, "forces": -gradient}


class TinyMetrics:
    names = "loss", "energy_mse", "graphs"

    def __init__(self):
        self.values = torch.zeros(4, dtype=torch.float64)

    def update(self, batch, outputs):
        energy = batch.weight * (outputs["energy"] - batch.energy) ** 2
        forces = batch.weight[batch.graph, None] * (outputs["forces"] - batch.forces) ** 2
        self.values += torch.stack(
            [energy.sum(), batch.weight.sum(), forces.sum(), 3 * batch.weight[batch.graph].sum()]
        ).to("cpu", torch.float64)

    def sums(self):
        return self.values

    def load_sums(self, sums):
        self.values = sums

    def compute(self):
        energy, graphs, forces, components = self.values.tolist()
        return {
            "loss": energy / graphs + forces / components,
            "energy_mse": energy / graphs,
            "graphs": graphs,
        }


class TinyTask:
    collate = staticmethod(collate)

    def __init__(self, poison: int | None = None, scale_at: int | None = None) -> None:
        self.poison = poison  # a sample whose loss is not a number
        self.scale_at = scale_at  # a sample whose loss is huge
        self.seen: list[list[int]] = []
        self.epochs: list[int] = []

    def begin_epoch(self, epoch):
        self.epochs.append(epoch)

    def normalisers(self, batch):
        return {
            "graphs": batch.weight.sum(),
            "components": 3 * batch.weight[batch.graph].sum(),
        }

    def loss(self, model, batch, normalisers):
        self.seen.append([int(i) for i, w in zip(batch.indices, batch.weight, strict=True) if w])
        out = model(batch, create_graph=True)
        energy = (batch.weight * (out["energy"] - batch.energy) ** 2).sum()
        forces = (batch.weight[batch.graph, None] * (out["forces"] - batch.forces) ** 2).sum()
        energy, forces = energy / normalisers["graphs"], forces / normalisers["components"]
        if self.poison in batch.indices:
            energy = energy * float("nan")
        if self.scale_at in batch.indices:
            energy = energy * 1e9
        total = energy + 10 * forces
        return Loss(total, {"energy": energy.detach(), "forces": 10 * forces.detach()})

    def predict(self, model, batch):
        return {name: value.detach() for name, value in model(batch).items()}

    def metrics(self):
        return TinyMetrics()


class LossesTask(TinyTask):
    """Validation losses that are a function of the number of epochs begun."""

    def __init__(self, loss_after):
        super().__init__()
        self.loss_after = loss_after

    def metrics(self):
        loss = self.loss_after(len(self.epochs))

        class Metrics(TinyMetrics):
            def compute(self):
                return {**super().compute(), "loss": loss}

        return Metrics()


class WideTask(TinyTask):
    """A loss of a model of 256 columns, whose activations count."""

    def loss(self, model, batch, normalisers):
        x = batch.points.float().repeat(1, 86)[:, :256]
        return Loss(model(x).square().mean(), {})


def settings(**groups) -> Settings:
    """Settings of a short run; every keyword is a dict of one group's changes."""
    defaults = {
        "optim": OptimConfig(lr=0.01),
        "schedule": ScheduleConfig(kind="constant"),
        "batch": BatchConfig(capacity=20),
        "loader": LoaderConfig(),
        "checkpoint": CheckpointConfig(),
        "train": TrainConfig(epochs=2, device="cpu", dtype="float64"),
    }
    return Settings(**{k: replace(v, **groups.get(k, {})) for k, v in defaults.items()})


def make_run(folder: Path, *, count=30, task=None, model=None, identity=None, **groups) -> Run:
    """A run over ``count`` clouds, written to ``folder``."""
    extra = {
        name: groups.pop(name) for name in ("resume", "checkpoint_path", "on_end") if name in groups
    }
    extra = {{"checkpoint_path": "checkpoint"}.get(k, k): v for k, v in extra.items()}
    train, valid = TinyData(count), TinyData(7, seed=1)
    return Run(
        model=model or TinyModel(),
        task=task or TinyTask(),
        train=train,
        sizes=train.sizes,
        folder=Path(folder),
        settings=settings(**groups),
        valid=valid,
        valid_sizes=valid.sizes,
        identity=identity or {"model": {"width": 8}},
        **extra,
    )


def losses(folder: Path) -> list[float]:
    """The loss of every step in a run's metrics.jsonl."""
    return [record["loss"] for record in records(folder) if record["kind"] == "step"]


def records(folder: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    from bevatron.train.logger import read_journal

    found = []
    for record in read_journal(Path(folder) / "metrics.jsonl"):
        record.pop("time", None)
        found.append(record)
    return found


def batch_of(run, indices, weights=None):
    """A batch of some training samples of a run."""
    samples = [run.train[i] for i in indices]
    return run.task.collate(samples, np.array(indices), weights or [1.0] * len(indices))


def same_end(one: Path, other: Path) -> None:
    """Both runs have the same records, weights and best weights, to the last bit."""
    assert records(one) == records(other)
    for name in ("weights.safetensors", "best/weights.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
