"""`FusedAdamEMA` beside torch's optimisers."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from bevatron.kernels import use
from bevatron.train import fused_optim
from bevatron.train.capture.transfers import NumberFeed
from bevatron.train.memory_plan import LiveBytes
from bevatron.train.optim import AveragedWeights, FusedAdamEMA

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Forked(nn.Module):
    """A model one of whose branches is not always reached."""

    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.other = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x, branch):
        hidden = self.trunk(x).tanh()
        return self.one(hidden) if branch else self.other(hidden)


def models():
    torch.manual_seed(0)
    model = Forked().double().to(DEVICE)
    return model, copy.deepcopy(model)


def backward(model, seed, branch=True):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64).to(DEVICE)
    model(x, branch).square().sum().backward()


def same(one, other, tolerance=1e-12):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def test_a_warm_up_that_fails_stops_no_later_step(monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model, peer = models()
    ours, other = FusedAdamEMA(model.parameters()), FusedAdamEMA(peer.parameters())
    for optimizer in (ours, other):
        optimizer.stops = True
    with monkeypatch.context() as patch:
        patch.setattr(fused_optim, "fused_adam_ema", fails)
        with pytest.raises(torch.OutOfMemoryError):
            ours.warm_up()
    for one, optimizer in ((model, ours), (peer, other)):
        backward(one, 1)
        optimizer.step()
    assert not ours.skipped
    same(model, peer)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_weights_and_state_are_those_of_torch_also_without_gradient(amsgrad, decoupled):
    model, peer = models()
    numbers = {"lr": 0.02, "weight_decay": 0.1, "amsgrad": amsgrad}
    groups = [{"params": m.parameters()} for m in (model.trunk, model.one, model.other)]
    groups[1] |= {"lr": 0.05}
    ours = FusedAdamEMA(groups, **numbers, decoupled=decoupled, clip=0.7)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = [{"params": m.parameters()} for m in (peer.trunk, peer.one, peer.other)]
    theirs[1] |= {"lr": 0.05}
    torchs = kind(theirs, **numbers)
    for step in range(6):
        torchs.zero_grad()
        for one in (model, peer):
            backward(one, step, branch=step % 3 != 2)
        norm = nn.utils.clip_grad_norm_(peer.parameters(), 0.7)
        ours.step()
        torchs.step()
        assert float(ours.grad_norm) == pytest.approx(float(norm), rel=1e-12)
    same(model, peer)
    found, expected = ours.state_dict(), torchs.state_dict()
    for i, state in expected["state"].items():
        assert set(state) == set(found["state"][i]) - {"average"}
        for name, value in state.items():
            assert torch.allclose(found["state"][i][name].cpu(), value.cpu(), rtol=1e-6), name
    assert float(found["state"][4]["step"]) == 2.0  # the branch reached in two steps of six


def test_a_state_of_torch_is_taken_up_and_one_of_ours_goes_on_alike():
    model, peer = models()
    torchs = torch.optim.AdamW(peer.parameters(), lr=0.02)
    backward(peer, 0)
    backward(peer, 0, branch=False)
    torchs.step()
    model.load_state_dict(peer.state_dict())
    ours = FusedAdamEMA(model.parameters(), lr=0.02)
    ours.load_state_dict(torchs.state_dict())
    again = copy.deepcopy(model)
    for step in (1, 2):
        torchs.zero_grad()
        for one in (model, peer):
            backward(one, step)
        torchs.step()
        ours.step()
        same(model, peer)
    again.load_state_dict(model.state_dict())
    resumed = FusedAdamEMA(again.parameters(), lr=0.02)
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    for optimizer, one in ((ours, model), (resumed, again)):
        backward(one, 3)
        optimizer.step()
    for a, b in zip(ours.averages, resumed.averages, strict=True):
        assert torch.equal(a, b)
    same(model, again, 0.0)


def test_numbers_are_sent_while_memory_is_planned_without_any():
    with FakeTensorMode():
        feed = NumberFeed(2, torch.device("cpu"))
        feed.send((1.0, float("inf")))
    assert feed.values.shape == (2,)


def test_rates_follow_a_schedule_and_only_those_that_change_apart_are_sent_one_by_one(monkeypatch):
    model, peer = models()
    optimizers = []
    for kind, one in ((FusedAdamEMA, model), (torch.optim.AdamW, peer)):
        groups = [{"params": m.parameters()} for m in (one.trunk, one.one, one.other)]
        groups[1]["lr"] = 0.05
        optimizers.append(kind(groups, lr=0.02, weight_decay=0.1))
    sent = []
    send = NumberFeed.send
    monkeypatch.setattr(NumberFeed, "send", lambda f, v: sent.append(len(v)) or send(f, v))
    for step, (share, last) in enumerate([(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (1.0, 0.1)]):
        for one in (model, peer):
            backward(one, step)
            backward(one, step, branch=False)
        for optimizer in optimizers:
            for group, rate in zip(optimizer.param_groups, (0.02, 0.05, 0.02 * last), strict=True):
                group["lr"] = rate * share
            optimizer.step()
        peer.zero_grad()
        same(model, peer)
    assert sent == [3, 18, 3, 18, 3, 3, 18]


def test_an_optimizer_that_is_not_used_any_more_is_freed():
    model, _ = models()
    optimizer = FusedAdamEMA(model.parameters())
    backward(model, 0)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages_follow_their_definition(kind):
    model, _ = models()
    optimizer = FusedAdamEMA(model.parameters(), lr=0.1, average=kind, decay=0.9)
    seen = [[p.detach().clone() for p in model.parameters()]]
    expected = seen[0]
    for step in range(1, 5):
        backward(model, step)
        optimizer.step()
        seen.append([p.detach().clone() for p in model.parameters()])
        decay = min(0.9, (1 + step) / (10 + step)) if kind == "ema" else 1 - 1 / step
        expected = [decay * a + (1 - decay) * w for a, w in zip(expected, seen[-1], strict=True)]
    for found, value in zip(optimizer.averages, expected, strict=True):
        assert torch.allclose(found, value, rtol=1e-12)
    if kind == "swa":
        means = [torch.stack(ws[1:]).mean(0) for ws in zip(*seen, strict=True)]
        for found, value in zip(optimizer.averages, means, strict=True):
            assert torch.allclose(found, value, rtol=1e-12)
    weights = [p.detach().clone() for p in model.parameters()]
    with optimizer.averaged():
        for p, average in zip(model.parameters(), optimizer.averages, strict=True):
            assert torch.equal(p, average)
    for p, before in zip(model.parameters(), weights, strict=True):
        assert torch.equal(p, before)


def test_moved_averages_are_no_peak_of_memory():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with LiveBytes() as live:
        averages = AveragedWeights(model, 0.9)
        optimizer = FusedAdamEMA(model.named_parameters(), average=averages)
    assert optimizer.gradient.nbytes > 2**16
    assert live.peak - live.now < 2**12


def test_gradients_put_elsewhere_count_and_zero_grad_forgets_them():
    model, peer = models()
    ours = FusedAdamEMA(model.parameters(), lr=0.1)
    torchs = torch.optim.AdamW(peer.parameters(), lr=0.1, weight_decay=0.0)
    for one in (model, peer):
        backward(one, 0)
        one.zero_grad(set_to_none=True)
        backward(one, 1)
    ours.step()
    torchs.step()
    same(model, peer)
    backward(model, 2)
    ours.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    ours.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_changes_nothing_and_the_next_step_counts():
    model, peer = models()
    ours = FusedAdamEMA(model.parameters(), lr=0.1)
    torchs = torch.optim.AdamW(peer.parameters(), lr=0.1, weight_decay=0.0)
    backward(model, 0)
    model.trunk.bias.grad[0] = float("nan")
    ours.step()
    assert float(ours.skipped) == 1.0
    same(model, peer)
    for one, optimizer in ((model, ours), (peer, torchs)):
        backward(one, 1)
        optimizer.step()
    assert float(ours.skipped) == 0.0
    same(model, peer)


def test_copies_are_the_weights_in_their_type():
    model, _ = models()
    model = model.float()
    optimizer = FusedAdamEMA(model.parameters(), lr=0.1, copies=torch.float16)
    x = torch.randn(4, 5, device=DEVICE)
    model(x, True).square().sum().backward()
    optimizer.step()
    for weight, twin in zip(model.parameters(), optimizer.copies_of_weights, strict=True):
        assert twin.dtype == torch.float16
        assert torch.equal(twin, weight.detach().half())


def test_autograd_notices_that_the_weights_have_changed():
    model, _ = models()
    optimizer = FusedAdamEMA(model.parameters(), lr=0.1)
    backward(model, 0)
    later = model(torch.ones(4, 5, dtype=torch.float64, device=DEVICE), True).square().sum()
    with use("triton"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.backward()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        ({"decay": 1.5}, "decay is 1.5"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        FusedAdamEMA(nn.Linear(2, 2).parameters(), **wrong)


def test_parameters_of_two_types_are_refused():
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).double())]
    with pytest.raises(ValueError, match=r"float32 on cpu, torch\.float64 on cpu"):
        FusedAdamEMA(parameters)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_step_waits_for_nothing_and_is_captured():
    model, peer = models()
    ours = FusedAdamEMA(model.parameters(), lr=0.02, weight_decay=0.1, clip=0.7, decay=0.9)
    torchs = torch.optim.AdamW(peer.parameters(), lr=0.02, weight_decay=0.1)
    averages = [p.detach().clone() for p in peer.parameters()]
    graph = torch.cuda.CUDAGraph()
    for step in range(6):
        torchs.zero_grad()
        for one in (model, peer):
            # Both branches: every parameter has a gradient.
            backward(one, step)
            backward(one, step, branch=False)
        if step == 3:
            with torch.cuda.graph(graph):
                ours.step()
        if step < 3:
            # The first step sends the table of addresses.
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                ours.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        else:
            ours.advance()
            graph.replay()
        nn.utils.clip_grad_norm_(peer.parameters(), 0.7)
        torchs.step()
        share = 1 - min(0.9, (2 + step) / (11 + step))
        torch._foreach_lerp_(averages, list(peer.parameters()), share)
    same(model, peer, 1e-6)
    for got, want in zip(ours.averages, averages, strict=True):
        assert torch.allclose(got, want, rtol=1e-6, atol=1e-8)
