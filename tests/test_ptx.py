"""PTX compared: a changed constant is found; a renamed or moved kernel is equal."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TOOL = Path(__file__).parents[1] / "tools" / "ptx.py"

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def scaled(x):
    return x * 3.0


@triton.jit
def NAME(x_ptr, y_ptr, num, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < num).to(tl.float32)
    tl.store(y_ptr + i, scaled(x) + CONSTANT, mask=i < num)


@torch.library.custom_op("tiny::NAME", mutates_args=())
def launch(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    NAME[(1,)](x, y, len(x), BLOCK=64 if x.is_cuda else 128)
    return y
"""

TEST = """
import hypothesis
import pytest
import torch

from bevatron.kernels.MODULE import launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_runs(dtype):
    launch(torch.ones(40, dtype=dtype))


@hypothesis.given(hypothesis.strategies.just(torch.int32))
def test_runs_with_what_is_drawn(dtype):
    launch(torch.ones(40, dtype=dtype))
"""


def checkout(root, kernels):
    """Write a package of kernels, given as text by module, and their tests."""
    for module, text in kernels.items():
        path = root / "src/bevatron/kernels" / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in [path.parent, *path.parent.parents]:
            if folder == root / "src":
                break
            (folder / "__init__.py").touch()
        test = root / "tests/kernels" / f"test_{module.replace('.', '_')}.py"
        test.parent.mkdir(parents=True, exist_ok=True)
        test.write_text(TEST.replace("MODULE", module))


def tool(*arguments):
    command = [sys.executable, TOOL, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Record two checkouts: in the second, one kernel is renamed and moved, another is changed."""
    folder = tmp_path_factory.mktemp("ptx")
    same = KERNEL.replace("NAME", "same").replace("CONSTANT", "1.0")
    changed = KERNEL.replace("NAME", "changed")
    moved = same.replace("same", "renamed").replace("scaled", "tripled").replace("y_ptr", "out_ptr")
    moved = moved.replace("    i =", '    """Once more."""\n    # A comment.\n    i =')
    checkouts = {
        "before": {"tiny.triton": same, "other.triton": changed.replace("CONSTANT", "1.0")},
        "after": {
            "family.tiny.triton_all": moved,
            "other.triton": changed.replace("CONSTANT", "2.0"),
        },
    }
    runs = []
    for name, kernels in checkouts.items():
        checkout(folder / name, kernels)
        to = ("record", folder / f"{name}.json.gz", "--root", folder / name, "--processes", "1")
        runs.append(tool(*to))
    for run in runs:
        said, _ = run.communicate()
        assert run.returncode == 0, said
        assert "2 kernels, 6 variants, 0 left out" in said  # two types, and float32 as bfloat16
        assert "kernels never compiled: 0" in said
    return folder


def compared(*arguments):
    run = tool("compare", *arguments)
    return run.communicate()[0].splitlines(), run.returncode


def test_the_launches_of_a_gpu_are_recorded_but_those_of_drawn_examples(recordings):
    recorded = json.loads(gzip.decompress((recordings / "before.json.gz").read_bytes()))
    found = {variant["key"] for variant in recorded["kernels"]["tiny.same"]["variants"]}
    assert found == {f"*{kind}:16 *{kind}:16 i32 =64" for kind in ("fp32", "fp64", "bf16")}


def test_a_recording_equals_itself(recordings):
    path = recordings / "before.json.gz"
    assert compared(path, path) == (["2 equal"], 0)


def test_a_changed_constant_is_found_and_a_renamed_and_moved_kernel_is_equal(recordings):
    before, after = (recordings / f"{name}.json.gz" for name in ("before", "after"))
    said, code = compared(
        before, after, "--renamed", "tiny.same=tiny.renamed", "--show", "other.changed"
    )
    assert code == 1
    assert said[:2] == ["changed: other.changed", "  0 equal, 3 changed"]
    assert said[-1] == "1 changed, 1 equal"
    assert any(line.startswith("-") and "0f3F800000" in line for line in said)  # 1.0
    assert any(line.startswith("+") and "0f40000000" in line for line in said)  # 2.0


def test_a_kernel_that_is_gone_is_missing(recordings):
    before, after = (recordings / f"{name}.json.gz" for name in ("before", "after"))
    said, code = compared(before, after)
    assert code == 1
    assert {"missing: tiny.same", "new: tiny.renamed"} <= set(said)
