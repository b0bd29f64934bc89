"""Who is who among the processes, and collectives on one process."""

import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch

from bevatron.errors import ConfigError
from bevatron.parallel import collectives
from bevatron.parallel import mesh as mesh_module
from bevatron.parallel.data_parallel import GradientSums, buckets
from bevatron.parallel.failures import FAILURE_KEY
from bevatron.parallel.mesh import (
    Mesh,
    choose_device,
    first_node,
    open_mesh,
    ranks_from_environment,
)


def test_torchrun_sets_the_ranks():
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert ranks_from_environment(environment) == (5, 8, 1, 4)


def test_a_slurm_step_sets_the_ranks_but_a_batch_script_is_one_process():
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert ranks_from_environment(job) == (0, 1, 0, 1)
    step = {
        **job,
        "SLURM_PROCID": "6",
        "SLURM_LOCALID": "2",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    }
    assert ranks_from_environment(step) == (6, 8, 2, 4)


def test_jobs_and_steps_of_slurm_meet_at_ports_of_their_own():
    ports = []
    for job, step in [("79998", "0"), ("79998", "1"), ("80000", "0"), ("4711000", "0")]:
        environment = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_NODELIST": "n[3-4]"}
        mesh_module._set_rendezvous(environment)
        assert environment["MASTER_ADDR"] == "n3"
        ports.append(int(environment["MASTER_PORT"]))
    assert ports == [39998, 39999, 20000, 31000]


def test_an_incomplete_environment_is_named():
    with pytest.raises(ConfigError, match="SLURM_PROCID is not set"):
        ranks_from_environment({"SLURM_STEP_NUM_TASKS": "2"})
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two'"):
        ranks_from_environment({"RANK": "0", "WORLD_SIZE": "two"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("a[3-5]", "a3"), ("n[08,10-11]-ib,m2", "n08-ib"), ("a1,a2", "a1"), ("", "")],
)
def test_the_first_node_of_a_slurm_list(nodes, first):
    assert first_node(nodes) == first


def test_a_restart_finds_nothing_of_the_start_before_in_the_store_of_torchrun(monkeypatch):
    """The agent's store goes on, with the message of the rank that has failed."""
    agents = torch.distributed.HashStore()
    for restarts, there in (("0", False), ("0", True), ("1", False)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        monkeypatch.setattr(mesh_module, "_stores", [agents])
        store = mesh_module._fresh_store(0, 2, timedelta(seconds=1))
        assert store.check([FAILURE_KEY]) == there
        store.set(FAILURE_KEY, "rank 1 failed")


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="expected auto, cpu, cuda"):
        choose_device("gpu", 0)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch finds none"):
            choose_device("cuda", 0)
        assert choose_device("auto", 0) == torch.device("cpu")


def test_on_one_process_collectives_return_their_argument(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    with open_mesh("cpu") as mesh:
        assert mesh == Mesh()
        assert collectives.sum_over_ranks(torch.ones(2), mesh).tolist() == [1, 1]
        assert collectives.gather_json({"a": [1, None]}, mesh) == [{"a": [1, None]}]
        assert collectives.broadcast_json("text", mesh) == "text"
        collectives.barrier(mesh)


def test_scalars_are_added_up_in_float64_and_keep_their_order():
    total = collectives.sum_scalars({"b": 0.1, "a": 2**53 - 1}, Mesh())
    assert [*total.items()] == [("b", 0.1), ("a", 2.0**53 - 1)]


def test_a_parameter_without_gradient_counts_as_zero_unless_frozen():
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(requires_grad=False)
    GradientSums(model.parameters(), Mesh()).finish()
    assert model.weight.grad.tolist() == [[0, 0]]
    assert model.bias.grad is None


def test_buckets_hold_every_gradient_once_and_one_type_each(monkeypatch):
    monkeypatch.setattr("bevatron.parallel.data_parallel.BUCKET_BYTES", 40)
    gradients = [torch.zeros(n, dtype=d) for n in (3, 9, 1) for d in (torch.float32, torch.float64)]
    found = list(buckets(gradients))
    assert sorted(id(g) for bucket in found for g in bucket) == sorted(map(id, gradients))
    assert all(len({g.dtype for g in bucket}) == 1 for bucket in found)
    assert len(found) > 2


def test_sums_that_are_replaced_leave_no_hooks_behind():
    parameter = torch.nn.Parameter(torch.ones(2))
    sums = GradientSums([parameter], Mesh(world=2))
    assert len(parameter._post_accumulate_grad_hooks) == 1
    del sums
    assert not parameter._post_accumulate_grad_hooks


def test_an_early_end_waits_for_the_gpu_that_is_being_initialised(monkeypatch):
    """A thread within CUDA that outlives the interpreter aborts the process."""
    ends = threading.Event()

    def choose(*_):
        ends.wait(20)
        raise ConfigError("there is none")

    monkeypatch.setattr(mesh_module, "choose_device", choose)
    before = {*threading.enumerate()}
    mesh_module.start_gpu("cuda")
    (thread,) = {*threading.enumerate()} - before
    assert not thread.daemon
    ends.set()
    thread.join(20)
    assert not thread.is_alive()


def test_a_rank_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="RANK is 3, expected 0 to 1 as WORLD_SIZE is 2"):
        ranks_from_environment({"RANK": "3", "WORLD_SIZE": "2"})


WAITING = """
import signal
import sys
from bevatron.errors import BevatronError
from bevatron.parallel import mesh
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
mesh.SECONDS_TO_MEET = 0.1
try:
    with mesh.open_mesh("cpu", float(sys.argv[1])):
        pass
except BevatronError as error:
    print(error)
"""


@pytest.fixture
def alone():
    """Start one of two processes, which waits the given number of seconds for the other."""
    started = []

    def start(seconds):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        process = subprocess.Popen(
            [sys.executable, "-c", WAITING, str(seconds)],
            env={**os.environ, **ranks, "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_whose_others_never_come_says_so(alone):
    out, err = alone(1).communicate(timeout=100)
    assert "process 0 waits at 127.0.0.1:" in err
    assert "process 0 of 2 did not meet the others at 127.0.0.1:" in out
    assert out.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_waits_for_others_can_be_stopped(alone, number):
    process = alone(600)
    assert "process 0 waits" in process.stderr.readline()
    process.send_signal(number)
    assert process.wait(timeout=60) == -number
