"""Fixtures for all tests."""

import functools
import importlib.util
import os
import signal
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch

# Before Triton is imported: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Before anything of bevatron is imported.
sys.path.insert(0, str(Path(__file__).parent))
if importlib.util.find_spec("beartype"):
    importlib.import_module("shape_checks").install("bevatron")

# Processes that tests start import the same package, whatever folder they run in.
SOURCE = str(Path(importlib.util.find_spec("bevatron").origin).parents[1])
before = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join([SOURCE, before] if before else [SOURCE])


# To wait for the disk takes minutes in all, and what a kill leaves does not depend on it: only a
# power failure would show a difference. A file that is not open is an error still.
os.fsync = os.fstat


def pytest_addoption(pluginmanager):
    """Take in the options and hooks of ``running``."""
    pluginmanager.register(importlib.import_module("running"), "running")


class KernelSources(PathFinder):
    """Imports modules of Triton kernels unchanged: Triton reads and rewrites their functions."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.startswith("bevatron.kernels.") and fullname.split(".")[-1].startswith(
            "triton"
        ):
            cls.prepare_interpreter()
            return super().find_spec(fullname, path, target)
        return None

    @staticmethod
    @functools.cache
    def prepare_interpreter():
        if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
            importlib.import_module("fast_interpreter").install()
            importlib.import_module("bounds").install()


sys.meta_path.insert(0, KernelSources)

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and reference values beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("needs the folder ../shared with real data and reference values")
    return SHARED


@pytest.fixture
def hook():
    """Install a function that is called at every step of an atomic write."""
    from bevatron import files

    added = []

    def install(function):
        files.crash_hooks.append(function)
        added.append(function)

    yield install
    for function in added:
        files.crash_hooks.remove(function)


@pytest.fixture(autouse=True)
def _repeatable():
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    before = _lasting()
    yield
    after = _lasting()
    left = {name: value for name, value in after.items() if before.get(name, value) != value}
    assert not left, "the test changed what later tests find"


# torch sets others when it first uses a GPU.
OURS = ("BEVATRON", "CUDA_VISIBLE", "LOCAL_", "MASTER_", "RANK", "SLURM", "TRITON_INTER", "WORLD_")


def _lasting():
    """What a test may change for all others: its order among them would matter."""
    found = {
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "folder": os.getcwd(),  # noqa: PTH109
        "variables": {k: v for k, v in os.environ.items() if k.startswith(OURS)},
        "signals": [
            signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
        ],
    }
    kernels = sys.modules.get("bevatron.kernels")
    return found | ({"kernels": kernels.current()} if hasattr(kernels, "current") else {})


@pytest.fixture
def float64():
    """Make float64 the default type for one test."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def refused(capsys):
    """Runs a command that must end with one sentence and exit code 2, and returns the sentence."""

    from bevatron.cli import main  # after the import hook

    def run(*arguments):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 2
        said = capsys.readouterr().err.strip()
        last = said.splitlines()[-1]
        assert last.startswith("error: ")
        assert "Traceback" not in said
        return last.removeprefix("error: ")

    return run


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Under CI a test may not skip for want of ../shared while the folder is there."""
    outcome = yield
    report = outcome.get_result()
    wants_shared = "shared" in str(report.longrepr) if report.skipped else False
    if os.environ.get("CI") and wants_shared and SHARED.is_dir():
        report.outcome = "failed"
        report.longrepr = f"skipped for want of ../shared, which is there: {report.longrepr}"
