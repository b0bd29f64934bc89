"""Operators of potentials under torch.compile: second derivatives equal eager ones bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need the package triton")


def test_compiled_with_their_inner_gradients_they_equal_eager():
    dynamo = pytest.importorskip("torch._dynamo")
    if not hasattr(dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch cannot trace an inner gradient")
    script = Path(__file__).with_name("compiled_operators.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
