"""A run that a launcher starts again goes on; another run in its folder is refused as ever."""

import os

import pytest
import tiny

from bevatron.train.loop import fit
from bevatron.train.restarts import LAUNCH, launches, restarted

TORCHRUN = {"TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_RESTART_COUNT": "0"}
SLURM = {"SLURM_JOB_ID": "71"}
AGAIN = {"TORCHELASTIC_RESTART_COUNT": "1"}
REQUEUED = {"SLURM_RESTART_COUNT": "2"}


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Begin a run as a launcher would, and return its folder."""

    def begin(environment):
        for name in [n for n in os.environ if n.startswith(("SLURM", "TORCHELASTIC"))]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        fit(tiny.make_run(tmp_path, count=4, train={"epochs": 1}))
        return tmp_path

    return begin


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (TORCHRUN, TORCHRUN | AGAIN, "restarted by torchrun (once so far)"),
        (SLURM, SLURM | REQUEUED, "restarted by Slurm (2 times so far)"),
        (TORCHRUN | SLURM, TORCHRUN | SLURM | REQUEUED, "restarted by Slurm"),
        (TORCHRUN, TORCHRUN, None),
        (TORCHRUN, TORCHRUN | AGAIN | {"TORCHELASTIC_RUN_ID": "two"}, None),
        (SLURM | TORCHRUN, SLURM | TORCHRUN | AGAIN | {"TORCHELASTIC_RUN_ID": "two"}, None),
        (SLURM, SLURM | REQUEUED | {"SLURM_JOB_ID": "72"}, None),
        ({}, TORCHRUN | AGAIN, None),
    ],
)
def test_only_a_restart_of_the_launch_that_began_the_run_goes_on(launched, first, then, said):
    found = restarted(launched(first), then)
    assert found is None if said is None else said in found


def test_without_an_id_the_parent_process_tells_one_torchrun_from_another():
    name, restarts = launches({"TORCHELASTIC_RESTART_COUNT": "3"})["torchrun"]
    assert (name, restarts) == (f"process {os.getppid()}", 3)


def test_without_a_launcher_nothing_is_noted(launched):
    assert not (launched({}) / LAUNCH).exists()
