"""The order of tests, their drawn examples, and tests in a process of their own."""

import os
import random
import signal
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import running  # isort: skip  in this folder


def test_a_shuffle_keeps_modules_together_and_follows_from_its_seed():
    items = [SimpleNamespace(nodeid=f"test_{m}.py::test[{n}]") for m in "abcdef" for n in range(9)]
    first = running.shuffled(items, "1")
    assert first == running.shuffled(items, "1") != running.shuffled(items, "2") != items
    assert sorted(item.nodeid for item in first) == sorted(item.nodeid for item in items)
    modules = [item.nodeid.partition("::")[0] for item in first]
    assert sum(a != b for a, b in pairwise(modules)) == 5
    assert [item for item in first if item.nodeid.startswith("test_a")] != items[:9]


def test_examples_are_the_same_in_every_run():
    def draw(seed):
        @given(st.integers())
        def collect(number):
            drawn.append(number)

        drawn = []
        random.seed(seed)
        settings(settings.get_profile("fixed"), max_examples=20)(collect)()
        return drawn

    assert draw(1) == draw(2)


@pytest.mark.own_process
def test_a_marked_test_runs_in_a_process_of_its_own():
    assert os.environ[running.OWN_PROCESS]


@pytest.mark.own_process
@pytest.mark.xfail(strict=True, reason="the process is killed, and the others go on")
def test_a_marked_test_may_end_its_process():
    assert running.OWN_PROCESS in os.environ
    os.kill(os.getpid(), signal.SIGKILL)
