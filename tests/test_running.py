"""The order of tests, their drawn examples, and tests in a process of their own."""

import gc
import os
import random
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
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


def test_the_collector_is_spared_what_a_module_has_left():
    here, elsewhere = (SimpleNamespace(path=path) for path in ("test_a.py", "test_b.py"))
    gc.collect()
    left = [[number] for number in range(1000)]
    frozen = gc.get_freeze_count()
    running.pytest_runtest_teardown(here, here)
    assert gc.get_freeze_count() <= frozen  # fewer if something frozen has ended meanwhile
    running.pytest_runtest_teardown(here, elsewhere)
    assert gc.get_freeze_count() > frozen + len(left)


@pytest.mark.own_process
def test_a_marked_test_runs_in_a_process_of_its_own():
    assert os.environ[running.OWN_PROCESS]


@pytest.mark.own_process
@pytest.mark.xfail(strict=True, reason="the process is killed, and the others go on")
def test_a_marked_test_may_end_its_process():
    assert running.OWN_PROCESS in os.environ
    os.kill(os.getpid(), signal.SIGKILL)


GPU = """
import sys
from types import SimpleNamespace

broken = []

def synchronize():
    if broken:
        raise RuntimeError("CUDA error: device-side assert triggered")

cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
sys.modules["torch"] = SimpleNamespace(cuda=cuda, broken=broken)
"""
TESTS = """
import pytest
import torch

@pytest.mark.parametrize("number", range(8))
def test_on_a_gpu(number):
    torch.cuda.synchronize()
    assert number != 1, "an error of the test alone"
    if number == 3:
        torch.broken.append(number)
        torch.cuda.synchronize()
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_no_test_runs_in_a_process_whose_gpu_another_has_broken(workers, tmp_path):
    (tmp_path / "conftest.py").write_text(GPU)
    (tmp_path / "test_gpu.py").write_text(TESTS)
    command = ["-m", "pytest", "-p", "running", "-p", "no:cacheprovider", "-n", str(workers), "-q"]
    done = subprocess.run(
        [sys.executable, *command, "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    failed = re.findall(r"^FAILED test_gpu.py::(\S+)", done.stdout, re.MULTILINE)
    assert set(failed) == {"test_on_a_gpu[1]", "test_on_a_gpu[3]"}
    if workers:
        assert "crashed while running 'test_gpu.py::test_on_a_gpu[3]'" in done.stdout
        assert "6 passed" in done.stdout
    else:
        assert "the GPU of this process failed in test_gpu.py::test_on_a_gpu[3]" in done.stdout
        assert "2 passed" in done.stdout
