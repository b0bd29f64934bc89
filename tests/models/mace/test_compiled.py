"""A model under torch.compile, the gradient that forces are traced with it."""

import subprocess
import sys
from pathlib import Path

import pytest

from bevatron.errors import ConfigError
from bevatron.recipes.mace.run import MaceRun


def test_a_compiled_loss_on_forces_and_all_its_gradients_equal_eager():
    pytest.importorskip("triton")
    if not hasattr(pytest.importorskip("torch._dynamo").config, "trace_autograd_ops"):
        pytest.skip("this torch cannot trace an inner gradient")
    here = Path(__file__)
    command = [sys.executable, here.parents[2] / "scripts.py", here.with_name("compiled_model.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_run_with_torch_compile_is_refused_before_it_fails():
    with pytest.raises(ConfigError, match=r"train\.compile: forces are gradients"):
        MaceRun.from_values({"train": {"compile": True}})
