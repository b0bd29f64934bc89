"""Progress of a forward pass: nothing of a short one, and what a long one has reached."""

import threading

import pytest
from torch import nn

from bevatron.output import quietly
from bevatron.recipes import forward_progress as module
from bevatron.recipes.forward_progress import forward_progress


class Waits(nn.Module):
    """A module whose calls take until the next line is written."""

    def __init__(self, line):
        super().__init__()
        self.line = line

    def forward(self):
        self.line.clear()
        assert self.line.wait(20)


@pytest.fixture
def lines(monkeypatch):
    found, written = [], threading.Event()

    def note(line):
        found.append(line)
        written.set()

    monkeypatch.setattr(module, "note", note)
    return found, written


def test_a_long_pass_says_which_call_it_has_reached(lines, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.01)
    found, written = lines
    blocks, head = [Waits(written), Waits(written)], Waits(written)
    with forward_progress("crambin", {"block": (blocks, 4), "head": ([head], 1)}):
        for block in 2 * blocks:
            block()
        head()
    counts = [f"crambin, block {n} of 4, 0:00:00 so far" for n in (1, 2, 3, 4)]
    assert [line for line in dict.fromkeys(found) if "," in line[8:]][-5:] == [
        *counts, "crambin, head 1 of 1, 0:00:00 so far",
    ]  # fmt: skip
    assert not blocks[0]._forward_pre_hooks


def test_a_short_or_quiet_pass_says_nothing(monkeypatch, capsys):
    with forward_progress("crambin", {}):
        pass
    monkeypatch.setattr(module, "SECONDS", 0.0)
    with quietly(), forward_progress("crambin", {}):
        threading.Event().wait(0.05)
    assert capsys.readouterr().err == ""
    with forward_progress("crambin", {}):
        threading.Event().wait(0.05)
    assert capsys.readouterr().err.startswith("crambin, 0:00:00 so far\n")
