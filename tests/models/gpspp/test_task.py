"""The task: one global mean, absent labels, classes, heads for noise, errors in users' units."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from random_molecules import NO_DROPOUT, SMALL, collate, random_batch, random_molecule, small_model

from bevatron.data.padding import BatchShape, pad_molecules
from bevatron.errors import ConfigError
from bevatron.kernels import use
from bevatron.models.gpspp import (
    CorruptionConfig,
    DropoutConfig,
    GPSPlusPlus,
    GPSPlusPlusConfig,
    GPSPlusPlusTask,
    LossConfig,
    Target,
    observe,
)
from bevatron.models.gpspp.losses import feature_log_sums, feature_loss_sum
from bevatron.task import AllowsAutocast, Capturable, ChecksBatches, Task
from from_the_host import NothingFromTheHost

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STILL = CorruptionConfig(
    node_noise=0.0, edge_noise=0.0, masking=(1.0, 0.0, 0.0), random_signs=False
)
MIXED = (
    Target("gap", mean=2.0, std=3.0),
    Target("toxic", "binary"),
    Target("kind", "multiclass", num_classes=3),
)


GAP = (Target("gap"),)


def model_of(targets=GAP, **changes):
    config = GPSPlusPlusConfig(**{**SMALL, "dropout": NO_DROPOUT, "targets": targets, **changes})
    return GPSPlusPlus(config, torch.float64)


def task_of(model, corruption=STILL, **options):
    return GPSPlusPlusTask(model.config, corruption=corruption, **options)


def labelled(targets, weight=None, **options):
    targets = torch.tensor(targets)
    batch = random_batch([3 + i % 4 for i in range(len(targets))], **options)
    known = ~targets.isnan()
    weight = known.float() if weight is None else torch.tensor(weight)[:, None] * known
    batch = replace(batch, targets=torch.where(known, targets, 0.0), target_weight=weight)
    return batch.to("cpu", torch.float64)


def total(task, model, batch, counts=None):
    return task.loss(model, batch, counts or task.normalisers(batch))


def test_it_is_a_task():
    model = model_of()
    task: Task = task_of(model)
    assert isinstance(task, Capturable)
    assert isinstance(task, AllowsAutocast)
    assert isinstance(model, ChecksBatches)
    assert pickle.loads(pickle.dumps(task.collate)) is not None
    hash(task.constants())


def test_two_batches_equal_one():
    random = np.random.default_rng(0)
    samples = [random_molecule(random, n) for n in (4, 6, 3, 7, 5)]
    model = model_of()
    task = task_of(model)
    whole = collate(samples).to("cpu", torch.float64)
    parts = [collate(samples[:2]), collate(samples[2:])]
    parts = [part.to("cpu", torch.float64) for part in parts]
    counts = task.normalisers(whole)
    for name, count in counts.items():
        assert count == sum(task.normalisers(part)[name] for part in parts)
    loss = total(task, model, whole)
    split = [total(task, model, part, counts) for part in parts]
    torch.testing.assert_close(loss.total, split[0].total + split[1].total)
    assert set(loss.terms) == {"targets", "nodes", "edges"}
    torch.testing.assert_close(sum(loss.terms.values()), loss.total.detach())


def loss_and_gradients(model, task, batch, counts):
    loss = task.loss(model, batch, counts)
    model.zero_grad()
    loss.total.backward()
    return [loss.total.detach(), *loss.terms.values(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("kernel", ["reference", "triton"])
def test_padding_changes_neither_loss_nor_gradients(kernel):
    if kernel == "triton":
        pytest.importorskip("triton")
    batch = random_batch([3, 6, 1, 4])
    padded = pad_molecules(batch, BatchShape(edges=40, atoms=24, graphs=6, pairs=128))
    exact = torch.float64 if kernel == "reference" else torch.float32
    model = small_model(exact, num_layers=1).to(DEVICE)
    task = task_of(model, CorruptionConfig(0.0, 0.0, (0.0, 0.0, 1.0), random_signs=False))
    counts = task.normalisers(batch)
    assert counts == task.normalisers(padded)
    counts = {name: count.to(DEVICE) for name, count in counts.items()}
    with use("reference"):
        plain = loss_and_gradients(model, task, batch.to(DEVICE, exact), counts)
    with use(kernel):
        found = loss_and_gradients(model, task, padded.to(DEVICE, exact), counts)
    tolerance = 1e-11 if kernel == "reference" else 2e-5
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("changes", [{}, {"attention": False}, {"edges": False}])
def test_a_step_can_be_captured(changes):
    noisy = {"noisy_edges": False} if "edges" in changes else {}
    model = small_model(denoising=True, dropout=DropoutConfig(ffn=0.1), **changes, **noisy)
    task = task_of(model, CorruptionConfig())
    batch = replace(random_batch([3, 6, 4]), checked=True)
    counts = task.normalisers(batch)
    parameters = list(model.parameters())
    task.loss(model, batch, counts)
    with NothingFromTheHost():
        losses = [task.loss(model, batch, counts).total for _ in range(2)]
        torch.autograd.grad(losses[0], parameters, allow_unused=True)
    assert not torch.equal(*losses)


def test_losses_are_the_published_ones():
    model = model_of((Target("gap", mean=2.0, std=3.0),))
    task = task_of(model)
    batch = labelled([[1.0], [5.0], [-2.0]])
    loss = total(task, model, batch)
    found = model(batch, compute=("raw", "node_logits", "edge_logits"))
    expected = (found["raw"][:, 0] - (batch.targets[:, 0] - 2.0) / 3.0).abs().mean()
    torch.testing.assert_close(loss.terms["targets"], expected.detach())
    for term, features in (("node", batch.atom_features), ("edge", batch.bond_features)):
        sizes = getattr(model.config.features, "atom_sizes" if term == "node" else "bond_sizes")
        parts = found[f"{term}_logits"].split(list(sizes), 1)
        each = [
            torch.nn.functional.cross_entropy(part, features[:, i]) for i, part in enumerate(parts)
        ]
        expected = 1.2 * torch.stack(each).mean()
        torch.testing.assert_close(loss.terms[f"{term}s"], expected.detach())


def test_absent_labels_and_repeated_molecules_do_not_count():
    nan = float("nan")
    model = model_of(MIXED)
    task = task_of(model)
    full = [[1.0, 1.0, 2.0], [2.0, 0.0, 1.0], [0.5, 1.0, 0.0], [9.0, 1.0, 1.0]]
    holes = [[1.0, 1.0, 2.0], [2.0, nan, 1.0], [nan, nan, nan], [9.0, 1.0, 1.0]]
    batch = labelled(holes, weight=[1.0, 1.0, 1.0, 0.0])
    counts = task.normalisers(batch)
    assert [int(counts[f"target {t.name}"]) for t in MIXED] == [2, 1, 2]
    raw = model(batch, compute=("raw",))["raw"].detach().requires_grad_()
    loss = total(task, Says(model, raw), batch)
    (gradient,) = torch.autograd.grad(loss.total, raw)
    assert (gradient != 0).tolist() == [
        [True, True, True, True, True],
        [True, False, True, True, True],
        [False] * 5,
        [False] * 5,
    ]
    n = (torch.tensor(full)[:2, 0].double() - 2.0) / 3.0
    by_hand = [
        (raw[:2, 0] - n).abs().mean(),
        torch.nn.functional.softplus(-raw[0, 1]),
        torch.nn.functional.cross_entropy(raw[:2, 2:], torch.tensor([2, 1])),
    ]
    torch.testing.assert_close(loss.terms["targets"], torch.stack(by_hand).mean().detach())


class Says(torch.nn.Module):
    """A model whose numbers are given."""

    def __init__(self, model, raw):
        super().__init__()
        self.model, self.raw = model, raw

    def forward(self, batch, **_):
        return {**self.model(batch, compute=("node_logits", "edge_logits")), "raw": self.raw}


def test_a_batch_without_any_label_has_no_target_loss():
    model = model_of()
    loss = total(task_of(model), model, labelled([[float("nan")], [float("nan")]]))
    assert loss.terms["targets"] == 0
    assert loss.total.isfinite()


def test_logits_far_apart_have_exact_sums():
    logits = torch.tensor([[500.0, 499.0, -500.0, -501.0, -500.0]], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = feature_log_sums(logits, (2, 3))
    expected = torch.stack([torch.logsumexp(part, 1) for part in logits.split([2, 3], 1)], 1)
    torch.testing.assert_close(found, expected)
    by, other = (torch.autograd.grad(sums.sum(), logits)[0] for sums in (found, expected))
    torch.testing.assert_close(by, other)


def test_rows_of_weight_zero_name_no_features():
    logits, features = torch.randn(4, 5), torch.tensor([[0, 1], [1, 2], [1, 0], [0, 0]])
    weight = torch.tensor([1.0, 0.0, 1.0, 0.0])
    found = feature_loss_sum(logits, features, (2, 3), weight)
    each = [feature_loss_sum(logits[[i]], features[[i]], (2, 3), torch.ones(1)) for i in (0, 2)]
    torch.testing.assert_close(found, sum(each))


def test_directions_are_learnt_of_molecules_seen_in_3d_only():
    model = model_of(denoising=True)
    only = CorruptionConfig(masking=(0.0, 1.0, 0.0))
    batch = labelled([[0.0], [1.0]])
    loss = total(task_of(model, only), model, batch)
    assert 0 < float(loss.terms["directions"]) < 2
    both = CorruptionConfig(masking=(0.0, 0.0, 1.0))
    assert total(task_of(model, both), model, batch).terms["directions"] == 0
    shares = CorruptionConfig().shares
    task = GPSPlusPlusTask(model.config)
    assert float(task.normalisers(batch)["directions"]) == pytest.approx(
        shares[1] * batch.num_atoms
    )
    flat = replace(batch, has_positions=torch.tensor([True, False]))
    atoms = int(batch.graph_ptr[1])
    assert float(task.normalisers(flat)["directions"]) == pytest.approx(shares[1] * atoms)


@pytest.mark.parametrize("kind", ["l1", "mse", "huber"])
def test_regression_losses(kind):
    model = model_of((Target("gap", std=2.0),))
    config = LossConfig(regression=kind, node_weight=0.0, edge_weight=0.0, huber_delta=0.5)
    batch = labelled([[4.0], [-3.0], [0.1]])
    loss = total(task_of(model, loss=config), model, batch)
    raw = model(batch, compute=("raw",))["raw"]
    functions = {
        "l1": torch.nn.functional.l1_loss,
        "mse": torch.nn.functional.mse_loss,
        "huber": lambda a, b: torch.nn.functional.huber_loss(a, b, delta=0.5),
    }
    torch.testing.assert_close(loss.total, functions[kind](raw, batch.targets / 2.0))


def test_predictions_are_in_units_and_errors_add_up():
    nan = float("nan")
    model = model_of(MIXED).eval()
    task = task_of(model)
    random = np.random.default_rng(3)
    labels = np.stack(
        [1e4 + random.normal(size=40), random.integers(0, 2, 40), random.integers(0, 3, 40)], 1
    )
    labels[3, 0] = labels[5, 1] = nan
    batches = [labelled(labels[:15].tolist()), labelled(labels[15:].tolist())]
    pieces = [task.metrics(), task.metrics()]
    outputs = [task.predict(model, batch) for batch in batches]
    for metrics, batch, output in zip(pieces, batches, outputs, strict=True):
        metrics.update(batch, output)
    whole = task.metrics()
    whole.load_sums(pieces[0].sums() + pieces[1].sums())
    found = whole.compute()
    raw = torch.cat([output["raw"] for output in outputs]).numpy()
    prediction = torch.cat([output["prediction"] for output in outputs]).numpy()
    np.testing.assert_allclose(prediction[:, 0], raw[:, 0] * 3.0 + 2.0)
    np.testing.assert_allclose(prediction[:, 1], 1 / (1 + np.exp(-raw[:, 1])))
    np.testing.assert_array_equal(prediction[:, 2], raw[:, 2:].argmax(1))
    known = ~np.isnan(labels[:, 0])
    truth = torch.cat([batch.targets[:, 0] for batch in batches]).numpy()[known]
    error = prediction[known, 0] - truth
    assert found["gap_mae"] == pytest.approx(np.abs(error).mean())
    assert found["gap_rmse"] == pytest.approx(np.sqrt((error**2).mean()))
    spread = ((truth - truth.mean()) ** 2).sum()
    assert found["gap_r2"] == pytest.approx(1 - (error**2).sum() / spread, rel=1e-6)
    assert found["kind_accuracy"] == pytest.approx((prediction[:, 2] == labels[:, 2]).mean())
    known = ~np.isnan(labels[:, 1])
    score, truth = raw[known, 1], labels[known, 1] > 0.5
    pairs = score[truth][:, None] - score[~truth][None]
    expected = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert found["toxic_auroc"] == pytest.approx(expected, abs=0.01)
    precision = np.mean([truth[score >= one].mean() for one in score[truth]])
    assert found["toxic_ap"] == pytest.approx(precision, abs=0.01)
    assert found["loss"] > 0
    assert set(found) == set(whole.names)
    # A rank that has scores of its own agrees with those that have none.
    pieces[0].load_sums(pieces[0].sums() + pieces[1].sums())
    assert pieces[0].compute() == found
    alone = task.metrics()
    for batch, output in zip(batches, outputs, strict=True):
        alone.update(batch, output)
    alone.load_sums(alone.sums())
    exact = alone.compute()
    assert exact["toxic_auroc"] == pytest.approx(expected, abs=1e-12)
    assert exact["toxic_ap"] == pytest.approx(precision, abs=1e-12)


def test_scores_of_one_bin_are_told_apart_and_repeats_do_not_count():
    task = task_of(model_of((Target("toxic", "binary"),)))
    labels = [[0.0], [1.0], [0.0], [1.0], [1.0]]
    batch = labelled(labels, weight=[1.0, 1.0, 1.0, 1.0, 0.0])
    raw = 5.0 + 1e-9 * torch.tensor([[1.0], [2.0], [3.0], [3.0], [0.0]], dtype=torch.float64)
    metrics = task.metrics()
    metrics.update(batch, {"raw": raw, "prediction": raw.sigmoid()})
    found = metrics.compute()
    # Of the four pairs two are in order, one is not and one is a tie.
    assert found["toxic_auroc"] == pytest.approx((1.0 + 0.0 + 1.0 + 0.5) / 4)
    assert found["toxic_ap"] == pytest.approx(0.5 * 1 / 2 + 0.5 * 2 / 3)


def test_errors_of_several_modes():
    model = model_of().eval()
    task = task_of(model, modes=("2d", "3d"))
    batch = labelled([[1.0], [2.0]])
    outputs = task.predict(model, batch)
    metrics = task.metrics()
    metrics.update(batch, outputs)
    found = metrics.compute()
    for mode, name in (("2d", "gap_mae"), ("3d", "3d/gap_mae")):
        predicted = model(batch, inputs=observe(batch, mode))["prediction"].detach()
        assert found[name] == pytest.approx(float((predicted - batch.targets).abs().mean()))
    assert found["gap_mae"] != found["3d/gap_mae"]
    assert set(found) == set(metrics.names)
    with pytest.raises(ConfigError, match="modes"):
        task_of(model, modes=("2d", "2d"))


def test_every_mode_has_a_ranking_of_its_own():
    targets = Target("kind", "multiclass", num_classes=3), Target("toxic", "binary")
    task = task_of(model_of(targets), modes=("2d", "3d"))
    found = {}
    for prefix, sign in (("", 1.0), ("3d/", -1.0)):
        raw = torch.tensor([[0, 0, 0, -sign], [0, 0, 0, sign]], dtype=torch.float64)
        found |= {f"{prefix}raw": raw, f"{prefix}prediction": raw[:, 2:]}
    metrics = task.metrics()
    metrics.update(labelled([[0.0, 0.0], [1.0, 1.0]]), found)
    scores = metrics.compute()
    assert (scores["toxic_auroc"], scores["3d/toxic_auroc"]) == (1.0, 0.0)


def test_labels_of_molecules_are_learnt():
    random = np.random.default_rng(0)
    samples = [random_molecule(random, 4 + i % 5) for i in range(24)]
    for sample in samples:
        sample["targets"] = np.array([len(sample["bonds"]) / 5], np.float32)
    batch = collate(samples)
    model = small_model(noisy_nodes=False, noisy_edges=False)
    task = task_of(model, CorruptionConfig())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = task.loss(model, batch, task.normalisers(batch)).total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
