"""The task of AlphaFold3 on a real complex: its loss, what is random in it, padding, learning."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from complex_task import TINY, crop_of_1pfe, model_of, task_of
from torch.utils._python_dispatch import TorchDispatchMode

from bevatron.data.padding import pad
from bevatron.errors import ConfigError
from bevatron.models.alphafold3.losses import CONFIDENCES, STAGES, LossWeights
from bevatron.models.alphafold3.model import AlphaFold3
from bevatron.models.alphafold3.task import AlphaFold3Task, StepOptions
from bevatron.models.common.folding import Checkpointing
from bevatron.models.common.folding.checkpointing import automatic
from bevatron.models.common.folding.normal import SeededNormal
from bevatron.task import Capturable, Numbered, StepNumbers
from from_the_host import one_hot
from protein_tasks import (
    check_step_can_be_captured,
    check_step_is_a_function_of_its_numbers,
    loss_of,
)

pytest.importorskip("gemmi")


@pytest.fixture(scope="module")
def batch(shared, tmp_path_factory):
    return crop_of_1pfe(shared, tmp_path_factory.mktemp("components") / "index")


def test_every_term_of_the_published_loss_is_there_and_every_weight_learns(batch):
    task, chosen = task_of()
    assert isinstance(task, Numbered)
    assert isinstance(task, Capturable)
    assert set(chosen) == {"cycles", "confidence"}
    model = model_of()
    found = loss_of(task, model, batch)
    expected = {"mse", "bond", "smooth_lddt", "distogram", "plddt", "pde", "resolved", "pae"}
    assert set(found.terms) == expected
    assert all(torch.isfinite(term) for term in found.terms.values())
    assert float(sum(found.terms.values())) == pytest.approx(float(found.total))
    found.total.backward()
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    # A constant in front of a softmax over keys has no gradient; nothing here is charged.
    assert all(
        "bias.norm.bias" in name or "template" in name or "charge" in name for name in without
    ), without


def test_a_step_is_a_function_of_its_numbers(batch):
    check_step_is_a_function_of_its_numbers(task_of, model_of(), batch)


def test_steps_have_one_to_the_most_passes_through_the_trunk(batch, monkeypatch):
    task, model, found = AlphaFold3Task(4, [StepOptions(copies=1)]), model_of(), []
    drawn = [task.begin_step(StepNumbers(step, 77 + step))["cycles"] for step in range(40)]
    assert set(drawn) == {1, 2, 3, 4}
    run = model.trunk.forward

    def trunk(batch, s_inputs, cycles, seed):
        found.append(cycles)
        return run(batch, s_inputs, cycles, seed)

    monkeypatch.setattr(model.trunk, "forward", trunk)
    loss_of(task, model, batch)
    task.predict(model, batch)
    assert found == [drawn[-1], 4]


def test_stages_have_copies_and_terms_of_their_own(batch):
    model, copies = model_of(), []
    model.diffusion.register_forward_pre_hook(lambda _, given: copies.append(len(given[0])))
    loss = LossWeights(bond=1.0, smooth_lddt=0.0)
    task = AlphaFold3Task(
        1,
        [StepOptions(copies=2, confidence_every=0), StepOptions(3, confidence_every=0, loss=loss)],
    )
    found = {}
    for stage in range(3):  # of more stages than there are options the last ones count
        task.begin_step(StepNumbers(0, 77, stage))
        found[stage] = set(loss_of(task, model, batch).terms), task.constants()
    assert found[0] == ({"mse", "smooth_lddt", "distogram"}, 0)
    assert found[1] == found[2] == ({"mse", "bond", "distogram"}, 1)
    assert copies == [2, 3, 3]


def test_the_last_stage_trains_the_confidence_head_alone(batch):
    loss = replace(STAGES["fine_tuning_3"], confidence=1.0)
    task = AlphaFold3Task(2, [StepOptions(copies=2, loss=loss)])
    task.begin_step(StepNumbers(0, 77))
    model = model_of()
    model.diffusion.decoder.register_forward_pre_hook(
        lambda _, given: pytest.fail("copies are denoised") if len(given[0]) == 2 else None
    )
    kept = []
    model.trunk.register_forward_hook(lambda *given: kept.append(given[-1][1].requires_grad))
    found = loss_of(task, model, batch)
    assert set(found.terms) == set(CONFIDENCES)
    found.total.backward()
    trained = {n.partition(".")[0] for n, p in model.named_parameters() if p.grad is not None}
    assert trained == {"confidence"}
    # The head has the gradients that it has where all else is trained.
    gradients = {n: p.grad.clone() for n, p in model.confidence.named_parameters()}
    model.zero_grad()
    whole = replace(loss, diffusion=4.0)
    task = AlphaFold3Task(2, [StepOptions(copies=3, loss=whole)])
    task.begin_step(StepNumbers(0, 77))
    loss_of(task, model, batch).total.backward()
    for name, weight in model.confidence.named_parameters():
        assert torch.equal(weight.grad, gradients[name]), name
    assert kept == [False, True]
    with pytest.raises(ConfigError, match="confidence_every: expected 1 in a stage"):
        StepOptions(confidence_every=2, loss=loss)


def test_losses_and_measures_compare_with_the_truth_whose_copies_and_atoms_were_exchanged(
    batch, monkeypatch
):
    model, (task, _) = model_of(), task_of()

    def terms(batch, order):
        def exchanged(structure, given):
            return given["position"][order], given["resolved"][order]

        monkeypatch.setattr("bevatron.models.alphafold3.task.permute_truth", exchanged)
        predicted = task.predict(model, batch)
        assert torch.equal(predicted["position"], batch.position[order])
        assert torch.equal(predicted["truth_resolved"], batch.resolved[order])
        return loss_of(task, model, batch).terms

    atoms = torch.arange(len(batch.atom_mask))
    found = terms(batch, atoms.flip(0))
    turned = replace(batch, position=batch.position.flip(0), resolved=batch.resolved.flip(0))
    expected, others = terms(turned, atoms), terms(batch, atoms)
    for name, term in expected.items():
        assert torch.equal(found[name], term), name
        assert name == "resolved" or not torch.equal(found[name], others[name]), name


def test_blocks_that_are_computed_again_give_the_same_bits(batch):
    found = {}
    for kind in ("none", "pair", "all", "segments", "paper"):
        model, (task, _) = model_of(), task_of()
        for name in automatic(model):
            model.get_submodule(name).checkpointing = Checkpointing(kind, 2)
        loss_of(task, model, batch).total.backward()
        found[kind] = [p.grad for p in model.parameters() if p.grad is not None]
    for kind, gradients in found.items():
        for one, other in zip(gradients, found["none"], strict=True):
            assert torch.equal(one, other), kind


def test_the_backward_pass_holds_no_gradient_of_pairs_in_front_of_the_confidences(batch):
    """Biases of the diffusion are through by then, the distogram has not begun."""
    model, (task, _), order = model_of(), task_of(), []
    wanted = {
        name: model.get_parameter(name)
        for name in (
            "diffusion.transformer.blocks.0.attention.bias.linear.weight",
            "confidence.pde.weight",
            "confidence.distance.weight",
            "distogram.linear.weight",
        )
    }
    for name, parameter in wanted.items():
        parameter.register_hook(lambda _, name=name: order.append(name))
    loss_of(task, model, batch).total.backward()
    assert order == [*wanted]


class Roundings(TorchDispatchMode):
    """Counts matrices that are made of another type."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.count += function is torch.ops.aten._to_copy.default and made.ndim == 2
        self.count += function is torch.ops.aten._foreach_copy_.default  # of weights side by side
        return made


