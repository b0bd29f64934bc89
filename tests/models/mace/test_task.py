"""Losses and errors: what is averaged over what, whatever the batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bevatron.errors import ConfigError
from bevatron.models.mace import LossConfig, MaceTask, StageTwo, per_structure_errors
from bevatron.models.mace.losses import loss_sum

KINDS = ("weighted", "huber", "universal", "l1l2")


def labelled(structures, seed, n=4, **changes):
    rng = np.random.default_rng(100 + seed)
    labels = {
        "energy": float(rng.normal(-3000, 100)),
        "forces": rng.normal(0, 1, (n, 3)),
        **changes,
    }
    return structures.molecule(n, seed=seed, **labels)


def crystal(structures, seed, **changes):
    rng = np.random.default_rng(seed)
    labels = {
        "energy": float(rng.normal(-3000, 10)),
        "forces": rng.normal(0, 1, (3, 3)),
        "stress": np.diag(rng.normal(0, 1, 3)),
        **changes,
    }
    return structures.crystal(seed, **labels)


def value(task, model, batch, normalisers=None):
    return task.loss(model, batch, normalisers or task.normalisers(batch)).total.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_add_up_to_the_large_batch(tiny, structures, kind):
    model = tiny()
    stress = 0.0 if kind == "l1l2" else 3.0
    task = MaceTask(LossConfig(kind, 1.0, 10.0, stress))
    samples = [
        labelled(structures, 0, 5),
        crystal(structures, 1),
        labelled(structures, 2, 1),
        crystal(structures, 3, stress=np.full((3, 3), np.nan)),
    ]
    whole = structures.batch(*samples)
    parts = [structures.batch(*samples[:1]), structures.batch(*samples[1:])]
    counts = [task.normalisers(part) for part in parts]
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    together = sum(value(task, model, part, total) for part in parts)
    torch.testing.assert_close(together, value(task, model, whole), rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_samples_count_nothing(tiny, structures, kind):
    model, task = tiny(), MaceTask(LossConfig(kind, 1.0, 10.0))
    samples = [labelled(structures, 0, 5), labelled(structures, 1, 3)]
    padded = structures.batch(*samples, samples[1], weights=[1.0, 1.0, 0.0])
    plain = structures.batch(*samples)
    torch.testing.assert_close(value(task, model, padded), value(task, model, plain))
    loss = task.loss(model, padded, task.normalisers(padded)).total
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    loss = task.loss(model, plain, task.normalisers(plain)).total
    for a, b in zip(gradients, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_huge_prediction_without_a_label_counts_nothing(structures):
    batch = structures.batch(labelled(structures, 0), labelled(structures, 1, energy=float("nan")))
    energy = torch.tensor([-3000.0, 1e200], dtype=torch.float64, requires_grad=True)
    total = loss_sum("energy", "weighted", batch, {"energy": energy}, 0.01)
    assert total.isfinite()
    assert torch.autograd.grad(total, energy)[0][1] == 0


def test_the_weighted_loss_is_what_it_says(tiny, structures):
    model, task = tiny(), MaceTask(LossConfig("weighted", 2.0, 10.0, 5.0))
    first = crystal(structures, 1, weights=np.array([2.0, 3.0, 0.5, 1.0]))
    second = labelled(structures, 2, 4)
    batch = structures.batch(first, second)
    out = model(batch, compute=("forces", "stress"))
    energy = (out["energy"] - batch.energy) / torch.tensor([3.0, 4.0])
    per_atom = torch.tensor([1.0] * 3 + [1.0] * 4)[:, None]
    forces = (per_atom * (out["forces"] - batch.forces) ** 2).sum() / (3 * 7)
    stress = 2.0 * ((out["stress"][0] - batch.stress[0]) ** 2).mean()
    expected = 2.0 * (torch.tensor([6.0, 1.0]) * energy**2).mean() + 10.0 * forces + 5.0 * stress
    torch.testing.assert_close(value(task, model, batch), expected.detach())


def test_missing_labels_are_left_out_of_the_mean(tiny, structures):
    model, task = tiny(), MaceTask(LossConfig("weighted", 1.0, 10.0))
    some = labelled(structures, 0, 5)
    bare = labelled(structures, 1, 3, energy=np.nan, forces=np.zeros((0, 3)))
    torch.testing.assert_close(
        value(task, model, structures.batch(some, bare)), value(task, model, structures.batch(some))
    )


def test_a_step_without_any_label_of_a_term_is_zero_there(tiny, structures):
    model, task = tiny(), MaceTask(LossConfig("weighted", 1.0, 10.0, 5.0))
    batch = structures.batch(labelled(structures, 0))
    loss = task.loss(model, batch, task.normalisers(batch))
    assert float(loss.terms["stress"]) == 0.0
    loss.total.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_universal_shrinks_delta_for_large_forces(tiny, structures):
    model, task = tiny(), MaceTask(LossConfig("universal", 0.0, 1.0))
    forces = np.array([[5.0, 0, 0], [150.0, 0, 0], [250.0, 0, 0], [1000.0, 0, 0]])
    batch = structures.batch(labelled(structures, 3, 4, forces=forces))
    error = (model(batch)["forces"].detach() - batch.forces).abs()
    delta = 0.01 * torch.tensor([1.0, 0.7, 0.4, 0.1])[:, None]
    expected = torch.where(error < delta, error**2 / 2, delta * (error - delta / 2)).mean()
    torch.testing.assert_close(value(task, model, batch), expected)


def test_virials_are_the_stress_times_the_volume(tiny, structures):
    model, batch = tiny(), structures.batch(crystal(structures, 1))
    task = MaceTask(LossConfig("weighted", 0.0, 0.0, 0.0, 1.0))
    volume = torch.linalg.det(batch.cell).abs()
    virials = model(batch, compute=("virials",))["virials"]
    expected = (((virials + batch.stress * volume[:, None, None]) / 3) ** 2).mean()
    torch.testing.assert_close(value(task, model, batch), expected.detach())


def test_the_stress_of_a_slab_is_compared_per_volume_of_its_cell(tiny, structures):
    model, task = tiny(), MaceTask(LossConfig("weighted", 0.0, 0.0, 1.0))
    batch = structures.batch(crystal(structures, 1))
    batch = replace(batch, pbc=torch.tensor([[True, True, False]]))
    virials = model(batch, compute=("virials",))["virials"]
    error = -virials / torch.linalg.det(batch.cell).abs() - batch.stress
    torch.testing.assert_close(value(task, model, batch), error.square().mean().detach())
    found = per_structure_errors(batch, model(batch, compute=("stress", "virials")))
    torch.testing.assert_close(found["stress"][0, 2], error.square().sum())


def test_the_second_stage_has_its_own_weights(tiny, structures):
    task = MaceTask(LossConfig("weighted", 1.0, 100.0, stage_two=StageTwo(3, 1000.0, 10.0)))
    for epoch, energy in ((0, 1.0), (2, 1.0), (3, 1000.0), (9, 1000.0), (1, 1.0)):
        task.begin_epoch(epoch)
        assert task.weights["energy"] == energy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"energy_weight": -1.0}, "energy_weight"),
        ({"energy_weight": 0.0, "forces_weight": 0.0}, "nothing would be learnt"),
        ({"kind": "huber", "virials_weight": 1.0}, "no virials"),
        ({"kind": "l1l2", "stress_weight": 1.0}, "stress_weight"),
        ({"stage_two": StageTwo(1, forces_weight=-1.0)}, "stage_two.forces_weight"),
        ({"huber_delta": 0.0}, "huber_delta"),
    ],
)
def test_weights_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        LossConfig(**arguments)


def test_errors_are_those_of_all_numbers_together(tiny, structures):
    model, task = tiny(), MaceTask()
    samples = [labelled(structures, 0, 5), crystal(structures, 1), labelled(structures, 2, 2)]
    metrics = task.metrics()
    for batch in (structures.batch(*samples[:2]), structures.batch(samples[2])):
        metrics.update(batch, task.predict(model, batch))
    whole = structures.batch(*samples)
    out = task.predict(model, whole)
    found = metrics.compute()
    forces = out["forces"] - whole.forces
    assert found["forces_mae"] == pytest.approx(float(forces.abs().mean()))
    assert found["forces_rmse"] == pytest.approx(float((forces**2).mean()) ** 0.5)
    per_atom = (out["energy"] - whole.energy) / torch.tensor([5.0, 3.0, 2.0])
    assert found["energy_per_atom_mae"] == pytest.approx(float(per_atom.abs().mean()))
    stress = out["stress"][1] - whole.stress[1]
    assert found["stress_rmse"] == pytest.approx(float((stress**2).mean()) ** 0.5)


def test_sums_of_two_ranks_add_up(tiny, structures):
    model, task = tiny(), MaceTask()
    batches = [structures.batch(labelled(structures, seed, 4)) for seed in (0, 1)]
    both, ranks = task.metrics(), [task.metrics(), task.metrics()]
    for batch, rank in zip(batches, ranks, strict=True):
        outputs = task.predict(model, batch)
        both.update(batch, outputs)
        rank.update(batch, outputs)
    merged = task.metrics()
    merged.load_sums(ranks[0].sums() + ranks[1].sums())
    assert merged.compute() == pytest.approx(both.compute())


def test_errors_of_heads_are_kept_apart(tiny, structures):
    energies = ((-13.6, -1029.0, -2041.0), (-10.0, -1000.0, -2000.0))
    model, task = tiny(heads=("a", "b"), atomic_energies=energies), MaceTask(heads=("a", "b"))
    batch = structures.batch(labelled(structures, 0), labelled(structures, 1, head=1))
    metrics = task.metrics()
    metrics.update(batch, task.predict(model, batch))
    found = metrics.compute()
    rows = per_structure_errors(batch, task.predict(model, batch))
    assert found["b/energy_mae"] == pytest.approx(float(rows["energy"][1, 1]))
    assert found["energy_mae"] == pytest.approx(float(rows["energy"][:, 1].mean()))
    assert set(metrics.names) >= set(found)
    assert "a/stress_rmse" in metrics.names


def test_what_has_no_label_has_no_error(tiny, structures):
    model, task = tiny(), MaceTask()
    batch = structures.batch(labelled(structures, 0, forces=np.zeros((0, 3))))
    metrics = task.metrics()
    metrics.update(batch, task.predict(model, batch))
    assert set(metrics.compute()) == {
        "energy_mae", "energy_rmse", "energy_per_atom_mae", "energy_per_atom_rmse",
    }  # fmt: skip


def test_energies_keep_their_digits_in_single_precision(tiny, structures):
    model, task = tiny(torch.float32), MaceTask(LossConfig("weighted", 1.0, 0.0))
    sample = labelled(structures, 0, energy=-119_654.321_987)
    batch = structures.batch(sample).to("cpu", torch.float32)
    assert batch.positions.dtype == torch.float32
    assert float(batch.energy[0]) == -119_654.321_987
    assert task.loss(model, batch, task.normalisers(batch)).total.dtype == torch.float64
