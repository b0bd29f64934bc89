"""Gradients of captured work: in one flat buffer, bucket by bucket as they become ready."""

import torch

from bevatron.parallel import data_parallel
from bevatron.parallel.mesh import Mesh
from bevatron.train.capture.gradients import GradientBuckets
from bevatron.train.optim import FusedAdamEMA


def test_buckets_are_noted_as_they_are_completed_and_gradients_add_up(monkeypatch):
    """The layer that is defined last is the first; one has no part and one is used twice."""
    monkeypatch.setattr(data_parallel, "BUCKET_BYTES", 100)
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4)).double()
    optimizer = FusedAdamEMA(layers.parameters())
    buckets = GradientBuckets(optimizer, Mesh())
    expected = None
    for x in torch.randn(2, 3, 4, dtype=torch.float64):
        loss = layers[1](layers[0](layers[0](layers[3](x).tanh()).tanh())).square().sum()
        found = torch.autograd.grad(
            loss, [*layers.parameters()], retain_graph=True, materialize_grads=True,
            allow_unused=True,
        )  # fmt: skip
        expected = (
            found if expected is None else [a + b for a, b in zip(found, expected, strict=True)]
        )
        buckets.differentiate(loss)
    assert buckets._noted == [1, 0, 4, 2, 3]
    for one, other in zip(optimizer.gradients, expected, strict=True):
        assert torch.equal(one, other)
    assert not layers[0].weight._backward_hooks
