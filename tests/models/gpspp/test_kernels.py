"""A whole training loss by kernels, interpreted or compiled, equals that by references."""

import pytest
import torch
from random_molecules import random_batch, small_model

from bevatron import kernels
from bevatron.data.padding import BatchShape, pad_molecules
from bevatron.models.gpspp import GPSPlusPlusTask
from bevatron.testing import assert_close

pytest.importorskip("triton", reason="the kernels need the package triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
USED = {
    *("bond_norm_gelu", "gaussian_basis", "linear", "molecule_attention", "neighbour_sums"),
    *("norm_gelu", "residual_norm", "scaled_residual", "segment_sum"),
}


def test_loss_and_gradients_are_those_of_the_references_dropout_and_padding_included():
    model = small_model().train().to(DEVICE, torch.float32)
    batch = random_batch([3, 18, 5]).to("cpu", torch.float32)
    shape = BatchShape(batch.num_edges + 6, batch.num_atoms + 7, 5, batch.num_pairs + 60)
    task = GPSPlusPlusTask(model.config)
    normalisers = {name: count.to(DEVICE) for name, count in task.normalisers(batch).items()}
    padded = pad_molecules(batch, shape).to(DEVICE)
    found = {}
    for implementation in ("reference", "triton"):
        kernels.reset_launches()
        torch.manual_seed(3)
        with kernels.use(implementation):
            loss = task.loss(model, padded, normalisers).total
            wanted = list(model.parameters())
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        found[implementation] = [loss, torch.cat([g.flatten() for g in gradients])]
    assert {op for op, kind in kernels.launches() if kind == "triton"} >= USED
    for ours, expected, name in zip(*reversed(found.values()), ("loss", "gradient"), strict=True):
        assert_close(ours, expected, 2e-5, name)