def test_a_sampling_rounds_its_weights_once_and_gives_the_same_bits(batch, monkeypatch):
    model, given = model_of(), batch.tensors()
    with torch.no_grad():
        trunk = model(given, 1, None, torch.bfloat16)
        shared = model.condition(given, trunk)

    def sample():
        with Roundings() as roundings:
            structure = model.sample(given, shared, 1, 4, SeededNormal(torch.tensor(3)))
        return structure, roundings.count

    structure, count = sample()
    monkeypatch.setattr("bevatron.models.alphafold3.model.standing_weights", nullcontext)
    expected, without = sample()
    assert torch.equal(structure, expected)
    assert count < without


def test_a_step_can_be_captured(batch, monkeypatch):
    monkeypatch.setattr("torch.nn.functional.one_hot", one_hot)
    task, _ = task_of(copies=2)
    check_step_can_be_captured(task, model_of(), batch)


def test_padding_changes_neither_loss_nor_gradients_of_a_training_step(batch):
    model, (task, _) = model_of(), task_of()
    assert model.training
    padded = pad(batch, batch.padding.rounded(batch.padding.size_of(batch.sizes)))
    assert padded.sizes["tokens"] > batch.sizes["tokens"]
    results = []
    for each in (batch, padded):
        model.zero_grad()
        loss = loss_of(task, model, each)
        loss.total.backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((loss, grads))
    (one, one_grad), (two, two_grad) = results
    for name, term in one.terms.items():
        assert float(two.terms[name]) == pytest.approx(float(term), rel=1e-9), name
    assert float((one_grad - two_grad).abs().max()) < 1e-8 * float(one_grad.abs().max())


def test_a_sample_that_only_fills_up_a_rank_counts_nowhere(batch):
    model, (task, _) = model_of(), task_of()
    absent = replace(batch, weight=torch.zeros_like(batch.weight))
    loss = task.loss(model, absent, {"structures": torch.ones((), dtype=torch.float64)})
    assert float(loss.total) == 0.0
    metrics = task.metrics()
    metrics.update(absent, task.predict(model, absent))
    assert not metrics.compute()


def test_metrics_of_the_truth_are_perfect(batch):
    task, _ = task_of()
    outputs = task.predict(model_of(), batch)
    metrics = task.metrics()
    truth = {**outputs, "rollout": outputs["position"][None]}
    metrics.update(batch, truth)
    found = metrics.compute()
    assert found["lddt"] == 1.0
    assert found["lddt_dna"] == found["lddt_interface"] == 1.0
    other = task.metrics()
    other.load_sums(metrics.sums() * 2)
    assert other.compute() == pytest.approx(found)


def test_the_distogram_and_the_structure_are_learnt(batch):
    torch.manual_seed(0)
    model = AlphaFold3(TINY).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(24):
        task, _ = task_of(step, confidence_every=0, copies=4)
        optimizer.zero_grad()
        loss = loss_of(task, model, batch)
        loss.total.backward()
        optimizer.step()
        losses.append({name: float(term) for name, term in loss.terms.items()})
    for name in ("distogram", "smooth_lddt", "mse"):
        start, end = (np.mean([each[name] for each in part]) for part in (losses[:6], losses[-6:]))
        assert end < 0.9 * start, (name, start, end)


def test_steps_without_the_confidence_head_leave_its_terms_out(batch):
    task, chosen = task_of(1, confidence_every=2)
    assert not chosen["confidence"]
    found = loss_of(task, model_of(), batch)
    assert set(found.terms) == {"mse", "bond", "smooth_lddt", "distogram"}
