"""Our side of the comparison with mace-torch: the shipped reader, store, trainer and evaluation."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bevatron
from bevatron.data.dataset import Subset
from bevatron.models.mace import LossConfig, MaceTask, from_mace_torch
from bevatron.models.mace.features import statistics
from bevatron.parallel.mesh import Mesh
from bevatron.recipes.mace.data import batch_sizes
from bevatron.recipes.mace.stores import prepare_structures
from bevatron.train import fit
from bevatron.train.evaluate import evaluate, in_eval_mode, make_loader
from bevatron.train.optim import AveragedWeights, make_optimizer
from bevatron.train.run import Run
from bevatron.train.settings import (
    BatchConfig,
    CheckpointConfig,
    OptimConfig,
    ScheduleConfig,
    Settings,
    TrainConfig,
)
from bevatron.train.state import TrainState
from bevatron.train.step import train_step

MESH = Mesh()


class Ours:
    """One data set with the trainer's settings, and a model of mace-torch's first weights."""

    def __init__(
        self,
        plan: dict[str, Any],
        dataset: str,
        seed: int,
        dtype: str,
        folder: Path,
        initial: tuple[dict[str, torch.Tensor], dict[str, Any]],
    ) -> None:
        torch.set_default_dtype(torch.float32)  # mace-torch sets its own
        self.plan, self.dtype = plan, dtype
        part = plan["datasets"][dataset]
        stores = folder / f"store-{dataset}"
        store = prepare_structures([part["file"]], stores, plan["architecture"]["r_max"], workers=0)
        self.parts = {name: Subset(store, part[name]) for name in ("train", "valid", "test")}
        self.sizes = {name: batch_sizes(subset) for name, subset in self.parts.items()}
        training = plan["training"]
        self.task = MaceTask(
            LossConfig(
                energy_weight=training["energy_weight"], forces_weight=training["forces_weight"]
            )
        )
        self.settings = settings(plan, seed, dtype)
        self.config = initial[1]
        self.model = from_mace_torch(*initial)

    def run(self, folder: Path) -> Run:
        """Return the run that `bevatron.train.fit` walks."""
        return Run(
            model=self.model,
            task=self.task,
            train=self.parts["train"],
            sizes=self.sizes["train"],
            valid=self.parts["valid"],
            valid_sizes=self.sizes["valid"],
            folder=folder,
            settings=self.settings,
            monitor="forces_rmse",
        )


def settings(plan: dict[str, Any], seed: int, dtype: str) -> Settings:
    """Put the plan into the trainer's terms."""
    training = plan["training"]
    return Settings(
        optim=OptimConfig(
            algorithm="amsgrad",
            lr=training["lr"],
            weight_decay=training["weight_decay"],
            clip=training["clip"],
            ema=training["ema"],
        ),
        schedule=ScheduleConfig(kind="exponential", gamma=training["gamma"]),
        batch=BatchConfig(algorithm="fixed_count", size=training["batch_size"]),
        checkpoint=CheckpointConfig(every_epochs=None, best=False, final="last"),
        train=TrainConfig(
            epochs=training["epochs"], seed=seed, dtype=dtype, device="cpu", evaluate_every=5
        ),
    )


def learn(ours: Ours, folder: Path) -> dict[str, Any]:
    """Train with `fit`; return the loss of each step, times and final errors."""
    runs = folder / "bevatron"
    shutil.rmtree(runs, ignore_errors=True)
    run = ours.run(runs)
    fit(run)
    records = [json.loads(line) for line in (runs / "metrics.jsonl").read_text().splitlines()]
    epochs = [record for record in records if record["kind"] == "epoch"]
    test = evaluate(
        ours.task,
        run.model,
        ours.parts["test"],
        ours.sizes["test"],
        batch=ours.settings.batch,
        dtype=getattr(torch, ours.dtype),
    )
    return {
        "losses": [record["loss"] for record in records if record["kind"] == "step"],
        "epoch_seconds": [record["time"]["seconds"] for record in epochs],
        "valid_curve": [
            [r["epoch"] + 1, r["valid"]["forces_rmse"], r["valid"]["energy_per_atom_rmse"]]
            for r in epochs
            if r["valid"]
        ],
        "test": {"rmse_f": test["forces_rmse"], "rmse_e_per_atom": test["energy_per_atom_rmse"]},
        "statistics": compare_statistics(ours),
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "versions": versions(),
    }


def compare_statistics(ours: Ours) -> dict[str, float]:
    """Largest difference between the statistics that each side takes from the training data."""
    found = statistics(ours.parts["train"], e0="least_squares")
    theirs = ours.config
    energies = np.ravel(theirs["atomic_energies"]) - np.ravel(found.atomic_energies)
    return {
        "avg_num_neighbors": abs(found.avg_num_neighbors - theirs["avg_num_neighbors"]),
        "force_rms": abs(found.force_rms[0] - float(np.ravel(theirs["atomic_inter_scale"])[0])),
        "e0": float(np.abs(energies).max()),
    }


class Timed:
    """A model of one precision, trained and evaluated on given batches, and timed."""

    name = "bevatron"

    def __init__(self, ours: Ours, folder: Path) -> None:
        self.ours, self.dtype = ours, getattr(torch, ours.dtype)
        self.model = ours.model.to(self.dtype)
        self.run = ours.run(folder)
        optimizer = make_optimizer(self.model, ours.settings.optim)
        average = AveragedWeights(self.model, ours.plan["training"]["ema"])
        self.state = TrainState(self.model, optimizer, average)

    def batches(self, batches: list[list[int]]) -> Any:
        """Load batches from the store as the trainer does."""
        torch.set_default_dtype(torch.float32)
        chosen = [(np.array(batch), np.ones(len(batch))) for batch in batches]
        return make_loader(self.ours.parts["train"], chosen, self.ours.task.collate, None, MESH)

    def train(self, batches: list[list[int]]) -> float:
        """Seconds of the trainer's steps over all batches, reading and collating included."""
        lr = self.ours.settings.optim.lr
        begin = time.perf_counter()
        for loaded in self.batches(batches):
            train_step(self.run, self.state, self.model, [loaded.batch], lr=lr, mesh=MESH)
        return time.perf_counter() - begin

    def infer(self, batches: list[list[int]]) -> float:
        """Seconds of energies, forces and errors of all batches."""
        task = self.ours.task
        begin = time.perf_counter()
        metrics = task.metrics()
        with in_eval_mode(self.model):
            for loaded in self.batches(batches):
                moved = loaded.batch.to("cpu", self.dtype)
                metrics.update(moved, task.predict(self.model, moved))
        metrics.compute()
        return time.perf_counter() - begin

    def forces(self, batch: list[int]) -> torch.Tensor:
        """Compute the forces on the atoms of one batch, [N, 3] float64."""
        loaded = next(iter(self.batches([batch]))).batch.to("cpu", self.dtype)
        return self.ours.task.predict(self.model, loaded)["forces"].double()


def versions() -> dict[str, str]:
    return {"bevatron": bevatron.__version__, "torch": torch.__version__}
