"""A run that is killed, stopped or moved to other batches loses nothing."""

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from bevatron import files
from bevatron.config import to_dict
from bevatron.errors import CheckpointError, ConfigError
from bevatron.parallel.mesh import open_mesh
from bevatron.train import loop
from bevatron.train.identity import check_identity, flatten
from bevatron.train.loop import fit
from bevatron.train.state import random_state, restore_random_state

SEVEN_STEPS = {"optim": {"accumulate": 2}, "checkpoint": {"every_steps": 3}}


def run_in_child(make, prepare=lambda: None, timeout=20.0) -> int:
    """Fit in a forked process, so that it can be killed; return its exit status."""
    if torch.cuda.is_available():
        pytest.skip("torch with CUDA cannot go on after a fork")
    child = os.fork()
    if child == 0:
        code = 99
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            prepare()
            code = fit(make()).exit_code
        finally:
            os._exit(code)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the run did not end in time")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)
    fit(tiny.make_run(folder, **SEVEN_STEPS))
    return folder


def test_an_uninterrupted_run_repeats_to_the_last_bit(whole, tmp_path):
    fit(tiny.make_run(tmp_path, **SEVEN_STEPS))
    tiny.same_end(whole, tmp_path)


def test_killed_at_random_times_and_resumed_gives_the_same_losses(whole, tmp_path):
    """Twenty kills of a run whose steps are slowed down, each resumed."""

    def make():
        task = tiny.TinyTask()
        loss = task.loss

        def slow(*args):
            time.sleep(0.003)
            return loss(*args)

        task.loss = slow
        return tiny.make_run(tmp_path, task=task, resume=True, **SEVEN_STEPS)

    pauses = random.Random(7)
    kills = 0
    while kills < 20:
        target = 0.03 + 0.12 * pauses.random()

        def alarm(target=target):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            killer = os.getpid()
            if os.fork() == 0:
                time.sleep(target)
                os.kill(killer, signal.SIGKILL)
                os._exit(0)

        status = run_in_child(make, alarm)
        kills += os.WIFSIGNALED(status)
        if status == 0:  # finished: begin again, so that all twenty hit a run
            tiny.same_end(whole, tmp_path)
            for path in [*tmp_path.glob("checkpoints/step-*/*"), *tmp_path.glob("best/*")]:
                path.unlink()
            for name in ("metrics.jsonl", "weights.safetensors"):
                (tmp_path / name).unlink()
            for path in tmp_path.glob("checkpoints/*"):
                path.rmdir()
    fit(make())
    tiny.same_end(whole, tmp_path)


def count_steps(folder: Path, **groups) -> list[tuple[str, str]]:
    """List the writes, fsyncs and renames of a run."""
    steps = []
    files.crash_hooks.append(lambda name, path: steps.append((name, path.name)))
    try:
        fit(tiny.make_run(folder, **groups))
    finally:
        files.crash_hooks.pop()
    return steps


def test_killed_at_every_write_fsync_and_rename_of_its_files(tmp_path):
    """One kill before every step of a run's second checkpoint, best weights and final files."""
    groups = {
        "count": 8,
        "train": {"epochs": 2},
        "checkpoint": {"keep": 1},
        "optim": {"ema": 0.9},
    }
    steps = count_steps(tmp_path / "whole", **groups)
    assert {name for name, _ in steps} >= {"write", "fsync", "rename", "fsync_folder", "remove"}
    first_epoch = next(
        i for i, (name, path) in enumerate(steps) if name == "remove" and path.startswith("step-")
    )
    # From the second epoch on, when older versions of everything are there.
    written = steps.index(("fsync_folder", "checkpoints"))
    begin = written + 1
    assert first_epoch > begin
    for crash in range(begin, len(steps)):
        folder = tmp_path / f"crash{crash}"

        def prepare(crash=crash):
            left = iter(range(crash, -1, -1))

            def hook(name, path):
                if next(left) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            files.crash_hooks.append(hook)

        status = run_in_child(lambda f=folder: tiny.make_run(f, **groups), prepare)
        assert os.WIFSIGNALED(status), steps[crash]
        fit(tiny.make_run(folder, resume=True, **groups))
        tiny.same_end(tmp_path / "whole", folder)
        leftovers = [p.name for p in folder.rglob("*") if p.name.endswith((".tmp", ".old"))]
        assert not leftovers, (steps[crash], leftovers)


