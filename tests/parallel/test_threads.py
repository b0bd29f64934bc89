"""How many CPU threads torch gets."""

import math

import pytest
import torch

from bevatron.data import processes
from bevatron.data.processes import cpu_quota
from bevatron.parallel import threads
from bevatron.parallel.threads import few_threads, idle_cpus, threads_for

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def eight(monkeypatch):
    """Eight threads on eight cores, nothing set in the environment."""
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "own_cpus", lambda: 8)
    monkeypatch.setattr(threads, "idle_cpus", lambda: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("nodes", "expected"), [(0, 1), (6, 1), (63, 1), (64, 2), (10**6, 8)])
def test_small_batches_get_few(nodes, expected):
    assert threads_for(nodes) == expected


def test_no_more_than_cores_or_than_torch_was_given(monkeypatch):
    monkeypatch.setattr(threads, "own_cpus", lambda: 3)
    assert threads_for(10**6) == 3
    torch.set_num_threads(2)
    assert threads_for(10**6) == 2


@pytest.mark.parametrize("name", threads.VARIABLES)
def test_the_number_that_a_user_sets_counts(name, monkeypatch):
    monkeypatch.setenv(name, "8")
    assert threads_for(1, idle=True) == 8


def test_predictions_leave_busy_cores_alone(monkeypatch):
    monkeypatch.setattr(threads, "idle_cpus", lambda: 2)
    assert threads_for(10**6) == 8
    assert threads_for(10**6, idle=True) == 2


def test_they_are_what_they_were_afterwards():
    with few_threads(6, CPU):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 8
    with pytest.raises(ZeroDivisionError), few_threads(6, CPU):
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == 8
    with few_threads(6, torch.device("cuda")):
        assert torch.get_num_threads() == 8


def test_idle_cores_are_counted():
    assert idle_cpus() >= 1


def group(root, path, files):
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.fixture
def own_group(tmp_path):
    """Writes which groups the process is in."""
    (tmp_path / "proc/self").mkdir(parents=True)
    return (tmp_path / "proc/self/cgroup").write_text


def test_the_quota_of_a_group_and_of_those_above_it_counts(tmp_path, own_group):
    own_group("0::/slurm/job\n")
    group(tmp_path, "slurm/job", {"cpu.max": "max 100000\n"})
    assert cpu_quota(tmp_path) == math.inf
    group(tmp_path, "slurm", {"cpu.max": "250000 100000\n"})
    assert cpu_quota(tmp_path) == 2.5


def test_in_a_container_the_group_is_mounted_on_top(tmp_path, own_group):
    own_group("0::/docker/4e1f\n")
    group(tmp_path, ".", {"cpu.max": "400000 100000\n"})
    assert cpu_quota(tmp_path) == 4.0


def test_quotas_of_version_one_count(tmp_path, own_group):
    own_group("3:cpu,cpuacct:/docker/4e1f\n2:memory:/docker/4e1f\n")
    files = {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}
    group(tmp_path, "cpu/docker/4e1f", files)
    assert cpu_quota(tmp_path) == 1.5
    group(tmp_path, "cpu/docker/4e1f", {"cpu.cfs_quota_us": "-1\n"})
    assert cpu_quota(tmp_path) == math.inf


def test_a_machine_without_groups_has_no_quota(tmp_path):
    assert cpu_quota(tmp_path) == math.inf


def test_part_of_a_core_is_one(monkeypatch):
    monkeypatch.setattr(processes, "cpu_quota", lambda: 0.3)
    assert processes.usable_cpus() == 1
