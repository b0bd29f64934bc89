"""Runs whose processes share samples: losses of one process, other groups, a process that fails."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))
from forks import free_port
from graph_ranks import fork_ranks, run_ranks

from bevatron.cli import main
from bevatron.errors import ConfigError
from bevatron.models.common.folding import Checkpointing
from bevatron.models.common.model_folder import load_model_folder
from bevatron.parallel.traffic import count_traffic
from bevatron.recipes import shared_samples, staged_run
from bevatron.recipes.alphafold2.run import AlphaFold2Run, build
from bevatron.recipes.staged_run import ParallelConfig
from bevatron.train.logger import read_journal
from bevatron.train.loop import fit
from bevatron.train.memory_plan import MemoryPlan, NotPlannableError
from bevatron.train.run import SamplesInGroups


@pytest.fixture
def values(store, tiny_model, tmp_path):
    return {
        "recipe": "alphafold2",
        "output": str(tmp_path / "run"),
        "preset": "small",
        "model": tiny_model,
        "data": {"train": [str(store)], "valid_fraction": 0.34, "valid_longest": 80},
        "stages": {
            "initial": {
                "steps": 4, "samples_per_step": 2, "evaluate_every": 2, "crop": 15, "rows": 4,
                "extra_rows": 5,
            }
        },
        "checkpoint": {"every_steps": 2, "keep": 9},
        "train": {"device": "cpu", "threads": 1, "timeout_minutes": 2.0},
        "report": False,
    }  # fmt: skip


@pytest.fixture
def config(values):
    return AlphaFold2Run.from_values({k: v for k, v in values.items() if k != "recipe"})


def grouped(config, size, **changes):
    return replace(config, parallel=ParallelConfig(size), **changes)


def records(folder):
    """What was logged, without what depends on the clock."""
    found = read_journal(Path(folder) / "metrics.jsonl")
    return [{k: v for k, v in one.items() if k not in {"time", "valid"}} for one in found]


def logged(folder, kind):
    return [one for one in records(folder) if one["kind"] == kind]


def weights(folder):
    return load_model_folder(folder).state


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "-m", "bevatron"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True, text=True, timeout=200, env=environment, check=False,
    )  # fmt: skip


def test_a_run_of_two_processes_per_sample_has_the_losses_of_one_process(values, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(values))
    assert main(["train", str(file)]) == 0
    together = tmp_path / "together"
    done = torchrun("train", file, "--parallel.axial", "2", "--output", together)
    assert done.returncode == 0, done.stderr[-4000:]
    one, two = logged(tmp_path / "run", "step"), logged(together, "step")
    assert len(one) == 4
    for expected, found in zip(one, two, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert found["sizes"] == expected["sizes"]
        assert found["numbers"] == expected["numbers"]
    valid = [
        [one["valid"] for one in read_journal(run / "metrics.jsonl") if one["kind"] == "epoch"]
        for run in (tmp_path / "run", together)
    ]
    assert valid[1] == [pytest.approx(each, rel=1e-3, abs=1e-4) for each in valid[0]]
    assert logged(together, "epoch")[-1]["samples"] == 8


def test_a_run_goes_on_with_other_groups_of_processes(config, tmp_path):
    fit(build(config))
    begun = tmp_path / "begun"
    half = {"initial": replace(config.stages["initial"], steps=2)}

    def work(_):
        with count_traffic() as traffic:
            fit(build(grouped(config, 2, stages=half, output=begun)))
        fit(build(replace(config, output=begun), resume=True))
        return traffic.total

    assert all(run_ranks(2, work, tmp_path)), "samples were shared"
    for name, value in weights(tmp_path / "run").items():
        torch.testing.assert_close(weights(begun)[name], value, rtol=1e-3, atol=1e-4)


def test_a_killed_process_ends_those_that_share_its_sample(config, tmp_path):
    def work(mesh):
        run = build(grouped(config, 2))
        loss, calls = run.task.loss, []

        def deadly(*args):
            calls.append(args)
            if mesh.rank == 1 and len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss(*args)

        run.task.loss = deadly
        fit(run)

    began = time.monotonic()
    codes, _ = fork_ranks(2, work, tmp_path)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] > 0
    assert time.monotonic() - began < 60  # 30 s, on a busy machine


@pytest.mark.parametrize(("world", "size"), [(2, 1), (4, 2), (8, 4), (3, 3)])
def test_auto_lets_as_few_processes_share_a_sample_as_keep_all_at_work(
    config, monkeypatch, world, size
):
    """A step has two samples."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    chosen = replace(config, parallel=ParallelConfig("auto"))
    assert chosen.processes_per_sample[0] == chosen.sharing.repeats == size


