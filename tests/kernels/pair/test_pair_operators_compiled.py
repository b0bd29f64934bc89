"""torch.compile of operators on pairs and alignments: one graph, the same bits."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need the package triton")


def test_compiled_operators_give_the_same_bits():
    names = ("triangle_multiply", "outer_product_mean", "global_attention", "qkvg")
    script = Path(__file__).with_name("compiled_pair_operators.py")
    command = [sys.executable, script, *names, "pair_attention", "add_dropped"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
