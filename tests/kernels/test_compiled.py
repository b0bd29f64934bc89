"""Operators under torch.compile equal eager ones bit for bit, in one process: it takes long."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need the package triton")
FOLDER = Path(__file__).parent


def test_compiled_operators_and_their_inner_gradients_equal_eager():
    scripts = [FOLDER / "pair/compiled_pair_operators.py"]
    # An older torch cannot trace an inner gradient.
    if hasattr(pytest.importorskip("torch._dynamo").config, "trace_autograd_ops"):
        scripts.append(FOLDER / "equivariant/compiled_operators.py")
    command = [sys.executable, FOLDER.parent / "scripts.py", *scripts]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
