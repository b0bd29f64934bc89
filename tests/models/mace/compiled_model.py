"""Compares a compiled with an eager loss on forces; run by a test, in a process of its own."""

import dataclasses

import numpy as np
import torch
import torch._dynamo

from bevatron import kernels
from bevatron.data.neighbours import add_neighbours
from bevatron.data.samples import collate_structures, unlabelled_structure
from bevatron.models.mace import MACE, MaceConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def molecule():
    """Water, its elements known to be the model's."""
    positions = np.array([[0.0, 0.0, 0.1], [0.8, 0.0, -0.5], [-0.7, 0.1, -0.5]])
    sample = add_neighbours(unlabelled_structure(np.array([8, 1, 1]), positions), 3.0)
    batch = collate_structures([sample], np.arange(1), [1.0]).to(DEVICE, torch.float64)
    # Whoever differentiates a compiled model by positions says so outside of it.
    positions = batch.positions.requires_grad_()
    return dataclasses.replace(batch, positions=positions, checked=True)


if __name__ == "__main__":
    torch._dynamo.config.trace_autograd_ops = True
    torch.manual_seed(0)
    config = MaceConfig(
        num_channels=2,
        max_L=1,
        l_max=1,
        correlation=2,
        r_max=3.0,
        num_bessel=3,
        radial_mlp=(4, 4, 4),
        readout_width=2,
        atomic_numbers=(1, 8),
        atomic_energies=((0.0, 0.0),),
    )
    model = MACE(config, torch.float64).to(DEVICE)
    batch, weights = molecule(), list(model.parameters())

    def loss():
        found = model(batch, create_graph=True)
        return found["energy"].square().sum() + found["forces"].square().sum()

    def gradients(function):
        value = function()
        return [value, *torch.autograd.grad(value, weights, allow_unused=True)]

    with kernels.use("triton"):
        expected = gradients(loss)
        found = gradients(torch.compile(loss, backend="aot_eager", fullgraph=True))
    for got, want in zip(found, expected, strict=True):
        assert (got is None) == (want is None)
        assert want is None or torch.equal(got, want)
