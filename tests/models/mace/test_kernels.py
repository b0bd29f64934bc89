"""MACE with the Triton kernels of its maps by element: the numbers of the references."""

import pytest
import torch

from bevatron import kernels
from bevatron.testing import assert_close

BY_ELEMENT = {"symmetric_contraction": "triton", "indexed_linear": "triton"}


def gradients(model, batch):
    """Energy, forces, and the gradients of a loss on both by all weights."""
    found = model(batch, create_graph=True)
    loss = found["energy"].square().sum() + found["forces"].square().sum()
    by_weights = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [found["energy"], found["forces"], *by_weights]


def launched(model, batch, **chosen):
    """Compare kernels with the references; return what ran."""
    with kernels.use("reference"):
        expected = gradients(model, batch)
    kernels.reset_launches()
    with kernels.use("reference", **chosen):
        actual = gradients(model, batch)
    for got, want in zip(actual, expected, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert_close(got, want, 1e-11)
    return kernels.launches()


@pytest.mark.parametrize("first", ["residual", "agnostic"])
def test_forces_and_gradients_of_a_loss_on_them_are_those_of_the_references(
    first, structures, tiny
):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny(interaction_first=first).to(device)
    batch = structures.batch(structures.molecule(), structures.crystal()).to(device)
    counts = launched(model, batch, **BY_ELEMENT)
    assert all(counts[name, "triton"] > 0 for name in BY_ELEMENT)


def test_a_batch_without_edges_gives_every_parameter_a_gradient(structures, tiny):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny(radial_mlp=(8, 6, 4)).to(device)
    batch = structures.batch(structures.sample([8], [0, 0, 0])).to(device)
    with kernels.use("reference", radial_network="triton"):
        outputs = model(batch, create_graph=True)
        (outputs["energy"].sum() + outputs["forces"].square().sum()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("changes", [{}, {"apply_cutoff": False}, {"interaction": "density"}])
def test_hidden_layers_on_chip_give_the_numbers_of_the_references(changes, structures, tiny):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny(radial_mlp=(8, 6, 4), **changes).to(device)
    batch = structures.batch(structures.molecule(), structures.crystal()).to(device)
    counts = launched(model, batch, radial_network="triton")
    assert (counts.get(("radial_network", "triton"), 0) > 0) == ("apply_cutoff" not in changes)


def test_forces_and_gradients_repeat_bit_for_bit(structures, tiny):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny().to(device, torch.float32)
    batch = structures.batch(structures.molecule(), structures.crystal())
    batch = batch.to(device, torch.float32)
    with kernels.use("triton"):
        first, again = gradients(model, batch), gradients(model, batch)
    for got, want in zip(again, first, strict=True):
        assert (got is None) == (want is None)
        assert want is None or torch.equal(got, want)
