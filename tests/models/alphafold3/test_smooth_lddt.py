"""Smooth lDDT of copies: which pairs count, leading axes, precision."""

import importlib

import numpy as np
import pytest
import torch

import smooth_lddt_formula
from bevatron.models.alphafold3.losses.smooth_lddt import smooth_lddt
from bevatron.testing import assert_close

complexes = importlib.import_module("complexes")


def all_pairs(predicted, truth, resolved, nucleic):
    radius = torch.where(nucleic, 30.0, 15.0) * resolved
    return smooth_lddt_formula.all_pairs(predicted, truth, radius)


def random_case(atoms, copies=2, batch=(), seed=0):
    random = np.random.default_rng(seed)
    truth = torch.from_numpy(random.normal(size=(*batch, atoms, 3))) * 9
    shape = (*batch, copies, atoms, 3)
    predicted = truth[..., None, :, :] + torch.from_numpy(random.normal(size=shape)) * 2
    resolved = torch.from_numpy(random.random((*batch, atoms)) < 0.8)
    nucleic = torch.from_numpy(random.random((*batch, atoms)) < 0.4)
    return predicted.requires_grad_(), truth, resolved, nucleic


def test_leading_axes_are_separate_structures():
    case = random_case(11, copies=3, batch=(2, 2))
    tiled = smooth_lddt(*case)
    assert tiled.shape == (2, 2, 3)
    assert_close(tiled.detach(), all_pairs(*case).detach(), 1e-12)


@pytest.mark.shared
def test_pairs_that_count_are_those_of_the_reference(shared):
    """Of exact predictions each pair scores the same, so the sum of a row counts its pairs."""
    golden = complexes.reference(shared, "losses")
    batch = complexes.loss_batch(golden)
    truth, resolved = batch["position"], batch["resolved"]
    nucleic = complexes.tensor(golden["in__is_dna"] + golden["in__is_rna"]) > 0
    mask = complexes.tensor(golden["out__lddt_mask"]).double()
    moved = truth[None].repeat(len(truth), 1, 1)
    moved[torch.arange(len(truth)), torch.arange(len(truth))] += 1e4
    lost = smooth_lddt(truth[None], truth, resolved, nucleic) - smooth_lddt(
        moved, truth, resolved, nucleic
    )
    perfect = sum(torch.sigmoid(torch.tensor(t, dtype=torch.float64)) for t in (0.5, 1, 2, 4)) / 4
    of_atom = mask.sum(0) + mask.sum(1)
    assert_close(lost, of_atom * perfect / mask.sum(), 1e-9)


def test_atoms_in_one_place_have_a_finite_gradient():
    truth = torch.zeros(4, 3)
    truth[1:, 0] = torch.arange(3)
    predicted = torch.zeros(1, 4, 3, requires_grad=True)
    yes = torch.ones(4, dtype=torch.bool)
    smooth_lddt(predicted, truth, yes, ~yes).sum().backward()
    assert predicted.grad.isfinite().all()


def test_single_precision_is_close_far_from_the_origin():
    predicted, truth, resolved, nucleic = random_case(60)
    expected = smooth_lddt(predicted, truth, resolved, nucleic)
    (gradient,) = torch.autograd.grad(expected.sum(), predicted)
    shift = torch.tensor([128.0, -64.0, 256.0])
    narrow = (predicted.detach().float() + shift).requires_grad_()
    found = smooth_lddt(narrow, truth.float() - shift, resolved, nucleic)
    found.sum().backward()
    assert_close(found.double().detach(), expected.detach(), 2e-5)
    assert_close(narrow.grad.double(), gradient, 3e-4)