def test_auto_with_nobody_left_to_train_is_refused_in_one_sentence(config, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    chosen = replace(
        config, parallel=ParallelConfig("auto"), train=replace(config.train, evaluation_ranks=1)
    )
    with pytest.raises(ConfigError, match="1 of 1 process would validate and none would train"):
        fit(build(chosen))


@pytest.mark.parametrize(
    ("gib", "size", "kind"),
    [(120, 1, "none"), (60, 1, "pair"), (22, 1, "all"), (15, 2, "all"), (1, 4, "all")],
)
def test_auto_shares_samples_and_computes_again_only_as_memory_makes_it(
    config, monkeypatch, gib, size, kind
):
    """As if a step took 100 GiB, half of it with pair blocks computed again, a fifth with all."""
    shares = {"none": 1.0, "pair": 0.5, "all": 0.2}
    planned = []

    def plan(run, number, *, gpu):
        policies = {
            m.checkpointing.kind for m in run.model.modules() if hasattr(m, "checkpointing")
        }
        planned.append((run.sharing.repeats, *policies))
        assert gpu
        assert run.stages[number].name == "initial"
        peak = int(100 * 2**30 * shares[policies.pop()] / run.sharing.repeats)
        return MemoryPlan(0, 0, 0, 0, peak)

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(shared_samples, "memory_of_stage", plan)
    monkeypatch.setattr(staged_run, "gpu_memory", lambda _: gib * 2**30)
    model = replace(config.model, checkpointing=Checkpointing("all"))
    stages = {"initial": replace(config.stages["initial"], samples_per_step=4)}
    run = build(replace(config, model=model, stages=stages, parallel=ParallelConfig("auto")))
    assert (run.sharing.repeats, planned[-1]) == (size, (size, kind))
    assert run.notes[-1].startswith("parallel.axial: ")
    assert ("GPUs compute a sample" in run.notes[-1]) == (size > 1)
    assert run.notes[-1].endswith("may not suffice") == (gib == 1)


def test_processes_with_gpus_of_different_memory_choose_by_the_smallest(tmp_path):
    def work(mesh):
        return shared_samples.smallest((3 - mesh.rank) * 2**30, mesh)

    assert run_ranks(2, work, tmp_path) == [2 * 2**30] * 2


def test_auto_says_so_if_no_memory_can_be_planned(config, monkeypatch):
    def plan(run, number, *, gpu):
        del run, number, gpu
        return NotPlannableError("values")

    monkeypatch.setattr(shared_samples, "memory_of_stage", plan)
    monkeypatch.setattr(staged_run, "gpu_memory", lambda _: 2**30)
    note = build(replace(config, parallel=ParallelConfig("auto"))).notes[-1]
    assert note.endswith("; its memory cannot be planned")
    assert "GiB" not in note


def test_settings_that_would_part_the_processes_of_a_sample_are_refused(config):
    assert grouped(config, 3).sharing == SamplesInGroups(3)
    with pytest.raises(ConfigError, match=r"parallel\.axial: expected 1 or more, got 0"):
        ParallelConfig(0)
    for key in ("window", "leave_out"):
        with pytest.raises(ConfigError, match=r"leave out loader\.window and loader\.leave_out"):
            grouped(config, 2, loader=replace(config.loader, **{key: 2}))
    with pytest.raises(ConfigError, match="1 process cannot be divided into groups of 2; start"):
        fit(build(grouped(config, 2)))
