"""Two gloo processes on a CPU, started by torchrun."""

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import rank as ranks
import tiny

from bevatron.parallel.mesh import Mesh
from bevatron.train.epochs import pack_samples
from bevatron.train.loop import begin_state, fit
from bevatron.train.step import train_step

SCRIPT = Path(ranks.__file__)


def start(mode: str, folder: Path, world: int = 2) -> subprocess.CompletedProcess:
    """Run ``rank.py`` under torchrun, or alone."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK"))}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={world}"]
    launcher += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), mode, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_collectives_between_two_processes(tmp_path):
    done = start("collectives", tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == {
            "bytes": [0, 1],
            "json": [{"rank": 0}, {"rank": 1}],
            "broadcast": 7,
            "sum": 3.0,
        }


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A run of two processes."""
    folder = tmp_path_factory.mktemp("two")
    done = start("fit", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_two_processes_have_the_losses_of_one_that_walks_both_ranks_batches(two, tmp_path):
    """Batches unequal, some of a single point; within 1e-10."""
    run = ranks.make(tmp_path)
    run.model = tiny.TinyModel(seed=0)
    mesh = Mesh()
    state = begin_state(run, mesh, None)
    expected = []
    for epoch in range(2):
        plan = pack_samples(run.sizes, None, run.settings.batch, 2, 0, epoch)
        for step in range(plan.num_steps):
            batches = [
                run.task.collate(
                    [run.train[int(i)] for i in plan.batch(rank, step)],
                    plan.batch(rank, step),
                    plan.weights(rank, step),
                )
                for rank in range(2)
            ]
            result = train_step(run, state, run.model, batches, lr=0.01, mesh=mesh)
            expected.append(result)
    found = [record for record in tiny.records(two) if record["kind"] == "step"]
    assert len(found) == len(expected)
    for record, result in zip(found, expected, strict=True):
        assert record["loss"] == pytest.approx(result.loss, rel=0, abs=1e-10)
        assert record["grad_norm"] == pytest.approx(result.grad_norm, rel=0, abs=1e-9)
        assert record["sizes"] == result.sizes


def test_two_processes_share_every_epoch_and_validation(two):
    seen = [json.loads((two / f"seen{rank}.json").read_text()) for rank in range(2)]
    assert Counter(i for one in seen for batch in one for i in batch) == dict.fromkeys(
        range(len(ranks.SIZES)), 2
    )
    epochs = [record for record in tiny.records(two) if record["kind"] == "epoch"]
    assert [record["valid"]["graphs"] for record in epochs] == [7, 7]
    names = {path.name for path in next((two / "checkpoints").iterdir()).iterdir()}
    assert {"rng-rank0.safetensors", "rng-rank1.safetensors"} <= names


def test_a_signal_to_one_rank_stops_all_and_one_process_goes_on(tmp_path):
    done = start("stop", tmp_path)
    assert done.returncode == 0, done.stderr
    task = tiny.TinyTask()
    fit(ranks.make(tmp_path, task=task, resume=True, train={"epochs": 1}))
    seen = [json.loads((tmp_path / f"stop{rank}.json").read_text()) for rank in range(2)]
    both = Counter(i for one in [*seen, task.seen] for batch in one for i in batch)
    assert both == dict.fromkeys(range(len(ranks.SIZES)), 1)
    assert all(len(one) < len(ranks.SIZES) // 2 for one in seen)
    changes = next(r for r in tiny.records(tmp_path) if r["kind"] == "resume")["changes"]
    assert changes == {"ranks": ["2", "1"]}


@pytest.mark.parametrize("mode", ["fail", "stuck"])
def test_a_rank_that_fails_ends_the_others_with_its_error(tmp_path, mode):
    """Also a rank that is busy and not in a collective."""
    begin = time.monotonic()
    done = start(mode, tmp_path)
    assert done.returncode != 0
    assert time.monotonic() - begin < 30
    assert "the dog ate sample 3" in done.stderr


def test_a_loss_that_is_not_a_number_stops_all_ranks_and_names_the_sample(tmp_path):
    done = start("diverge", tmp_path)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors
    assert all("the loss became nan" in line and "cloud 3" in line for line in errors)
