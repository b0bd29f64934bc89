"""Two gloo processes on a CPU."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import rank as ranks
import tiny
import torch
from forks import end_of, fork, free_port

from bevatron.parallel import failures
from bevatron.parallel.mesh import Mesh
from bevatron.testing import AwkwardGraph
from bevatron.train.epochs import pack_samples
from bevatron.train.loop import begin_state, fit
from bevatron.train.step import train_step

SCRIPT = Path(ranks.__file__)
IN_TIME = 100
"""Seconds: less than a collective waits, more than a busy machine needs."""


@dataclass(frozen=True)
class Outcome:
    codes: list[int]
    errors: str


def start(mode: str, folder: Path, world: int = 2, timeout: float = 120.0) -> Outcome:
    """Run a mode of ``rank.py`` in forked processes (torch is imported already)."""
    if torch.cuda.is_available():
        pytest.skip("torch with CUDA cannot go on after a fork")
    outputs = [folder / f"output{rank}" for rank in range(world)]
    children = fork(world, lambda _: ranks.MODES[mode](folder), outputs.__getitem__)
    codes = end_of(children, timeout)
    return Outcome(codes, "".join(output.read_text() for output in outputs))


def test_a_forked_rank_does_not_finalise_garbage_of_its_parent(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("torch with CUDA cannot go on after a fork")
    parent = os.getpid()

    class Left:
        def __init__(self):
            self.own = self  # only a collection finds it

        def __del__(self):
            if os.getpid() != parent:
                os._exit(7)

    gc.disable()
    try:
        Left()
        children = fork(1, lambda _: gc.collect() and 0, lambda _: tmp_path / "output")
        assert end_of(children, 30) == [0]
    finally:
        gc.enable()


def torchrun(mode: str, folder: Path, world: int = 2) -> tuple[int, str]:
    """Run a mode of ``rank.py`` under torchrun; return its exit status and output."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK"))}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={world}"]
    launcher += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    output = folder / "output"
    with (
        output.open("w") as file,
        subprocess.Popen(
            [sys.executable, *launcher, str(SCRIPT), mode, str(folder)],
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        ) as process,
    ):
        try:
            code = process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    return code, output.read_text()


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    """Let torch import here what every forked process would import again."""
    fit(tiny.make_run(tmp_path_factory.mktemp("warm"), count=4, train={"epochs": 1}))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(failures, "GRACE_SECONDS", 2.0)
    monkeypatch.setattr(failures, "WATCH_SECONDS", 0.3)


def test_collectives_between_two_processes(tmp_path):
    done = start("talk", tmp_path)
    assert done.codes == [0, 0], done.errors
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == {
            "bytes": [0, 1],
            "json": [{"rank": 0}, {"rank": 1}],
            "broadcast": 7,
            "sum": 3.0,
        }


def test_types_and_shapes_are_checked_in_the_first_process(tmp_path):
    wrong = torch.zeros(3, 4, dtype=torch.int64)
    outputs = [tmp_path / f"output{rank}" for rank in range(2)]
    codes = end_of(fork(2, lambda _: AwkwardGraph("", 2, wrong) and 7, outputs.__getitem__), 60)
    assert codes == [99, 7]
    assert "edges" in outputs[0].read_text()


def test_ranks_that_met_before_meet_again(tmp_path):
    done = start("meet-again", tmp_path, timeout=60)
    assert done.codes == [0, 0], done.errors
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == [2.0, 4.0, 6.0]