def test_a_signal_is_also_caught_while_a_process_waits_for_the_others_at_the_end(
    tmp_path, monkeypatch
):
    missed = []

    @contextmanager
    def slow_to_leave(*given):
        with open_mesh(*given) as mesh:
            yield mesh
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop, "open_mesh", slow_to_leave)
    before = signal.signal(signal.SIGTERM, lambda *_: missed.append("SIGTERM"))
    try:
        fit(tiny.make_run(tmp_path, train={"epochs": 1}))
        assert not missed
        os.kill(os.getpid(), signal.SIGTERM)
        assert missed == ["SIGTERM"]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on_later(whole, tmp_path, number):
    class Signalled(tiny.TinyTask):
        def loss(self, *args):
            if len(self.seen) == 5:
                os.kill(os.getpid(), number)
            return super().loss(*args)

    before = signal.signal(number, signal.SIG_DFL)  # nohup has SIGHUP ignored
    try:
        result = fit(tiny.make_run(tmp_path, task=Signalled(), **SEVEN_STEPS))
    finally:
        signal.signal(number, before)
    assert result.stopped_by == signal.Signals(number).name
    assert result.exit_code == 128 + number
    assert result.finished is None
    assert 0 < result.steps < 7
    assert not (tmp_path / "weights.safetensors").exists()
    result = fit(tiny.make_run(tmp_path, resume=True, **SEVEN_STEPS))
    assert result.finished == "epochs"
    assert result.exit_code == 0
    tiny.same_end(whole, tmp_path)


def test_a_signal_during_validation_stops_before_it_and_repeats_it(whole, tmp_path):
    class Signalled(tiny.TinyTask):
        def predict(self, *args):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().predict(*args)

    result = fit(tiny.make_run(tmp_path, task=Signalled(), **SEVEN_STEPS))
    assert result.stopped_by == "SIGTERM"
    assert all(record["kind"] == "step" for record in tiny.records(tmp_path))
    fit(tiny.make_run(tmp_path, resume=True, **SEVEN_STEPS))
    tiny.same_end(whole, tmp_path)


