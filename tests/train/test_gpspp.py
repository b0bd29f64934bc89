"""The trainer with GPS++: captured steps, 16-bit products, the published schedule and clipping."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from bevatron.data.dataset import InMemory
from bevatron.models.gpspp import CorruptionConfig, GPSPlusPlusTask
from bevatron.parallel.mesh import Mesh
from bevatron.train import Run
from bevatron.train.capture.step import CapturedStep
from bevatron.train.loop import begin_state, fit
from bevatron.train.step import train_step

FILE = Path(__file__).parents[1] / "models/gpspp/random_molecules.py"
SPEC = importlib.util.spec_from_file_location("random_molecules", FILE)
molecules = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(molecules)

STILL = CorruptionConfig(0.0, 0.0, (0.0, 0.0, 1.0), random_signs=False)
PUBLISHED = {
    "optim": {"algorithm": "adam", "clip": 5.0, "clip_norm": "tensor", "weight_decay": 0.0},
    "schedule": {"kind": "linear", "warmup_epochs": 1.0, "per_epoch": True},
}


def labelled_molecules(count=12):
    """Molecules whose label is their number of bonds."""
    random = np.random.default_rng(2)
    samples = [molecules.random_molecule(random, 2 + i % 5) for i in range(count)]
    for sample in samples:
        sample["targets"] = np.array([len(sample["bonds"]) / 4], np.float32)
    return InMemory(samples, "molecule {}".format)


def make_run(folder, corruption=STILL, modes=("2d", "3d"), **groups) -> Run:
    torch.manual_seed(1)
    model = molecules.small_model(num_layers=1)
    data = labelled_molecules()
    atoms = data.lengths("atom_features")
    sizes = {"atoms": atoms, "edges": data.lengths("bonds"), "pairs": atoms**2}
    return Run(
        model=model,
        task=GPSPlusPlusTask(model.config, corruption=corruption, modes=modes),
        train=data,
        sizes=sizes,
        folder=folder,
        settings=tiny.settings(**{"batch": {"capacity": 24}, **groups}),
        valid=data,
        valid_sizes=sizes,
        identity={"model": {"kind": "gpspp"}},
        monitor="loss",
    )


def test_captured_steps_equal_plain_ones(tmp_path):
    groups = ([[0, 1, 2]], [[3, 4, 5], [6, 7]], [[8, 9, 10, 11]])
    optim = {**PUBLISHED["optim"], "accumulate": 2, "ema": 0.9}
    ends = []
    for kind in ("plain", "captured"):
        run = make_run(tmp_path, optim=optim)
        state = begin_state(run, Mesh(), None)
        captured = CapturedStep(run, state, Mesh()) if kind == "captured" else None
        losses = []
        for group in groups:
            batches = [tiny.batch_of(run, one) for one in group]
            if captured is None:
                result = train_step(run, state, state.model, batches, lr=1e-3, mesh=Mesh())
            else:
                result = captured(batches, lr=1e-3).result()
            losses.append([result.loss, result.grad_norm, *result.terms.values()])
        ends.append((losses, list(state.model.parameters())))
    np.testing.assert_allclose(ends[1][0], ends[0][0], rtol=1e-10)
    for one, other in zip(ends[1][1], ends[0][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_a_run_learns_with_the_published_settings(tmp_path, autocast):
    train = {"epochs": 6, "dtype": "float32", "autocast": autocast}
    run = make_run(
        tmp_path,
        CorruptionConfig(),
        train=train,
        **{**PUBLISHED, "optim": {**PUBLISHED["optim"], "lr": 3e-3}},
    )
    result = fit(run)
    records = [record for record in tiny.records(tmp_path) if record["kind"] == "step"]
    assert records[0]["lr"] == 0.0
    rates = sorted({round(record["lr"] / 3e-3, 6) for record in records})
    assert rates == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(math.isfinite(record["loss"]) for record in records)
    first = np.mean([record["loss"] for record in records[:3]])
    assert np.mean([record["loss"] for record in records[-3:]]) < 0.95 * first
    assert {"gap_mae", "3d/gap_mae", "gap_r2", "loss"} <= set(result.metrics)
