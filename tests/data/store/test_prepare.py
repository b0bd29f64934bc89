"""Preparation: parallel, shared, killed at any moment, and never of other inputs than asked for."""

import errno
import multiprocessing
import os
import random
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from bevatron import files
from bevatron.data.samples import STRUCTURE_FIELDS
from bevatron.data.store.prepare import prepare, rank_and_world
from bevatron.data.store.progress import progress
from bevatron.data.store.store import Store
from bevatron.data.store.workers import run_jobs
from bevatron.data.summary.structures import summarise_structures
from bevatron.errors import ConfigError, DataError, StoreError

sys.path.insert(0, str(Path(__file__).parent))
import fake_reader as fake  # worker processes can import it too

from killing import killed_at_each_step

SETTINGS = {"cutoff": 5.0, "kind": "all pairs"}


def run(out, reader=None, featurize=fake.all_pairs, settings=SETTINGS, **options):
    options = {"samples_per_shard": 16, "workers": 0, "progress": False, "world": 1, "rank": 0} | (
        options
    )
    reader = reader or fake.FakeReader()
    return prepare(
        reader,
        featurize,
        out,
        STRUCTURE_FIELDS,
        settings,
        summarise=summarise_structures,
        **options,
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Every file of an uninterrupted preparation of 40 samples in 3 shards."""
    return contents(run(tmp_path_factory.mktemp("expected") / "s").path)


def test_store_holds_the_featurized_samples_in_order(tmp_path):
    store = run(tmp_path / "s")
    assert len(store) == 40
    for index, sample in enumerate(store):
        wanted = fake.all_pairs(fake.structure(index))
        for name, value in wanted.items():
            np.testing.assert_array_equal(sample[name], value)
        assert store.describe(index) == fake.FakeReader().describe(index)
    manifest = store.manifest
    assert manifest["settings"] == SETTINGS
    assert manifest["sources"] == ["water.xyz", "salt.xyz"]
    assert manifest["num_samples"] == 40
    assert manifest["counts"]["edges"] == sum(store.lengths("edges"))
    assert sorted(p.name for p in store.path.iterdir()) == [
        "manifest.json",
        *(f"shard-{i:06d}.arrow" for i in range(3)),
    ]


def test_workers_write_the_same_bytes(tmp_path, expected):
    store = run(tmp_path / "s", workers=2)
    assert contents(store.path) == expected


def test_short_work_is_done_before_processes_have_begun(tmp_path, expected, monkeypatch):
    def refuse(work):
        raise AssertionError(f"a process for {work}")

    with monkeypatch.context() as patch:
        patch.setattr("bevatron.data.store.workers._Worker", refuse)
        run(tmp_path / "here", workers=None)
    monkeypatch.setattr("bevatron.data.store.prepare._SECONDS_TO_START", 0.0)
    run(tmp_path / "there", workers=None)
    assert contents(tmp_path / "here") == contents(tmp_path / "there") == expected


def test_lines_of_progress_do_not_repeat(capsys, monkeypatch):
    monkeypatch.setattr("bevatron.data.store.progress._SECONDS_BETWEEN_LINES", -1.0)
    with progress("prepare", total=3) as advance:
        advance(1)
        advance(2)
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["1", "3"]


def test_second_call_changes_nothing(tmp_path, expected):
    run(tmp_path / "s")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "s").iterdir()}

    def fail(sample):
        raise AssertionError

    run(tmp_path / "s", featurize=fail, samples_per_shard=7)
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "s").iterdir()} == before


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_lost_shard_alone_is_made_again(tmp_path, expected, damage):
    out = run(tmp_path / "s").path
    victim = out / "shard-000001.arrow"
    before = (out / "shard-000000.arrow").stat().st_mtime_ns
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:1000])
    with pytest.raises(StoreError, match="run prepare again"):
        Store.open(out)
    run(out)
    assert contents(out) == expected
    assert (out / "shard-000000.arrow").stat().st_mtime_ns == before


# ---- killed ----


def test_killed_at_every_step_it_continues_and_ends_the_same(tmp_path, expected):
    unfinished = 0
    for out in killed_at_each_step(run, tmp_path):
        finished = {p.name: p.stat().st_mtime_ns for p in out.glob("shard-*.arrow")}
        if not (out / "manifest.json").exists():
            unfinished += 1
            if (out / "preparation.json").exists():
                with pytest.raises(StoreError, match="preparation did not finish; run the same"):
                    Store.open(out)
        store = run(out)
        for name, written in finished.items():
            assert (out / name).stat().st_mtime_ns == written, "a finished shard was done again"
        assert contents(out) == expected
        assert len(store) == 40
    assert unfinished > 15


def prepare_slowly(out):
    run(out, reader=fake.FakeReader(delay=0.004), workers=2)


def test_killed_at_random_times_with_workers_it_ends_the_same(tmp_path, expected):
    run(tmp_path / "warm", workers=2)  # starts the server that workers come from
    context = multiprocessing.get_context("fork")
    rng = random.Random(4)
    for attempt in range(4):
        out = tmp_path / f"s{attempt}"
        for _ in range(5):
            process = context.Process(target=prepare_slowly, args=(out,))
            process.start()
            process.join(rng.uniform(0.02, 0.25))
            process.kill()
            process.join()
        run(out, reader=fake.FakeReader())
        assert contents(out) == expected


def test_workers_of_a_killed_preparation_leave(tmp_path):
    run(tmp_path / "warm", workers=2)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=prepare_slowly, args=(tmp_path / "s",))
    before = set(psutil.Process().children(recursive=True))
    process.start()
    time.sleep(0.15)
    process.kill()
    process.join()
    deadline = time.monotonic() + 60
    while set(psutil.Process().children(recursive=True)) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(psutil.Process().children(recursive=True)) - before


# ---- shared ----


def share(out, rank, world, patience=30.0):
    run(out, reader=fake.FakeReader(delay=0.002), rank=rank, world=world, patience=patience)


def test_ranks_share_the_work_and_all_get_the_store(tmp_path, expected):
    context = multiprocessing.get_context("fork")
    out = tmp_path / "s"
    processes = [context.Process(target=share, args=(out, rank, 3)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert contents(out) == expected


@pytest.mark.parametrize("name", ["preparation.json", "shard-000001.arrow", "manifest.json"])
def test_another_process_finishes_while_a_file_is_written(tmp_path, expected, hook, name):
    out = tmp_path / "s"
    waiting = [name]

    def other_process(step, path):
        if step == "rename" and path.name in waiting:
            waiting.clear()
            run(out)  # tidies up: our unfinished file is gone

    hook(other_process)
    assert len(run(out)) == 40
    assert not waiting
    assert contents(out) == expected


def test_the_share_of_a_rank_that_never_comes_is_taken_over(tmp_path, expected):
    share(tmp_path / "s", 1, 3, patience=0.2)
    assert contents(tmp_path / "s") == expected


def test_rank_and_world_come_from_the_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM", "OMPI")) or name in {"RANK", "WORLD_SIZE"}:
            monkeypatch.delenv(name)
    assert rank_and_world() == (0, 1)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert rank_and_world() == (3, 8)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert rank_and_world() == (3, 4)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert rank_and_world() == (1, 2)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert rank_and_world() == (5, 6)
    assert rank_and_world(0, 1) == (0, 1)
    with pytest.raises(ConfigError, match="rank"):
        rank_and_world(2, 2)
    with pytest.raises(ConfigError, match="both or neither"):
        rank_and_world(rank=2)


# ---- other inputs ----


def test_a_changed_setting_is_refused_and_said(tmp_path, expected):
    out = run(tmp_path / "s").path
    with pytest.raises(StoreError, match=r"\(cutoff was 5.0, is now 6.0\); choose another folder"):
        run(out, settings={**SETTINGS, "cutoff": 6.0})
    with pytest.raises(StoreError, match="content of the input files"):
        run(out, reader=fake.FakeReader(version="b"))
    with pytest.raises(StoreError, match="sources was"):
        run(out, reader=fake.FakeReader(sources=("a.xyz", "b.xyz")))
    assert contents(out) == expected


def test_a_changed_setting_is_refused_while_unfinished(tmp_path, hook):
    def full(name, path):
        if "shard-000001" in path.name:
            raise OSError(errno.ENOSPC, "full")

    hook(full)
    with pytest.raises(StoreError, match=r"shard-000001.arrow: .* the disk is full"):
        run(tmp_path / "s")
    with pytest.raises(StoreError, match=r"cutoff was 5.0, is now 4.0"):
        run(tmp_path / "s", settings={**SETTINGS, "cutoff": 4.0})


def test_overwrite_replaces_everything_and_uses_no_stale_shard(tmp_path):
    out = run(tmp_path / "s", samples_per_shard=5, settings={"cutoff": 4.0}).path
    (out / "shard-000099.arrow.00000000.tmp").write_bytes(b"left by a kill")
    store = run(out, overwrite=True)
    assert store.manifest["settings"] == SETTINGS
    fresh = run(tmp_path / "fresh").path
    assert contents(out) == contents(fresh)


def test_overwriting_that_stops_half_way_leaves_no_store_of_mixed_shards(tmp_path, hook, expected):
    out = run(tmp_path / "s", settings={"cutoff": 4.0}).path

    def full(name, path):
        if "shard-000001" in path.name:
            raise OSError(errno.ENOSPC, "full")

    hook(full)
    with pytest.raises(StoreError, match="disk is full"):
        run(out, overwrite=True)
    with pytest.raises(StoreError, match="did not finish"):
        Store.open(out)
    files.crash_hooks.remove(full)
    run(out)
    files.crash_hooks.append(full)
    assert contents(out) == expected


def test_stale_shards_under_an_unfinished_preparation_are_not_used(tmp_path, expected):
    """Killed right after overwriting began: old shards lie beside the new plan."""
    out = run(tmp_path / "s", settings={"cutoff": 4.0}).path
    other = tmp_path / "other"
    with pytest.raises(DataError):
        run(other, featurize=fake.refuse_sample_23)
    shutil.copy(other / "preparation.json", out / "preparation.json")
    (out / "manifest.json").unlink()
    run(out)
    assert contents(out) == expected


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(StoreError, match=r"holds something else \('thesis.tex'\)"):
        run(tmp_path)
    with pytest.raises(StoreError, match="holds something else"):
        run(tmp_path, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreError, match=r"thesis.tex"):
        run(tmp_path / "thesis.tex")


def test_manifest_of_another_program_is_left_alone(tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(StoreError, match="not written by bevatron"):
        run(tmp_path, overwrite=True)


# ---- bad samples ----


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_named_and_finished_shards_are_kept(tmp_path, workers, expected):
    name = r"salt.xyz, frame 11"
    with pytest.raises(DataError, match=f"^{name}: two atoms coincide$"):
        run(tmp_path / "s", featurize=fake.refuse_sample_23, workers=workers)
    with pytest.raises(DataError, match=f"^{name}: ZeroDivisionError: division by zero$"):
        run(tmp_path / "s", featurize=fake.crash_at_sample_23, workers=workers)
    run(tmp_path / "s")
    assert contents(tmp_path / "s") == expected


def test_a_worker_that_is_killed_is_reported(tmp_path):
    with pytest.raises(StoreError, match=r"worker died \(signal SIGKILL\) while it wrote shard 1"):
        run(tmp_path / "s", featurize=fake.die_at_sample_23, workers=2)


def test_a_worker_that_is_killed_in_a_message_is_reported_too():
    with pytest.raises(StoreError, match=r"worker died \(signal SIGKILL\) while it wrote shard 5"):
        run_jobs(fake.die_in_a_message, [5], 1, lambda _: None)


def test_featurize_must_give_the_fields(tmp_path):
    with pytest.raises(DataError, match=r"water.xyz, frame 0: the field 'edges' is missing"):
        run(tmp_path / "s", featurize=fake.forget_edges)
    with pytest.raises(DataError, match="field 'positions': expected float64"):
        run(tmp_path / "s", featurize=fake.wrong_type)


def test_no_samples_and_no_plain_settings_are_refused(tmp_path):
    with pytest.raises(DataError, match="holds no samples"):
        run(tmp_path / "s", reader=fake.FakeReader(num_samples=0))
    with pytest.raises(ConfigError, match="plain values"):
        run(tmp_path / "s", settings={"cutoff": object()})
    with pytest.raises(ConfigError, match="samples_per_shard"):
        run(tmp_path / "s", samples_per_shard=0)


def test_read_only_folder_is_one_sentence(tmp_path, hook):
    def refuse(name, path):
        raise OSError(errno.EROFS, "read-only")

    hook(refuse)
    with pytest.raises(StoreError, match=f"{tmp_path}/s/.* the file system is read-only"):
        run(tmp_path / "s")


# ---- what is told ----


def test_summary_counts_what_is_there(tmp_path):
    store = run(tmp_path / "s", workers=0, samples_per_shard=7)
    summary = store.manifest["summary"]
    num_atoms = store.lengths("atomic_numbers")
    num_edges = store.lengths("edges")
    everything = summary["all"]
    assert everything["structures"] == 40
    assert everything["atoms"] == num_atoms.sum()
    assert everything["edges"] == num_edges.sum()
    assert everything["sizes"]["atoms"]["min"] == 0
    assert everything["sizes"]["edges"]["max"] == num_edges.max()
    assert sum(everything["sizes"]["atoms"]["histogram"].values()) == 40
    numbers = np.concatenate([flat for flat, _ in store.flat("atomic_numbers")])
    assert everything["elements"] == {
        str(z): int((numbers == z).sum()) for z in np.unique(numbers)
    } | {k: v for k, v in everything["elements"].items() if v == 0}
    degrees = num_atoms - 1
    assert everything["neighbours"]["max"] == degrees.max()
    assert everything["neighbours"]["histogram"]["4"] == num_atoms[degrees == 4].sum()
    assert everything["labels"]["energy"] == sum(i % 3 != 0 for i in range(40))
    assert everything["labels"]["stress"] == 0
    assert everything["labels"]["none"] == sum(i % 3 == 0 for i in range(40))
    assert summary["files"]["0"]["structures"] == 20
    assert summary["files"]["0"]["atoms"] == num_atoms[::2].sum()
    assert summary["groups"] == {"even": 20, "": 20}
    flat = np.concatenate([flat for flat, _ in store.flat("forces")])
    assert everything["forces"]["sum_squares"] == pytest.approx(np.square(flat).sum())
    assert everything["energy_per_atom"]["min"] == -1.5


@pytest.mark.parametrize(
    ("settings", "units"),
    [({}, "frames"), ({"unit": "file"}, "files"), ({"unit": "query"}, "queries")],
)
def test_progress_tells_what_is_counted_rate_and_end(settings, units, tmp_path, capsys):
    run(tmp_path / "s", settings=settings, progress=True)
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"prepare: 40 of 40 {units} (100 %), ")
    assert f"{units}/s" in last


def test_progress_of_a_continued_preparation_begins_where_it_stopped(tmp_path, capsys):
    with pytest.raises(DataError):
        run(tmp_path / "s", featurize=fake.refuse_sample_23)
    run(tmp_path / "s", progress=True)
    assert "40 of 40" in capsys.readouterr().err.strip().splitlines()[-1]


def test_fingerprint_is_the_same_for_the_same_inputs(tmp_path):
    a = run(tmp_path / "a", samples_per_shard=3).manifest
    b = run(tmp_path / "b").manifest
    assert a["fingerprint"] == b["fingerprint"]
    for key in ("structures", "atoms", "labels", "neighbours", "sizes", "elements"):
        assert a["summary"]["all"][key] == b["summary"]["all"][key]
