"""The trainer with a real potential: forces by differentiation inside the loss."""

import os
import signal

import numpy as np
import pytest
import tiny
import torch

from bevatron.data.dataset import InMemory
from bevatron.data.neighbours import add_neighbours
from bevatron.models.mace import MACE, MaceConfig, MaceTask
from bevatron.parallel.mesh import Mesh
from bevatron.train import Run, describe
from bevatron.train.loop import begin_state, fit
from bevatron.train.step import train_step


def labelled_molecules(count=10):
    """Random molecules with labels; every third has no forces, one is a single atom."""
    random = np.random.default_rng(5)
    samples = []
    for i in range(count):
        n = 1 if i == 4 else int(random.integers(2, 8))
        grid = np.stack(np.meshgrid(*[np.arange(2.0)] * 3), -1).reshape(-1, 3)[:n]
        sample = {
            "atomic_numbers": random.choice([1, 6, 8], n).astype(np.int32),
            "positions": 1.3 * grid + random.normal(scale=0.1, size=(n, 3)),
            "cell": np.zeros((3, 3)),
            "pbc": np.zeros(3, dtype=bool),
            "energy": np.array(random.normal()),
            "forces": random.normal(size=(n if i % 3 else 0, 3)),
            "stress": np.full((3, 3), np.nan),
            "weights": np.array([1.0 + i % 2, 1.0, 1.0, 1.0]),
            "head": np.array(0, dtype=np.int32),
            "source": np.array([0, i]),
            "group": np.zeros(0, dtype=np.uint8),
        }
        samples.append(add_neighbours(sample, 3.0))
    return InMemory(samples, "molecule {}".format)


def make_run(folder, task=None, **groups) -> Run:
    torch.manual_seed(1)
    config = MaceConfig(
        atomic_numbers=(1, 6, 8),
        atomic_energies=((-1.0, -2.0, -3.0),),
        avg_num_neighbors=4.0,
        num_channels=4,
        max_L=1,
        l_max=2,
        correlation=2,
        r_max=3.0,
        num_bessel=4,
        radial_mlp=(8,),
    )
    data = labelled_molecules()
    sizes = {"atoms": data.lengths("atomic_numbers"), "edges": data.lengths("edges")}
    return Run(
        model=MACE(config),
        task=task or MaceTask(),
        train=data,
        sizes=sizes,
        folder=folder,
        settings=tiny.settings(**{"batch": {"capacity": 14}, "optim": {"ema": 0.9}, **groups}),
        valid=data,
        valid_sizes=sizes,
        monitor="forces_rmse",
    )


def test_accumulated_batches_equal_a_large_one(tmp_path):
    found = []
    for groups in ([list(range(10))], [[4], [0, 1, 2], [3, 5, 6, 7, 8, 9]]):
        run = make_run(tmp_path)
        state = begin_state(run, Mesh(), None)
        batches = [tiny.batch_of(run, group) for group in groups]
        results = [
            train_step(run, state, run.model, batches, lr=0.01, mesh=Mesh()) for _ in range(2)
        ]
        found.append([(result.loss, result.grad_norm) for result in results])
    assert np.abs(np.array(found[0]) - np.array(found[1])).max() < 1e-10


def test_stopped_and_resumed_gives_the_same_losses_to_the_last_bit(tmp_path):
    class Stopped(MaceTask):
        calls = 0

        def loss(self, *args):
            Stopped.calls += 1
            if Stopped.calls == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().loss(*args)

    groups = {"train": {"epochs": 2}}
    fit(make_run(tmp_path / "whole", **groups))
    assert fit(make_run(tmp_path / "cut", task=Stopped(), **groups)).stopped_by == "SIGTERM"
    run = make_run(tmp_path / "cut", **groups)
    run.resume = True
    fit(run)
    assert tiny.records(tmp_path / "cut") == tiny.records(tmp_path / "whole")


def test_a_dry_run_estimates_the_memory_of_the_backward_pass(tmp_path):
    small = describe(make_run(tmp_path, batch={"capacity": 8}))
    large = describe(make_run(tmp_path, batch={"capacity": 60}))
    ratio = large["memory"][""].activations / small["memory"][""].activations
    atoms = large["largest_batch"]["atoms"] / small["largest_batch"]["atoms"]
    assert ratio == pytest.approx(atoms, rel=0.5)


def test_an_optimiser_group_decays_products_and_messages_only(tmp_path):
    run = make_run(tmp_path, optim={"weight_decay": 0.1})
    state = begin_state(run, Mesh(), None)
    names = {id(p): name for name, p in run.model.named_parameters()}
    decayed = {
        names[id(p)]
        for group in state.optimizer.param_groups
        if group["weight_decay"]
        for p in group["params"]
    }
    assert decayed
    assert all(name.startswith(("products", "interactions")) for name in decayed)


def test_validation_in_a_thread_changes_nothing(tmp_path):
    train = {"epochs": 3, "dtype": "float64"}
    fit(make_run(tmp_path / "in_line", train=train))
    fit(make_run(tmp_path / "beside", train={**train, "evaluate_beside": True}))
    in_line, beside = (
        [{**one, "time": 0} for one in tiny.records(tmp_path / name) if one["kind"] != "run"]
        for name in ("in_line", "beside")
    )
    assert sorted(map(str, beside)) == sorted(map(str, in_line))
