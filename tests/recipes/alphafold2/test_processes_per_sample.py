"""Runs whose processes share samples: losses of one process, other groups, a process that fails."""

import json
import os
import signal
import sys
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))
from graph_ranks import fork_ranks, run_ranks

from bevatron.cli import main
from bevatron.errors import ConfigError
from bevatron.models.common.folding import Checkpointing
from bevatron.parallel.mesh import Mesh
from bevatron.parallel.traffic import count_traffic
from bevatron.recipes.alphafold2.data import ChainDataset
from bevatron.recipes.alphafold2.run import AlphaFold2Run, build
from bevatron.recipes.proteins import shared_samples, staged_run
from bevatron.recipes.proteins.staged_run import ParallelConfig
from bevatron.train.course import Stages
from bevatron.train.logger import read_journal
from bevatron.train.loop import fit
from bevatron.train.memory_plan import MemoryPlan, NotPlannableError
from bevatron.train.run import SamplesInGroups
from bevatron.train.state import Progress


def values_of(store, tiny_model, folder):
    return {
        "recipe": "alphafold2",
        "output": str(folder / "run"),
        "preset": "small",
        "model": tiny_model,
        "data": {"train": [str(store)], "valid_size": 0.34, "valid_longest": 80},
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


def config_of(values):
    return AlphaFold2Run.from_values({k: v for k, v in values.items() if k != "recipe"})


@pytest.fixture
def values(store, tiny_model, tmp_path):
    return values_of(store, tiny_model, tmp_path)


@pytest.fixture
def config(values):
    return config_of(values)


@pytest.fixture(scope="module")
def alone(store, tiny_model, tmp_path_factory):
    """A run of one process without validation, which a test of its own compares."""
    config = config_of(values_of(store, tiny_model, tmp_path_factory.mktemp("alone")))
    config = replace(config, data=replace(config.data, valid_size=0.0))
    fit(build(config))
    return config


def grouped(config, size, **changes):
    return replace(config, parallel=ParallelConfig(size), **changes)


def records(folder):
    """What was logged, without what depends on the clock."""
    found = read_journal(Path(folder) / "metrics.jsonl")
    return [{k: v for k, v in one.items() if k not in {"time", "valid"}} for one in found]


def logged(folder, kind):
    return [one for one in records(folder) if one["kind"] == kind]


def same_steps(one, other):
    """Whether two runs took the same four steps, but for rounding."""
    one, other = logged(one, "step"), logged(other, "step")
    assert len(one) == 4
    for expected, found in zip(one, other, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert found["sizes"] == expected["sizes"]
        assert found["numbers"] == expected["numbers"]


def test_a_run_of_two_processes_per_sample_has_the_losses_of_one_process(values, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(values))
    assert main(["train", str(file)]) == 0
    together = tmp_path / "together"
    words = ["train", str(file), "--parallel.axial", "2", "--output", str(together)]
    assert run_ranks(2, lambda _: main(words), tmp_path) == [0, 0]
    same_steps(tmp_path / "run", together)
    valid = [
        [one["valid"] for one in read_journal(run / "metrics.jsonl") if one["kind"] == "epoch"]
        for run in (tmp_path / "run", together)
    ]
    assert valid[1] == [pytest.approx(each, rel=1e-3, abs=1e-4) for each in valid[0]]
    assert logged(together, "epoch")[-1]["samples"] == 8


def test_a_run_of_two_groups_goes_on_with_groups_of_another_size(alone, tmp_path):
    """Two groups of two processes with a sample each, then four processes for each sample."""
    begun = tmp_path / "begun"
    half = {"initial": replace(alone.stages["initial"], steps=2)}

    def work(_):
        with count_traffic() as traffic:
            fit(build(grouped(alone, 2, stages=half, output=begun)))
        fit(build(grouped(alone, 4, output=begun), resume=True))
        return traffic.total

    assert all(run_ranks(4, work, tmp_path)), "samples were shared"
    same_steps(alone.output, begun)


def test_a_killed_process_ends_those_that_share_its_sample_and_others_go_on(alone, tmp_path):
    """Killed in the third step of four by two processes; three take up the rest."""
    saving = replace(alone.checkpoint, every_steps=1)
    killed = replace(alone, checkpoint=saving, output=tmp_path / "killed")

    def until_killed(mesh):
        run = build(grouped(killed, 2))
        loss, calls = run.task.loss, []

        def deadly(*args):
            calls.append(args)
            if mesh.rank == 1 and len(calls) == 5:
                print("its last words", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            return loss(*args)

        run.task.loss = deadly
        fit(run)

    codes, _ = fork_ranks(2, until_killed, tmp_path)
    assert time.time() - (tmp_path / "output1").stat().st_mtime < 30
    assert codes[1] == -signal.SIGKILL
    assert codes[0] > 0
    assert len(logged(killed.output, "step")) == 2
    run_ranks(3, lambda _: fit(build(grouped(killed, 3), resume=True)).steps, tmp_path)
    same_steps(alone.output, killed.output)


@pytest.mark.slow
def test_processes_make_the_samples_of_a_run_in_turns_each_once(config, tmp_path):
    """Nothing else changes, to the last bit: with 8 draws and a chain that is validated twice."""
    size = 3  # of which none divides the draws

    def work(_, own):
        made = []
        sample = ChainDataset.sample

        def noted(data, index, seed):
            made.append([index, seed])
            return sample(data, index, seed)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ChainDataset, "sample", noted)
            if own:
                patch.setattr("bevatron.train.loop.sample_group", lambda: None)
            fit(build(grouped(config, size, output=tmp_path / str(own))))
        return made

    alone, turns = (
        run_ranks(size, lambda mesh, own=own: work(mesh, own), tmp_path) for own in (True, False)
    )
    assert records(tmp_path / "True") == records(tmp_path / "False")
    assert all(each == alone[0] for each in alone)
    assert len(alone[0]) == 10
    assert sorted(one for each in turns for one in each) == sorted(alone[0])
    assert all(len(each) >= 2 for each in turns)


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


GIB_OF_A_STEP = {"none": 100.0, "pair": 50.0, "all": 20.0, "segments": 12.0}
"""Of the longest crop, on one GPU."""


def planned_by_table(asked, longest, stays=None):
    """Plan steps by the table and the square of the crop; note in ``asked`` what was planned.

    All but the GiB that stay are activations; nothing is by default.
    """

    def plan(run, number, *, gpu):
        assert gpu
        stage, before = run.stages[number], deepcopy(run.model)
        model = deepcopy(run.model)
        if stage.set_up is not None:
            stage.set_up(model)
        (kind,) = policies_of(model)
        assert policies_of(before) == policies_of(run.model)
        asked.append((run.sharing.repeats, stage.name, kind))
        share = (int(stage.sizes["tokens"].max()) / longest) ** 2 / run.sharing.repeats
        size = int(GIB_OF_A_STEP[kind] * share * 2**30)
        return MemoryPlan(size if stays is None else stays * 2**30, 0, 0, 0, size)

    return plan


def policies_of(model):
    return {m.checkpointing.kind for m in model.modules() if hasattr(m, "checkpointing")}


def with_policy(config, kind):
    return replace(config, model=replace(config.model, checkpointing=Checkpointing(kind)))


def chosen_by(run):
    """Return what each stage computes again, as the trainer sets it up, and the notes."""
    kinds = []
    for number in range(len(run.stages)):
        Stages(run, Mesh()).begin(Progress(stage=number))
        kinds += policies_of(run.model)
    return kinds, [note for note in run.notes if "recomputes" in note]


@pytest.mark.parametrize(
    ("gib", "size", "kind"),
    [(120, 1, "none"), (60, 1, "pair"), (22, 1, "all"), (15, 1, "segments"), (7, 2, "segments"),
     (1, 4, "segments")],
)  # fmt: skip
def test_auto_shares_samples_and_computes_again_only_as_memory_makes_it(
    config, monkeypatch, gib, size, kind
):
    asked = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(shared_samples, "memory_of_stage", planned_by_table(asked, 15))
    monkeypatch.setattr(staged_run, "gpu_memory", lambda _: gib * 2**30)
    stages = {"initial": replace(config.stages["initial"], samples_per_step=4)}
    config = with_policy(replace(config, stages=stages, parallel=ParallelConfig("auto")), "auto")
    run = build(config)
    assert run.sharing.repeats == size
    assert (size, "initial", kind) in asked[-2:]
    kinds, (note,) = chosen_by(run)
    assert kinds == [kind]
    assert note.endswith("may not suffice") == (gib == 1)
    (who,) = (note for note in run.notes if note.startswith("parallel.axial: "))
    assert ("GPUs compute a sample" in who) == (size > 1)


def test_auto_computes_again_in_each_stage_what_its_crops_need(config, monkeypatch):
    """Long crops first: short ones need no plan of what fits those, nor of what cannot fit."""
    asked = []
    short, long = config.stages["initial"], replace(config.stages["initial"], crop=30)
    middle = replace(short, crop=22)
    stages = {"initial": short, "longer": long, "as long": long, "middle": middle}
    monkeypatch.setattr(shared_samples, "memory_of_stage", planned_by_table(asked, 30))
    monkeypatch.setattr(staged_run, "gpu_memory", lambda _: 56 * 2**30)
    run = build(with_policy(replace(config, stages=stages), "auto"))
    kinds, notes = chosen_by(run)
    assert kinds == ["none", "pair", "pair", "pair"]
    launched = [(1, "longer", "all"), (1, "initial", "all")]
    assert [one for one in asked if one not in launched] == [
        (1, "longer", "none"), (1, "longer", "pair"), (1, "initial", "none"),
    ]  # fmt: skip
    assert len(asked) == 5
    anew = "in steps of new shapes every block"
    assert notes == [
        f"stage initial recomputes nothing, {anew}: 25 of 56 GiB planned",
        f"stage longer recomputes pair blocks, {anew}: 50 of 56 GiB planned",
    ]
    assert run.stages[2].beside == run.stages[1].beside  # that of the longest that was planned


@pytest.mark.parametrize(
    ("captured", "gib", "kind"), [(None, 130, "none"), (None, 125, "pair"), (False, 120, "none")]
)
def test_steps_of_a_new_shape_compute_all_blocks_again_beside_the_graphs(
    config, monkeypatch, captured, gib, kind
):
    """10 GiB stay: with nothing computed again graphs need 90 and a tenth, a launched step 10."""
    monkeypatch.setattr(shared_samples, "memory_of_stage", planned_by_table([], 15, stays=10))
    monkeypatch.setattr(staged_run, "gpu_memory", lambda _: gib * 2**30)
    train = replace(config.train, cuda_graphs=captured)
    run = build(with_policy(replace(config, train=train), "auto"))
    assert chosen_by(run)[0] == [kind]
    (stage,) = run.stages
    if captured is False:
        assert stage.beside is None
        return
    usable = int(shared_samples.USABLE * gib * 2**30)
    assert stage.beside.graph_bytes == usable - 20 * 2**30
    stage.beside.set_up(run.model)
    assert policies_of(run.model) == {"all"}


def test_a_policy_that_is_given_is_kept_without_a_plan(config, monkeypatch):
    monkeypatch.setattr(staged_run, "gpu_memory", lambda _: pytest.fail("nothing is to choose"))
    assert chosen_by(build(with_policy(config, "pair"))) == (["pair"], [])


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
    assert note.endswith(": its memory cannot be planned")
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