@pytest.fixture
def _interruptible():
    """As in a terminal; shells start background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_a_second_ctrl_c_leaves_at_once(tmp_path):
    class Signalled(tiny.TinyTask):
        def loss(self, *args):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            return super().loss(*args)

    with pytest.raises(KeyboardInterrupt):
        fit(tiny.make_run(tmp_path, task=Signalled()))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_random_numbers_of_a_loss_go_on_where_they_were(tmp_path):
    class Noisy(tiny.TinyTask):
        def loss(self, *args):
            found = super().loss(*args)
            # Not Python's own numbers: the checks of shapes in tests draw from those.
            noise = 1 + torch.rand(()).item() + float(np.random.rand())  # noqa: NPY002
            return tiny.Loss(found.total * noise, found.terms)

    class Signalled(Noisy):
        def loss(self, *args):
            if len(self.seen) == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().loss(*args)

    fit(tiny.make_run(tmp_path / "whole", task=Noisy(), **SEVEN_STEPS))
    fit(tiny.make_run(tmp_path / "cut", task=Signalled(), **SEVEN_STEPS))
    fit(tiny.make_run(tmp_path / "cut", task=Noisy(), resume=True, **SEVEN_STEPS))
    tiny.same_end(tmp_path / "whole", tmp_path / "cut")


def test_batches_that_overtook_others_are_not_forgotten(tmp_path, monkeypatch):
    """A loader with a window hands over every second batch before the one it follows."""
    from bevatron.train import loop

    class Overtaking:
        def __init__(self, *args):
            self.inner = make_loader(*args)
            self.set_batches, self.close = self.inner.set_batches, self.inner.close

        def __iter__(self):
            loaded = list(self.inner)
            for i in range(0, len(loaded), 2):
                yield from reversed(loaded[i : i + 2])

    make_loader = loop.make_loader
    monkeypatch.setattr(loop, "make_loader", Overtaking)
    groups = {"train": {"epochs": 1}, "loader": {"window": 2}}
    first = stopped_run(tmp_path, 2, **groups)
    assert len(first.seen) == 3
    second = tiny.TinyTask()
    fit(tiny.make_run(tmp_path, task=second, resume=True, **groups))
    seen = Counter(index for batch in first.seen + second.seen for index in batch)
    assert seen == dict.fromkeys(range(30), 1)


def test_checkpoints_by_the_clock(tmp_path):
    fit(
        tiny.make_run(
            tmp_path,
            train={"epochs": 1},
            checkpoint={"every_minutes": 1e-9, "every_epochs": None, "keep": 99},
        )
    )
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(tiny.losses(tmp_path))


def stopped_run(folder: Path, after: int, **groups) -> tiny.TinyTask:
    """A run that SIGTERM stops after some batches; returns its task."""

    class Signalled(tiny.TinyTask):
        def loss(self, *args):
            if len(self.seen) == after - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().loss(*args)

    task = Signalled()
    fit(tiny.make_run(folder, task=task, **groups))
    return task


@pytest.mark.parametrize(
    "change",
    [
        {"batch": {"capacity": 11}},
        {"batch": {"capacity": 40, "algorithm": "streaming"}},
        {"batch": {"algorithm": "fixed_count", "size": 3}},
        {"batch": {"cost": {"atoms": 1.0, "edges": 0.5}}},
        {"optim": {"accumulate": 3}},
    ],
)
def test_resumed_with_other_batches_every_sample_is_seen_once(tmp_path, change):
    first = stopped_run(tmp_path, 3, train={"epochs": 1})
    second = tiny.TinyTask()
    result = fit(
        tiny.make_run(tmp_path, task=second, resume=True, **{"train": {"epochs": 1}, **change})
    )
    assert result.finished == "epochs"
    seen = Counter(index for batch in first.seen + second.seen for index in batch)
    assert seen == dict.fromkeys(range(30), 1)
    told = [record for record in tiny.records(tmp_path) if record["kind"] == "resume"]
    before, now = (flatten(to_dict(tiny.settings(**groups))) for groups in ({}, change))
    changed = {key for key in before | now if before.get(key, "") != now.get(key, "")}
    assert set(told[0]["changes"]) == changed
    assert tiny.records(tmp_path)[-1]["samples"] == 30


def test_a_checkpoint_with_old_keys_of_the_cost_goes_on_to_the_last_bit(tmp_path):
    groups = {"train": {"epochs": 2}, "batch": {"cost": {"atoms": 1.0, "edges": 0.5}}}
    fit(tiny.make_run(tmp_path / "whole", **groups))
    stopped_run(tmp_path / "cut", 3, **groups)
    (path,) = (tmp_path / "cut" / "checkpoints").glob("*/state.json")
    state = json.loads(path.read_text())
    del state["checksum"]
    old = {"cost_nodes": 1.0, "cost_edges": 0.5, "cost_constant": 0.0}
    assert state["settings"].pop("batch.cost.atoms") == 1.0
    assert state["settings"].pop("batch.cost.edges") == 0.5
    state["settings"] |= {f"batch.{key}": value for key, value in old.items()}
    for segment in state["progress"]["segments"]:
        del segment["batch"]["cost"]
        segment["batch"] |= old
    path.write_text(json.dumps(state))
    fit(tiny.make_run(tmp_path / "cut", resume=True, train=groups["train"], batch=old))
    assert tiny.records(tmp_path / "cut") == tiny.records(tmp_path / "whole")


def test_two_changes_of_batches_in_one_epoch(tmp_path):
    groups = {"count": 60, "train": {"epochs": 1}, "resume": True}
    tasks = [
        stopped_run(tmp_path, 2, batch={"capacity": capacity}, **groups)
        for capacity in (20, 13, 26)
    ]
    tasks.append(tiny.TinyTask())
    fit(tiny.make_run(tmp_path, task=tasks[-1], **groups))
    seen = Counter(index for task in tasks for batch in task.seen for index in batch)
    assert seen == dict.fromkeys(range(60), 1)
    repacked = [r for r in tiny.records(tmp_path) if r["kind"] == "repacked"]
    assert [r["step"] for r in repacked] == [3, 6, 9]


def test_resumed_with_another_model_is_refused_and_names_the_key(tmp_path):
    fit(tiny.make_run(tmp_path, train={"epochs": 1}))
    other = tiny.make_run(tmp_path, resume=True, identity={"model": {"width": 9}})
    with pytest.raises(CheckpointError, match=r"'model.width' was 8 and is 9"):
        fit(other)
    with pytest.raises(CheckpointError, match=r"'train.seed' was 0 and is 1"):
        fit(tiny.make_run(tmp_path, resume=True, train={"seed": 1}))
    with pytest.raises(CheckpointError, match=r"'optim.algorithm'"):
        fit(tiny.make_run(tmp_path, resume=True, optim={"algorithm": "adamw"}))


def test_last_digits_of_computed_numbers_may_differ(tmp_path):
    """Another kind of processor fits E0 to other last digits; the weights' own ones count."""
    energies = [[-13.613187579653284, -110.98416133983106]]
    identity = {"model": {"atomic_energies": energies, "elements": [1, 8]}}
    fit(tiny.make_run(tmp_path, train={"epochs": 1}, identity=identity))
    again = {"resume": True, "train": {"epochs": 2}}
    rounded = [[-13.61318757965329, -110.98416133983109]]
    result = fit(
        tiny.make_run(
            tmp_path, identity={"model": {**identity["model"], "atomic_energies": rounded}}, **again
        )
    )
    assert result.epochs == 2
    for changed in ([[-13.6132, -110.98416133983106]], [[-13.613187579653284]]):
        model = {**identity["model"], "atomic_energies": changed}
        with pytest.raises(CheckpointError, match=r"'model.atomic_energies' was"):
            fit(tiny.make_run(tmp_path, identity={"model": model}, **again))
    model = {**identity["model"], "elements": [1, 7]}
    with pytest.raises(CheckpointError, match=r"'model.elements' was \[1, 8\]"):
        fit(tiny.make_run(tmp_path, identity={"model": model}, **again))


