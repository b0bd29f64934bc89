"""Which CPU cores a process takes beside its GPU."""

import os

import numpy as np
import pytest
import torch

from bevatron.data import processes
from bevatron.data.loader import Loader, default_workers
from bevatron.parallel import affinity
from bevatron.parallel.affinity import keep_near_gpu, near_pci, parse_cpus, share_of
from bevatron.parallel.mesh import Mesh

EVERYTHING = set(range(16))
SOCKETS = [parse_cpus("0-3,8-11")] * 2 + [parse_cpus("4-7,12-15")] * 2


@pytest.fixture
def machine(tmp_path):
    """Two sockets of four cores with two threads: CPU n and n + 8 are one core."""
    for cpu in range(16):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text("4-7,12-15\n")
    return tmp_path


def test_gpus_of_one_socket_divide_its_whole_cores(machine):
    shares = [share_of(gpu, SOCKETS, EVERYTHING, machine) for gpu in range(4)]
    assert shares == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        ({0, 8, 4}, [0, 8]),  # fewer cores than GPUs: they share
        ({4, 5, 12}, [4, 5, 12]),  # none near: all that there are
        ({1, 2, 9, 10}, [1, 9]),
    ],
)
def test_only_what_the_process_may_use_is_taken(machine, usable, expected):
    assert share_of(0, SOCKETS, usable, machine) == expected


def test_the_system_says_which_cpus_are_near(machine):
    assert near_pci("0000:3b:00.0", machine) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert near_pci("0000:99:00.0", machine) == set()


def test_on_a_cpu_nothing_changes():
    before = os.sched_getaffinity(0)
    assert keep_near_gpu(Mesh()) is None
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("local_world", [1, 4])
def test_a_second_run_of_a_process_takes_the_same_share(monkeypatch, local_world):
    present = set(EVERYTHING)

    def take(_, cpus):
        present.clear()
        present.update(cpus)

    monkeypatch.setattr(affinity, "_usable_before", {})
    monkeypatch.setattr(affinity, "cpus_near", SOCKETS.__getitem__)
    monkeypatch.setattr(processes, "_taken", set())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(present))
    monkeypatch.setattr(os, "sched_setaffinity", take)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    shares = []
    for gpu in (1, 1, 2, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda gpu=gpu: gpu)
        keep_near_gpu(Mesh(local_world=local_world, device=torch.device("cuda", gpu)))
        shares.append(set(present))
    assert shares[0] == shares[1] == shares[3] != shares[2]
    assert shares[0] < SOCKETS[1]
    assert shares[2] <= SOCKETS[2]


class Affinity:
    """Samples that are the CPUs of whoever reads them."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return sorted(os.sched_getaffinity(0))

    def describe(self, index):
        return f"number {index}"


def first(samples, indices, weights):
    return samples[0]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_workers_follow_their_process_whenever_the_fork_server_began(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    before = os.sched_getaffinity(0)
    one = max(before)
    batch = [(np.array([0]), np.ones(1))]
    with Loader(Affinity(), batch, first, workers=1) as loader:
        assert next(iter(loader)).batch == sorted(before)
    try:
        processes.take_cpus([one], shared=False)
        assert processes.own_cpus() == 1
        assert default_workers() == 1
        with Loader(Affinity(), batch, first, workers=1) as loader:
            assert next(iter(loader)).batch == [one]
    finally:
        processes.take_cpus(before, shared=True)
