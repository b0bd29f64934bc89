"""The task of AlphaFold2: terms of the loss, what is random in a step, learning, metrics."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from real_chain import crop_of_1ubi

from bevatron.data.padding import pad
from bevatron.data.proteins.chain_samples import ChainSizes
from bevatron.data.proteins.constants import CA
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.drops import Drops
from bevatron.models.alphafold2.fape import backbone_fape, sidechain_fape
from bevatron.models.alphafold2.inputs import reference_inputs
from bevatron.models.alphafold2.losses import FINE_TUNING_WEIGHTS, LossWeights
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.alphafold2.naming import renamed_reference
from bevatron.models.alphafold2.structure_module import StructureModule
from bevatron.models.alphafold2.task import AlphaFold2Task
from bevatron.models.common.folding.metrics import ca_lddt
from bevatron.task import Capturable, Numbered, StepNumbers
from from_the_host import one_hot
from protein_tasks import (
    check_step_can_be_captured,
    check_step_is_a_function_of_its_numbers,
    loss_of,
)

pytest.importorskip("gemmi")

SMALL = AlphaFold2Config.preset("small")
TINY = replace(
    SMALL,
    evoformer=replace(SMALL.evoformer, num_blocks=1),
    structure=replace(SMALL.structure, num_blocks=2),
    aligned_error=True,
)
WEIGHTS = replace(FINE_TUNING_WEIGHTS, tm=0.1)


@pytest.fixture(scope="module")
def batch(shared):
    sizes = ChainSizes(residues=32, msa_rows=5, extra_rows=6, templates=1)
    return crop_of_1ubi(shared, sizes, 3).to("cpu", torch.float32)


def model_of(seed=0):
    torch.manual_seed(seed)
    model = AlphaFold2(TINY)
    for weight in model.parameters():  # the last layers start at zero, which hides all else
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    return model


def task_of(step=0, weights=WEIGHTS):
    task = AlphaFold2Task(3, [weights])
    return task, task.begin_step(StepNumbers(step, 77 + step))


def test_every_term_of_the_published_loss_is_there_and_every_weight_learns(batch):
    task, _ = task_of()
    assert isinstance(task, Numbered)
    model = model_of()
    found = loss_of(task, model, batch)
    assert set(found.terms) == {
        "fape", "supervised_chi", "distogram", "masked_msa", "plddt", "experimentally_resolved",
        "violation", "tm",
    }  # fmt: skip
    assert all(torch.isfinite(term) for term in found.terms.values())
    assert float(sum(found.terms.values())) == pytest.approx(float(found.total.detach()), rel=1e-5)
    found.total.backward()
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    # Without templates nothing of them is read.
    assert all(name.startswith("template") for name in without), without


def test_the_passes_of_a_step_are_uniform_over_steps():
    task = AlphaFold2Task(4)
    counts = np.bincount([task.begin_step(StepNumbers(0, s))["cycles"] for s in range(2000)])
    assert counts[0] == 0
    np.testing.assert_allclose(counts[1:] / 2000, 0.25, atol=0.04)


def test_a_step_is_a_function_of_its_numbers(batch):
    check_step_is_a_function_of_its_numbers(task_of, model_of(), batch)


def test_a_repeated_sample_counts_nothing(batch):
    task, _ = task_of()
    assert loss_of(task, model_of(), replace(batch, weight=torch.zeros(()))).total == 0


def test_padding_does_not_change_the_loss(batch):
    task, _ = task_of()
    model = model_of().eval()
    sizes = {**batch.sizes, "tokens": 33, "rows": 6, "extra_rows": 9}
    larger = pad(batch, batch.padding.rounded(batch.padding.size_of(sizes)))
    assert larger.aatype.shape == (40,)
    expected, found = (loss_of(task, model, each) for each in (batch, larger))
    for name, term in expected.terms.items():
        torch.testing.assert_close(found.terms[name], term, rtol=2e-4, atol=2e-4, msg=name)


def test_stages_have_weights_of_their_own(batch):
    task = AlphaFold2Task(1, [LossWeights(), WEIGHTS])
    model = model_of()
    task.begin_step(StepNumbers(0, 3, stage=0))
    assert "violation" not in loss_of(task, model, batch).terms
    task.begin_step(StepNumbers(9, 3, stage=1))
    assert "violation" in loss_of(task, model, batch).terms


@pytest.mark.parametrize("weights", [LossWeights(), WEIGHTS])
def test_a_step_can_be_captured(batch, weights, monkeypatch):
    monkeypatch.setattr("torch.nn.functional.one_hot", one_hot)
    task, _ = task_of(1, weights)
    assert isinstance(task, Capturable)
    assert task.constants() == weights
    assert task.cycles > 1
    check_step_can_be_captured(task, model_of(), batch)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_16_bits_are_near_float32(batch, half):
    model = model_of().eval()
    found = []
    for activations in (None, half):
        task = AlphaFold2Task(1, activations=activations)
        found.append(loss_of(task, model, batch))
    assert found[1].total.dtype == torch.float32
    assert float(found[1].total) == pytest.approx(float(found[0].total), rel=0.05)
    assert not torch.equal(found[0].total, found[1].total)


def test_positions_of_a_chain_are_learnt_from_free_representations(batch):
    """Frames and atoms of the structure module reach the chain they are compared with."""
    torch.manual_seed(0)
    given = batch.tensors()
    reference = reference_inputs(given, 0) | {"use_clamped_fape": torch.zeros(())}
    module = StructureModule(SMALL.c_s, SMALL.c_z, SMALL.structure)
    length = len(batch.aatype)
    single = torch.randn(length, SMALL.c_s, requires_grad=True)
    pair = torch.randn(length, length, SMALL.c_z, requires_grad=True)
    optimiser = torch.optim.Adam([single, pair, *module.parameters()], 2e-3)
    errors = []
    for _ in range(80):
        found = module(single, pair, reference["aatype"], reference["seq_mask"] > 0, Drops(None))
        last = found["positions"][-1]
        renamed = renamed_reference(last, reference)
        backbone = backbone_fape(found["frames"], reference)
        atoms = sidechain_fape(found["sidechain_frames"][-1], last, renamed, reference)
        optimiser.zero_grad()
        (backbone + atoms).backward()
        optimiser.step()
        errors.append((backbone.item(), atoms.item()))
    known = given["all_atom_mask"].bool()[:, CA]
    assert ca_lddt(last[:, CA], given["all_atom_positions"][:, CA], known) > 0.6
    assert all(after < 0.7 * before for before, after in zip(errors[0], errors[-1], strict=True))


def test_metrics_of_the_truth_are_best_and_add_up(batch):
    task = AlphaFold2Task(1)
    outputs = task.predict(model_of(), batch)
    metrics = task.metrics()
    metrics.update(batch, outputs)
    found = metrics.compute()
    assert 0 <= found["lddt_ca"] < 0.9
    assert found["loss"] == pytest.approx(
        sum(v for k, v in found.items() if k.startswith("loss_")), rel=1e-5
    )
    both = task.metrics()
    both.update(batch, {**outputs, "final_atom_positions": batch.all_atom_positions})
    best = both.compute()
    assert best["lddt_ca"] == best["lddt"] == 1.0
    assert 0 <= found["lddt"] < 0.9
    assert best["tm_score"] == pytest.approx(1.0, abs=1e-6)
    assert best["rmsd"] == pytest.approx(0.0, abs=1e-4)
    assert found["tm_score"] < 0.5
    assert found["rmsd"] > 3
    whole = 100.0 * torch.arange(len(batch.aatype))[:, None, None]
    apart = task.metrics()  # residues keep their own distances, which do not count
    apart.update(batch, {**outputs, "final_atom_positions": batch.all_atom_positions + whole})
    assert apart.compute()["lddt"] == 0.0
    unseen = batch.all_atom_mask.clone()
    unseen[:5] = False
    moved = batch.all_atom_positions.clone()
    moved[:5] += 50.0
    resolved = task.metrics()
    resolved.update(
        replace(batch, all_atom_mask=unseen), {**outputs, "final_atom_positions": moved}
    )
    assert resolved.compute()["lddt_ca"] == resolved.compute()["lddt"] == 1.0
    assert resolved.compute()["tm_score"] == pytest.approx(1.0, abs=1e-6)
    assert resolved.compute()["rmsd"] == pytest.approx(0.0, abs=1e-4)
    both.load_sums(both.sums() + metrics.sums())
    assert both.compute()["lddt_ca"] == pytest.approx((1 + found["lddt_ca"]) / 2)
    ignored = task.metrics()
    ignored.update(replace(batch, weight=torch.zeros(())), outputs)
    assert ignored.compute() == {}