def test_harmless_changes_are_allowed_and_listed(tmp_path):
    fit(tiny.make_run(tmp_path, train={"epochs": 1}))
    fit(tiny.make_run(tmp_path, resume=True, train={"epochs": 2}, loader={"prefetch": 3}))
    log = (tmp_path / "log.txt").read_text()
    assert "changed: train.epochs was 1, is 2" in log
    assert "changed: loader.prefetch was null, is 3" in log
    assert [r["changes"] for r in tiny.records(tmp_path) if r["kind"] == "resume"] == [
        {"train.epochs": ["1", "2"]}
    ]


def test_a_finished_run_resumed_with_more_epochs_equals_a_longer_one(whole, tmp_path):
    fit(tiny.make_run(tmp_path, **SEVEN_STEPS, train={"epochs": 1}))
    fit(tiny.make_run(tmp_path, **SEVEN_STEPS, resume=True))
    assert tiny.losses(tmp_path) == tiny.losses(whole)


def test_a_folder_with_another_run_is_refused(tmp_path):
    fit(tiny.make_run(tmp_path, train={"epochs": 1}))
    with pytest.raises(ConfigError, match="holds a run already"):
        fit(tiny.make_run(tmp_path))


def test_an_older_checkpoint_can_be_chosen(whole, tmp_path):
    fit(tiny.make_run(tmp_path, **{**SEVEN_STEPS, "checkpoint": {"every_steps": 1, "keep": 9}}))
    older = tmp_path / "checkpoints" / "step-00000002"
    run = tiny.make_run(tmp_path, checkpoint_path=older, **SEVEN_STEPS)
    fit(run)
    assert tiny.losses(tmp_path) == tiny.losses(whole)
    with pytest.raises(CheckpointError, match="not a checkpoint of"):
        fit(tiny.make_run(tmp_path, checkpoint_path=whole / "checkpoints" / "step-00000003"))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named(tmp_path, name):
    fit(tiny.make_run(tmp_path, train={"epochs": 1}))
    newest = max((tmp_path / "checkpoints").iterdir())
    data = bytearray((newest / name).read_bytes())
    data[len(data) // 2] ^= 255
    (newest / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=newest.name):
        fit(tiny.make_run(tmp_path, resume=True))


def test_a_full_disk_leaves_the_older_checkpoint_intact(whole, tmp_path):
    import errno

    def full(name, path):
        if name == "write" and "step-00000006" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    files.crash_hooks.append(full)
    try:
        with pytest.raises(CheckpointError, match=r"disk is full.*step-00000004 is intact"):
            fit(tiny.make_run(tmp_path, **SEVEN_STEPS))
    finally:
        files.crash_hooks.pop()
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())][-1] == "step-00000004"
    fit(tiny.make_run(tmp_path, resume=True, **SEVEN_STEPS))
    tiny.same_end(whole, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_an_error_of_one_sentence(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="permission denied"):
        fit(tiny.make_run(tmp_path / "run"))


def test_a_folder_that_is_a_file_is_an_error_of_one_sentence(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        fit(tiny.make_run(tmp_path / "run"))


def test_training_goes_on_while_a_checkpoint_is_written(whole, tmp_path):
    """The disk takes the checkpoint of step 3 only when step 5 has begun."""
    task, seen = tiny.TinyTask(), []
    groups = {"optim": {"accumulate": 2}, "checkpoint": {"every_steps": 3, "every_epochs": None}}

    def slow(name, path):
        if name == "fsync" and "step-00000003" in str(path.parent):
            deadline = time.monotonic() + 20
            while len(task.seen) < 8 and time.monotonic() < deadline:
                time.sleep(0.002)
            seen.append(len(task.seen))

    files.crash_hooks.append(slow)
    try:
        fit(tiny.make_run(tmp_path, task=task, **groups))
    finally:
        files.crash_hooks.pop()
    assert seen[0] >= 8  # two batches a step, but one in the fourth
    tiny.same_end(whole, tmp_path)


def test_a_checkpoint_holds_the_state_of_its_step_although_training_went_on(tmp_path):
    """Written late, it resumes as one that was written at once."""
    task = tiny.TinyTask()

    def slow(name, path):
        deadline = time.monotonic() + 20
        if name == "write" and "step-00000003" in str(path.parent):
            while len(task.seen) < 8 and time.monotonic() < deadline:
                time.sleep(0.002)

    checkpoint = {"every_steps": 3, "every_epochs": None, "keep": 9}
    groups = {"optim": {"accumulate": 2}, "checkpoint": checkpoint}
    files.crash_hooks.append(slow)
    try:
        fit(tiny.make_run(tmp_path, task=task, **groups))
    finally:
        files.crash_hooks.pop()
    expected = tiny.losses(tmp_path)
    fit(tiny.make_run(tmp_path, checkpoint_path=tmp_path / "checkpoints/step-00000003", **groups))
    assert tiny.losses(tmp_path) == expected


def test_a_disk_that_is_slower_than_the_checkpoints_is_warned_of_once(tmp_path, monkeypatch, hook):
    monkeypatch.setattr("bevatron.train.run_folder.LONG_WAIT", 0.0)
    hook(lambda *_: time.sleep(0.02))  # else a step on a busy machine takes longer than to write
    fit(tiny.make_run(tmp_path, train={"epochs": 1}, checkpoint={"every_steps": 1}))
    log = (tmp_path / "log.txt").read_text()
    assert log.count("for the checkpoint before this one to be on disk") == 1


def test_checkpoints_are_pruned_and_hold_no_pickle(tmp_path):
    fit(tiny.make_run(tmp_path, train={"epochs": 5}, checkpoint={"keep": 3}))
    kept = sorted((tmp_path / "checkpoints").iterdir())
    assert len(kept) == 3
    names = {path.suffix for folder in kept for path in folder.iterdir()}
    assert names == {".safetensors", ".json"}
    state = json.loads((kept[-1] / "state.json").read_text())
    assert state["threads"] == torch.get_num_threads()
    assert state["progress"]["finished"] == "epochs"


def test_the_thread_count_is_restored(tmp_path):
    before = torch.get_num_threads()
    fit(tiny.make_run(tmp_path, train={"epochs": 1, "threads": 2}))
    seen = []

    class Watching(tiny.TinyTask):
        def begin_epoch(self, epoch):
            seen.append(torch.get_num_threads())

    fit(tiny.make_run(tmp_path, task=Watching(), resume=True, train={"epochs": 2}))
    assert seen == [2]
    assert torch.get_num_threads() == before


def test_random_numbers_go_on_where_they_were():
    random.gauss(0, 1)
    np.random.normal()  # noqa: NPY002  leaves a cached second value
    state = random_state(torch.device("cpu"))

    def draw():
        normal = np.random.normal()  # noqa: NPY002
        return random.gauss(0, 1), random.random(), normal, torch.rand(3).tolist()

    first = draw()
    restore_random_state(state, torch.device("cpu"))
    assert draw() == first


def test_changed_data_are_called_so():
    before, now = ({"data.fingerprints": [text]} for text in "ab")
    with pytest.raises(CheckpointError, match=r"the data have changed, .*begin a new run"):
        check_identity(Path("run"), before, now)
