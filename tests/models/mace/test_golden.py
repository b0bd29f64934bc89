"""Agreement with values that mace-torch computed from the same weights."""

import gzip
import io
import json

import numpy as np
import pytest
import torch

from bevatron.models.mace import MACE, LossConfig, MaceTask, from_mace_torch

MODELS = (
    "real_mace_tutorial_solvent_f32",
    "real_imagdau_mace01_f64",
    "synth_paper_128x0e1o_l3_c2",
    "synth_mp0like_32x0e1o_l3_c3",
)


@pytest.fixture(scope="module")
def reference(shared):
    return json.loads((shared / "golden" / "mace_reference.json").read_text())["models"]


def read_state(shared, name):
    folder = shared / "data" / "mace" / "models"
    plain = folder / f"{name}.state_dict.pt"
    content = (
        plain.read_bytes()
        if plain.exists()
        else gzip.decompress((folder / f"{name}.state_dict.pt.gz").read_bytes())
    )
    return torch.load(io.BytesIO(content), weights_only=True)


@pytest.fixture(scope="module")
def models(shared, reference) -> dict[str, MACE]:
    return {
        name: from_mace_torch(read_state(shared, name), reference[name]["config"]).double()
        for name in MODELS
    }


def as_sample(structures, values, r_max, **labels):
    return structures.sample(
        values["numbers"],
        values["positions"],
        values["cell"],
        values["pbc"],
        cutoff=r_max,
        **labels,
    )


@pytest.mark.shared
@pytest.mark.parametrize("name", MODELS)
def test_energies_forces_and_stress_agree_in_float64(name, models, reference, structures):
    model, wanted = models[name], reference[name]["structures"]
    for label, values in wanted.items():
        batch = structures.batch(as_sample(structures, values, model.config.r_max))
        found = model(batch, compute=("energy", "forces", "stress"))
        assert abs(found["energy"].tolist()[0] - values["energy"]) < 1e-9, label
        error = np.abs(found["forces"].detach().numpy() - np.array(values["forces"])).max()
        assert error < 1e-9, label
        if values["stress"] is not None:
            error = np.abs(found["stress"][0].detach().numpy() - np.array(values["stress"])).max()
            assert error < 1e-10, label


@pytest.mark.shared
def test_gradients_of_a_training_step_agree(models, reference, structures):
    name = "synth_paper_128x0e1o_l3_c2"
    model, step = models[name], reference[name]["train_step"]
    samples = [
        as_sample(structures, reference[name]["structures"][label], 4.5, **step["labels"][label])
        for label in step["order"]
    ]
    batch = structures.batch(*samples)
    assert batch.num_edges == step["num_edges"]
    task = MaceTask(LossConfig(energy_weight=1.0, forces_weight=10.0))
    loss = task.loss(model, batch, task.normalisers(batch))
    assert float(loss.total.detach()) == pytest.approx(step["loss_value"], rel=1e-9)
    names = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss.total, list(names.values()))
    found = norms_by_their_names(model, dict(zip(names, gradients, strict=True)))
    assert found.keys() == step["grad_l2"].keys()
    for theirs, norm in step["grad_l2"].items():
        assert found[theirs] == pytest.approx(norm, rel=1e-8), theirs


def norms_by_their_names(model, gradients):
    from bevatron.models.mace.mace_torch_layout import pieces

    squares = {}
    for piece in pieces(model.config):
        if piece.ours in gradients:
            square = float(gradients[piece.ours].square().sum())
            squares[piece.theirs] = squares.get(piece.theirs, 0.0) + square
    return {name: square**0.5 for name, square in squares.items()}
