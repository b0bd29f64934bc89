"""The kernels of a step are compiled in parallel before the first is launched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bevatron import kernels

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("compiled_ahead.py")
SOURCE = Path(kernels.__file__).parents[2]


def compile_ahead(how, cache):
    """Run the script in a process without the interpreter, which this one may have."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), how],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = map(json.loads, done.stdout.splitlines())
    return {**last, "launchers": [line["launcher"] for line in lines]}


def test_kernels_are_compiled_once_and_not_launched(tmp_path):
    first = compile_ahead("forked", tmp_path)
    assert first["compiled"] == 3
    assert first["x"] == [0.0] * 16
    assert len(list(tmp_path.rglob("*.cubin"))) == 3
    assert sorted(name for name, *_ in first["launchers"]) == ["add_one", "double", "double"]
    again = compile_ahead("forked", tmp_path)
    assert (again["compiled"], again["x"]) == (0, first["x"])


def test_nothing_is_rehearsed_for_a_single_process(tmp_path):
    assert compile_ahead("alone", tmp_path)["compiled"] == 0
    assert not list(tmp_path.rglob("*.cubin"))


def test_processes_that_hang_are_given_up(tmp_path):
    found = compile_ahead("hanging", tmp_path)
    assert found["compiled"] == 0
    assert found["lines"] == ["compiling 3 kernels with 2 processes; later runs reuse them"]


def test_work_that_fails_is_left_to_fail_by_itself(tmp_path):
    found = compile_ahead("failing", tmp_path)
    assert found["compiled"] == 0
    assert found["lines"] == [
        "kernels are compiled one by one as they are launched (RuntimeError: no such thing)"
    ]
