"""Distance bins, initial weights, batches and masks of the shared modules."""

import pytest
import torch

from bevatron.models.common.folding import (
    GatedAttention,
    Linear,
    OuterProductMean,
    PairBias,
    Transition,
    TriangleAttention,
    TriangleMultiplication,
    distance_bins,
)
from bevatron.testing import assert_close


def test_a_distance_is_in_the_bin_that_begins_below_it():
    x = torch.tensor([0.0, 3.25, 3.3, 4.5, 50.0, 50.8, 1e3]).double()
    bins = distance_bins(x[:, None] * torch.tensor([1.0, 0.0, 0.0]).double(), 3.25, 50.75, 39)
    assert bins.shape == (7, 7, 39)
    assert [row.nonzero().flatten().tolist() for row in bins[0]] == [
        *([], [], [0]),  # itself, on the first edge, in the first bin
        *([], [37], [38], [38]),  # on an edge, in the last but one, in the last
    ]
    assert torch.equal(bins, bins.transpose(0, 1))


@pytest.mark.parametrize(
    ("init", "std", "largest"),
    [
        ("lecun", 0.1, 0.2275),
        ("he", 0.1 * 2**0.5, 0.3216),
        ("normal", 0.1, 1.0),
        ("glorot", (2 / 400) ** 0.5, (6 / 400) ** 0.5),
    ],
)
def test_weights_start_with_the_supplements_spread(init, std, largest):
    layer = Linear(100, 300, init=init)
    assert layer.weight.std().item() == pytest.approx(std, rel=0.03)
    assert layer.weight.abs().max() <= largest
    assert not layer.bias.any()


def test_gates_start_open_and_last_layers_at_zero():
    gate, final = Linear(5, 3, init="gating"), Linear(5, 3, init="final")
    assert not gate.weight.any()
    assert torch.equal(gate.bias, torch.ones(3))
    assert not final.weight.any()
    assert not final.bias.any()


def test_layers_start_as_the_supplement_says():
    attention = TriangleAttention(8, 2, 4, starting=True)
    inner = attention.attention
    assert attention.bias.init == PairBias(8, 2).linear.init == "normal"
    assert inner.q.init == inner.k.init == inner.v.init == "glorot"
    assert (inner.gate.init, inner.out.init) == ("gating", "final")
    product = TriangleMultiplication(8, 6, outgoing=True)
    gates = {product.a_gate.init, product.b_gate.init, product.out_gate.init}
    assert (gates, product.out.init) == ({"gating"}, "final")
    transition = Transition(8, gated=False)
    assert (transition.up.init, transition.down.init) == ("he", "final")


def randomised(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return module.double()


MODULES = {
    "out": lambda: TriangleMultiplication(8, 6, outgoing=True),
    "in": lambda: TriangleMultiplication(8, 6, outgoing=False),
    "start": lambda: TriangleAttention(8, 2, 4, starting=True),
    "end": lambda: TriangleAttention(8, 2, 4, starting=False),
    "mean": lambda: OuterProductMean(8, 3, 5),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_batch_is_its_samples_and_padding_changes_no_valid_entry(name):
    module = randomised(MODULES[name]())
    z = torch.randn(2, 3, 7, 7, 8).double()
    valid = torch.arange(7) < 5
    mask = (valid[:, None] & valid).expand(2, 3, 7, 7)
    if name == "mean":
        mask = valid.expand(2, 3, 7, 7)
    batched = module(z, mask)
    changed = z.clone()
    changed[..., 5:, :] = 1e2
    if name != "mean":
        changed[..., 5:, :, :] = 1e2
    again = module(changed, mask)
    for b in range(2):
        for c in range(3):
            assert_close(batched[b, c], module(z[b, c], mask[b, c]))
    rows = 7 if name == "mean" else 5
    assert_close(again[..., :5, :5, :], batched[..., :5, :5, :])
    alone = module(z[..., :rows, :5, :])
    assert_close(batched[..., :5, :5, :], alone)


def test_rows_of_attention_share_the_bias_of_a_pair():
    attention = randomised(GatedAttention(8, 2, 4, norm=False, q_bias=True))
    to_bias = randomised(PairBias(6, 2))
    x, z = torch.randn(3, 5, 8).double(), torch.randn(5, 5, 6).double()
    together = attention(x, to_bias(z))
    for row in range(3):
        assert_close(together[row], attention(x[row : row + 1], to_bias(z))[0])
    assert not torch.allclose(together, attention(x))
