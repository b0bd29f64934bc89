"""Activations that are computed again: same gradients, fewer of them kept, no random state."""

import weakref
from functools import partial

import pytest
import torch
from torch import nn

from bevatron.errors import ConfigError
from bevatron.models.common.folding import (
    Checkpointing,
    checkpointed,
    checkpointing,
    recomputed,
    recomputed_if_large,
    recomputing,
    run_stack,
)
from bevatron.parallel.axial import one_of, own_rows


class Block(nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.policy = policy
        self.pair, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls, self.result = 0, None

    def update(self, x):
        self.calls += 1
        return self.pair(x).sigmoid().square()

    def forward(self, x, shift):
        x = x + checkpointed(self.policy, "pair_block", self.update)(x)
        x = x + checkpointed(self.policy, "transition", self.other)(x).tanh() + shift
        self.result = weakref.ref(x)
        return x


def gradients(policy):
    torch.manual_seed(3)
    blocks = nn.ModuleList(Block(policy) for _ in range(5))
    x = torch.randn(4, 8, requires_grad=True)
    y = run_stack(policy, [partial(block, shift=torch.ones(8)) for block in blocks], x)
    before = [block.calls for block in blocks]
    alive = sum(block.result() is not None for block in blocks)
    y.square().sum().backward()
    found = [x.grad, *(p.grad for p in blocks.parameters())]
    return found, before, [block.calls for block in blocks], alive


@pytest.mark.parametrize("kind", ["auto", "none", "pair", "all", "segments", "paper"])
def test_what_lies_between_stacks_is_computed_again_under_every_policy_but_none(kind):
    calls = []
    x = torch.randn(4, requires_grad=True)
    y = recomputed(Checkpointing(kind), lambda x: calls.append(0) or x.exp().square())(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert len(calls) == (1 if kind == "none" else 2)
    assert torch.allclose(found, 2 * (2 * x).exp())


@pytest.mark.parametrize(
    ("kind", "around", "found"),
    [
        ("none", "none", "--"),
        ("all", "none", "--BB"),
        # The group runs again up to its last block: then, from the last on, each block.
        ("segments", "none", "---BB"),
        ("none", "all", "----"),
    ],
)
def test_what_blocks_return_is_read_unless_only_they_run_again(kind, around, found):
    runs = []

    def block(x):
        runs.append("B" if recomputing() else "-")
        return x.exp()

    def stack(x):
        return run_stack(Checkpointing(kind, 2), [block, block], x)

    recomputed(Checkpointing(around), stack)(torch.ones(2, requires_grad=True)).sum().backward()
    assert "".join(runs) == found
    assert not recomputing()


def test_processes_that_share_a_pair_agree_on_what_they_compute_again(monkeypatch):
    """Of five rows two are those of the second, three of the first."""
    monkeypatch.setattr(checkpointing, "LARGE_PAIR", 3 * 5 * 8 * 4)
    pair = torch.ones(5, 5, 8)
    with one_of(2):
        of_first, of_second = own_rows(pair), pair[3:]
        for rows in (of_first, of_second):
            assert recomputed_if_large(rows, torch.sin) is not torch.sin
        assert recomputed_if_large(of_first[..., :7], torch.sin) is torch.sin


@pytest.mark.parametrize(
    ("kind", "segment", "calls", "kept"),
    [
        ("none", 1, [1] * 5, 5),
        ("pair", 1, [2] * 5, 5),
        ("all", 1, [2] * 5, 5),
        ("auto", 1, [2] * 5, 5),
        # The last block of a group is the first that the backward pass comes to.
        ("segments", 2, [3, 2, 3, 2, 2], 3),
        ("paper", 1, [2] * 5, 5),
    ],
)
def test_policies_change_what_is_computed_again_and_no_gradient(kind, segment, calls, kept):
    expected, *_ = gradients(Checkpointing())
    found, before, after, alive = gradients(Checkpointing(kind, segment))
    assert before == [1] * 5
    assert after == calls
    assert alive == kept
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


def test_without_gradients_nothing_is_wrapped():
    block = Block(Checkpointing("paper"))
    with torch.no_grad():
        assert not block(torch.ones(8), 0.0).requires_grad
    assert block.calls == 1


def test_an_empty_group_is_refused():
    with pytest.raises(ConfigError, match="segment: expected 1 or more, got 0"):
        Checkpointing("segments", 0)
