"""Windows are opened by all processes or by none, and end with their group."""

import weakref

import pytest
import torch

from bevatron.parallel import windows
from bevatron.parallel.axial import groups
from bevatron.parallel.groups import Group, Pending
from bevatron.parallel.mesh import Mesh

MESH = Mesh(rank=0, world=2, local_world=2, device=torch.device("cuda"))


class Two(Group):
    """A process of two, the other of which fails at some of the steps that they agree on."""

    def __init__(self, *fails):
        super().__init__([0, 1], 0)
        self.fails = list(fails)

    def all_reduce(self, values, operation="sum"):
        assert operation == "sum"
        return Pending(values + self.fails.pop(0))


class Memory:
    """In place of torch's symmetric memory; at one of its calls it fails."""

    def __init__(self, fails=""):
        self.fails, self.calls, self.made = fails, [], lambda: None

    def _call(self, name):
        self.calls.append(name)
        if name == self.fails:
            raise RuntimeError(name)

    def empty(self, *_, **__):
        self._call("empty")
        return object()

    def rendezvous(self, *_):
        self._call("rendezvous")

        class Handle:
            pass

        handle = Handle()
        self.made = weakref.ref(handle)
        return handle


@pytest.mark.parametrize(
    ("own", "others", "calls"),
    [
        ("empty", (0, 0), ["empty"]),
        ("rendezvous", (0, 0), ["empty", "rendezvous"]),
        ("", (1, 0), ["empty"]),
        ("", (0, 1), ["empty", "rendezvous"]),
    ],
)
def test_a_process_that_fails_leaves_no_other_waiting(monkeypatch, own, others, calls):
    memory, group = Memory(own), Two(*others)
    monkeypatch.setattr(windows, "symmetric", memory)
    assert windows.opened(group, MESH) is group
    assert memory.calls == calls
    assert len(group.fails) == 2 - len(calls), "all processes agree as often"


def test_windows_end_with_their_group(monkeypatch):
    memory = Memory()
    monkeypatch.setattr(windows, "symmetric", memory)
    monkeypatch.setattr(groups, "open_groups", lambda *_, **__: Two(0, 0))
    with groups.shared(MESH, 2) as group:
        assert isinstance(group, windows.WindowGroup)
        assert memory.made() is not None
    del group
    assert memory.made() is None
