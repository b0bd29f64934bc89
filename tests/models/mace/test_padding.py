"""Padding changes no number of a potential."""

import numpy as np
import pytest
import torch

from bevatron.data.padding import BatchShape, pad_structures
from bevatron.data.samples import structures as padding
from bevatron.models.mace import LossConfig, MaceTask

SHAPE = BatchShape(edges=400, atoms=40, graphs=9)


def labelled_batch(structures, weights=(1.0, 1.0, 1.0, 0.0)):
    rng = np.random.default_rng(3)

    def labels(n):
        return {"energy": rng.normal(), "forces": rng.normal(size=(n, 3))}

    samples = [
        structures.molecule(5, 1, **labels(5)),
        structures.crystal(2, **labels(3), stress=rng.normal(size=(3, 3)) * 0.01),
        structures.molecule(4, 5, energy=0.3),
        structures.molecule(6, 7, **labels(6)),
    ]
    return structures.batch(*samples, weights=weights)


def derivatives(model, task, batch):
    """Loss terms and the gradient of every parameter."""
    normalisers = task.normalisers(batch)
    loss = task.loss(model, batch, normalisers)
    gradients = torch.autograd.grad(loss.total, list(model.parameters()), allow_unused=True)
    return loss, [g for g in gradients if g is not None], normalisers


def check_same(found, gradients):
    for one, other in zip(found, gradients, strict=True):
        scale = float(other.abs().max())
        assert float((one - other).abs().max()) <= 1e-13 * max(scale, 1.0)


LOSSES = {
    "weighted": LossConfig(stress_weight=1.0, virials_weight=0.5),
    "huber": LossConfig(kind="huber", stress_weight=1.0),
    "universal": LossConfig(kind="universal", stress_weight=1.0),
    "l1l2": LossConfig(kind="l1l2"),
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("length", [100.0, 1.0], ids=["beyond the cutoff", "within it"])
def test_padding_changes_neither_loss_nor_gradients(structures, tiny, monkeypatch, kind, length):
    monkeypatch.setattr(padding, "PADDING_LENGTH", length)
    model, task, batch = tiny(), MaceTask(LOSSES[kind]), labelled_batch(structures)
    loss, gradients, counts = derivatives(model, task, batch)
    padded = pad_structures(batch, SHAPE)
    found, found_gradients, found_counts = derivatives(model, task, padded)
    assert {k: float(v) for k, v in found_counts.items()} == {
        k: float(v) for k, v in counts.items()
    }
    assert float(found.total.detach()) == pytest.approx(float(loss.total.detach()), rel=1e-13)
    for name, term in loss.terms.items():
        assert float(found.terms[name]) == pytest.approx(float(term), rel=1e-13)
    check_same(found_gradients, gradients)


@pytest.mark.parametrize("changes", [{"pair_repulsion": True, "distance_transform": "agnesi"}])
def test_padding_of_a_model_with_repulsion_is_harmless(structures, tiny, changes):
    model, task = tiny(**changes), MaceTask(LOSSES["weighted"])
    batch = labelled_batch(structures)
    _, gradients, _ = derivatives(model, task, batch)
    _, found, _ = derivatives(model, task, pad_structures(batch, SHAPE))
    check_same(found, gradients)


def test_padding_changes_no_metric(structures, tiny):
    model, task, batch = tiny(), MaceTask(), labelled_batch(structures)
    found = []
    for one in (batch, pad_structures(batch, SHAPE)):
        metrics = task.metrics()
        metrics.update(one, task.predict(model, one))
        found.append(metrics.compute())
    assert found[0].keys() == found[1].keys()
    assert list(found[1].values()) == pytest.approx(list(found[0].values()), rel=1e-12)


def test_forces_on_padding_are_zero(structures, tiny):
    batch = labelled_batch(structures)
    forces = tiny()(pad_structures(batch, SHAPE))["forces"]
    assert not forces[batch.num_atoms :].any()
