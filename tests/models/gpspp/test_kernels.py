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


WIDTHS = {
    1: {"num_heads": 8, "node_width": 8, "edge_width": 4, "global_width": 2},
    4: {"num_heads": 4, "node_width": 16},
    8: {"num_heads": 3, "node_width": 24, "edge_width": 12},
    12: {"num_heads": 2, "node_width": 24},
    32: {"num_heads": 1, "node_width": 32, "edge_width": 20},
    64: {"num_heads": 2, "node_width": 128, "edge_width": 64, "global_width": 32},
    128: {"num_heads": 1, "node_width": 128, "expansion": 4},
}
"""Small models by the size of a head."""


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((size, torch.float32) for size in WIDTHS),
        *((size, torch.bfloat16) for size in (8, 1, 64, 12)),
        *((size, torch.float16) for size in (8, 4, 128)),
    ],
)
def test_small_models_of_any_width_compute_what_references_do_in_every_type(size, dtype):
    model = small_model(**WIDTHS[size]).train().to(DEVICE, torch.float32)
    batch = random_batch([3, 18, 5, 33, 1, 16], seed=size).to(DEVICE, torch.float32)
    task = GPSPlusPlusTask(model.config)
    normalisers = {name: count.to(DEVICE) for name, count in task.normalisers(batch).items()}

    def run(implementation, narrow):
        torch.manual_seed(3)
        with kernels.use(implementation), torch.autocast(DEVICE, dtype, enabled=narrow):
            loss = task.loss(model, batch, normalisers).total
        wanted = list(model.parameters())
        found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        return loss.detach().double(), torch.cat([g.flatten().double() for g in found])

    def off(found):
        return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    exact, narrow = run("reference", narrow=False), dtype != torch.float32
    errors, allowed = off(run("triton", narrow)), [2e-5, 2e-4]
    if narrow:  # not much further from float32 than references in the same type
        allowed = [2 * error + 2e-3 for error in off(run("reference", narrow))]
    assert errors[0] < allowed[0]
    assert errors[1] < allowed[1]