def test_ranks_agree_on_a_measured_capacity_and_keep_it(tmp_path):
    done = start("capacity", tmp_path)
    assert done.codes == [0, 0], done.errors
    for rank in range(2):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        assert found == [{"atoms": 99, "edges": 500}] * 2


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A run of two processes."""
    folder = tmp_path_factory.mktemp("two")
    if torch.cuda.is_available():
        code, errors = torchrun("train", folder)
        assert code == 0, errors
    else:
        done = start("train", folder)
        assert done.codes == [0, 0], done.errors
    return folder


def walk_both_ranks(run):
    """Train in this process, each step over the batches of two ranks."""
    mesh, found = Mesh(), []
    state = begin_state(run, mesh, None)
    for epoch in range(2):
        plan = pack_samples(run.sizes, None, run.settings.batch, 2, 0, epoch)
        for step in range(plan.num_steps):
            batches = [
                run.task.collate(
                    [run.train[int(i)] for i in plan.batch(rank, step)],
                    plan.batch(rank, step),
                    plan.weights(rank, step).tolist(),
                )
                for rank in range(2)
            ]
            found.append(train_step(run, state, run.model, batches, lr=0.01, mesh=mesh))
    return found


def assert_same_steps(folder, expected):
    found = [record for record in tiny.records(folder) if record["kind"] == "step"]
    assert len(found) == len(expected) > 0
    for record, result in zip(found, expected, strict=True):
        assert record["loss"] == pytest.approx(result.loss, rel=0, abs=1e-10)
        assert record["grad_norm"] == pytest.approx(result.grad_norm, rel=0, abs=1e-9)
        assert record["sizes"] == result.sizes


def test_two_processes_have_the_losses_of_one_that_walks_both_ranks_batches(two, tmp_path):
    """Batches unequal, some of a single point; within 1e-10."""
    run = ranks.make(tmp_path)
    run.model = tiny.TinyModel(seed=0)
    assert_same_steps(two, walk_both_ranks(run))


def test_two_processes_train_a_potential_as_one_that_walks_both_ranks_batches(tmp_path):
    """Forces by differentiation; molecules of unequal size, one of them a single atom."""
    done = start("mace", tmp_path)
    assert done.codes == [0, 0], done.errors
    assert_same_steps(tmp_path, walk_both_ranks(ranks.mace(tmp_path / "one")))


def test_two_processes_share_every_epoch_and_validation(two):
    seen = [json.loads((two / f"seen{rank}.json").read_text()) for rank in range(2)]
    assert Counter(i for one in seen for batch in one for i in batch) == dict.fromkeys(
        range(len(ranks.SIZES)), 2
    )
    epochs = [record for record in tiny.records(two) if record["kind"] == "epoch"]
    assert [record["valid"]["graphs"] for record in epochs] == [7, 7]
    names = {path.name for path in next((two / "checkpoints").iterdir()).iterdir()}
    assert {"rng-rank0.safetensors", "rng-rank1.safetensors"} <= names


def test_no_rank_is_over_before_the_first_has_written_all(tmp_path):
    done = start("end", tmp_path)
    assert done.codes == [0, 0], done.errors
    assert all(json.loads((tmp_path / f"end{rank}.json").read_text()) for rank in range(2))


def test_a_signal_to_one_rank_stops_all_and_one_process_goes_on(tmp_path):
    done = start("stop", tmp_path)
    assert done.codes == [0, 0], done.errors
    task = tiny.TinyTask()
    fit(ranks.make(tmp_path, task=task, resume=True, train={"epochs": 1}))
    seen = [json.loads((tmp_path / f"stop{rank}.json").read_text()) for rank in range(2)]
    both = Counter(i for one in [*seen, task.seen] for batch in one for i in batch)
    assert both == dict.fromkeys(range(len(ranks.SIZES)), 1)
    assert all(len(one) < len(ranks.SIZES) // 2 for one in seen)
    changes = next(r for r in tiny.records(tmp_path) if r["kind"] == "resume")["changes"]
    assert changes == {"ranks": ["2", "1"]}


def test_a_report_that_fails_ends_the_ranks_that_wait_for_it(tmp_path):
    begin = time.monotonic()
    done = start("fail-at-the-end", tmp_path)
    assert time.monotonic() - begin < IN_TIME
    assert 0 not in done.codes
    assert "error: no room for a report" in done.errors


@pytest.mark.parametrize("mode", ["fail", "stuck"])
def test_a_rank_that_fails_ends_the_others_with_its_error(tmp_path, mode):
    """Also one that is busy outside any collective."""
    begin = time.monotonic()
    done = start(mode, tmp_path)
    assert time.monotonic() - begin < IN_TIME
    assert 0 not in done.codes
    assert "rank 1 failed: BevatronError: the dog ate sample 3" in done.errors


@pytest.mark.parametrize("mode", ["killed", "killed-while-busy", "first-killed"])
def test_a_rank_that_is_killed_ends_the_others_which_say_so(tmp_path, mode):
    """It can leave no message itself; the other waits for it, or is busy outside any collective."""
    done = start(mode, tmp_path)
    victim = 0 if mode == "first-killed" else 1
    assert time.time() - (tmp_path / f"output{victim}").stat().st_mtime < 30
    assert done.codes[victim] == -signal.SIGKILL
    assert done.codes[1 - victim] > 0
    sentence = f"error: rank {victim} failed: "
    assert sentence in (tmp_path / f"output{1 - victim}").read_text()
    assert victim == 0 or "it ended without a message: killed" in done.errors


def test_under_torchrun_a_rank_that_fails_ends_the_run_with_its_error(tmp_path):
    code, output = torchrun("fail", tmp_path)
    assert code == 1
    assert "error: the dog ate sample 3" in output


def test_a_loss_that_is_not_a_number_stops_all_ranks_and_names_the_sample(tmp_path):
    done = start("diverge", tmp_path)
    assert done.codes == [2, 2]
    errors = [line for line in done.errors.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert all("the loss became nan" in line and "cloud 3" in line for line in errors)


def test_captured_steps_of_two_ranks_equal_launched_ones(tmp_path):
    for mode in ("launched", "captured"):
        (tmp_path / mode).mkdir()
        done = start(mode, tmp_path / mode)
        assert done.codes == [0, 0], done.errors
    assert "steps are captured" in (tmp_path / "captured" / "log.txt").read_text()
    expected = tiny.losses(tmp_path / "launched")
    assert tiny.losses(tmp_path / "captured") == pytest.approx(expected, rel=1e-10)


def test_a_captured_loss_that_is_not_finite_stops_all_ranks(tmp_path):
    done = start("captured-diverge", tmp_path)
    assert done.codes == [2, 2], done.errors
    errors = [line for line in done.errors.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert all("the loss became inf" in line and "molecule 3" in line for line in errors)


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@needs_two_gpus
def test_two_gpus_have_the_losses_of_two_cpus(two, tmp_path):
    code, output = torchrun("gpus", tmp_path)
    assert code == 0, output
    assert tiny.losses(tmp_path) == pytest.approx(tiny.losses(two), rel=1e-10)


@pytest.mark.gpu
@needs_two_gpus
def test_captured_steps_of_two_gpus_equal_launched_ones(tmp_path):
    for mode in ("launched", "captured"):
        (tmp_path / mode).mkdir()
        code, output = torchrun(f"{mode}-gpus", tmp_path / mode)
        assert code == 0, output
    expected = tiny.losses(tmp_path / "launched")
    assert tiny.losses(tmp_path / "captured") == pytest.approx(expected, rel=1e-9)


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("mode", ["fail-gpus", "stuck-gpus"])
def test_a_rank_that_fails_on_a_gpu_ends_the_others(tmp_path, mode):
    """NCCL notices nothing by itself: the other rank waits in a reduction or is busy."""
    begin = time.monotonic()
    code, output = torchrun(mode, tmp_path)
    assert code != 0
    assert "error: the dog ate sample 3" in output
    assert time.monotonic() - begin < IN_TIME


def test_norms_of_ddp_buckets_clip_as_the_norm_of_all_gradients_would(tmp_path):
    assert start("clip", tmp_path).codes == [0, 0]
    found = [torch.load(tmp_path / f"clipped{rank}") for rank in range(2)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 400), torch.nn.Tanh(), torch.nn.Linear(400, 2))
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            (model(x.double()).square().mean() / 2).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
    for one in found:
        assert one["norms"] == pytest.approx(norms, rel=1e-5)
        for weight, expected in zip(one["weights"], model.parameters(), strict=True):
            assert torch.allclose(weight, expected, rtol=1e-6, atol=1e-8)


def test_gradients_are_summed_during_the_backward_pass_also_where_a_rank_has_none(tmp_path):
    """Three buckets, of which rank 1 never completes the one that is summed first."""
    done = start("sums", tmp_path)
    assert done.codes == [0, 0], done.errors
    expected = [0.0] * 8
    for rank in range(2):
        model = ranks.Forked()
        for x in torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(rank)).double():
            model(x, rank).square().sum().backward()
        for i, parameter in enumerate(model.parameters()):
            expected[i] = expected[i] + (0.0 if parameter.grad is None else parameter.grad)
    for rank, began in enumerate(([3, 3], [0, 0])):
        found = torch.load(tmp_path / f"sums{rank}")
        assert found["began"] == began
        assert found["order"] == [2, 1, 0]
        assert len(found["gradients"]) == 3
        for gradients in found["gradients"]:
            for one, other in zip(gradients, expected, strict=True):
                assert torch.equal(one, other)
