"""Epochs that improve are saved after a while, not each at once."""

import json
import os
import signal
import threading

import tiny

from bevatron import files
from bevatron.train.loop import fit


def better(epochs):
    return 1.0 / epochs


def quick(folder, seconds, epochs=6, **more):
    """A run that is saved only when an epoch improves."""
    checkpoint = {"every_epochs": None, "best_seconds": seconds}
    groups = {"count": 8, "train": {"epochs": epochs}, "checkpoint": checkpoint}
    return tiny.make_run(
        folder, task=tiny.LossesTask(lambda epochs: 1.0 / epochs), **groups, **more
    )


def savings(folder, seconds):
    """How often a run writes checkpoints and best weights."""
    steps = []
    files.crash_hooks.append(lambda name, path: steps.append((name, path.name)))
    try:
        fit(quick(folder, seconds))
    finally:
        files.crash_hooks.pop()
    written = [path for name, path in steps if name == "write"]
    return sum("state.json" in n for n in written), sum("best.json" in n for n in written)


def test_quick_epochs_that_improve_wait_in_memory_and_end_alike(tmp_path):
    assert savings(tmp_path / "each", 0.0) == (6, 6)
    assert savings(tmp_path / "held", 1e6) == (1, 1)
    tiny.same_end(tmp_path / "each", tmp_path / "held")
    note = json.loads((tmp_path / "held/best/best.json").read_text())
    assert (note["epoch"], note["value"]) == (5, 1 / 6)


def test_improved_epochs_are_saved_once_their_time_is_over(tmp_path, monkeypatch):
    """Also where the epochs after them do not improve."""
    now = [0.0]
    monkeypatch.setattr("bevatron.train.run_folder.time.monotonic", lambda: now[0])
    found = []

    class OnceBetter(tiny.LossesTask):
        def begin_epoch(self, epoch):
            super().begin_epoch(epoch)
            now[0] += 4.0
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            notes = [json.loads(p.read_text()) for p in tmp_path.glob("best/best.json")]
            kept = [p.name for p in sorted(tmp_path.glob("checkpoints/step-*"))]
            found.append(([note["epoch"] for note in notes], len(kept)))

    task = OnceBetter(lambda epochs: 1.0 if epochs == 1 else 2.0)
    checkpoint = {"every_epochs": None, "best_seconds": 10.0}
    groups = {"count": 8, "train": {"epochs": 5}, "checkpoint": checkpoint}
    fit(tiny.make_run(tmp_path, task=task, **groups))
    # The clock shows 4, 8, 12: the first step of the third epoch saves what the first one found.
    assert found == [([], 0), ([], 0), ([], 0), ([0], 1), ([0], 1)]


def test_a_signal_saves_improved_epochs_that_waited(tmp_path):
    class Signalled(tiny.LossesTask):
        def begin_epoch(self, epoch):
            super().begin_epoch(epoch)
            if epoch == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    run = quick(tmp_path, 1e6)
    run.task = Signalled(better)
    assert fit(run).stopped_by == "SIGTERM"
    assert json.loads((tmp_path / "best/best.json").read_text())["epoch"] == 2
    resumed = quick(tmp_path, 1e6, resume=True)
    resumed.task.epochs = [0, 1, 2]
    result = fit(resumed)
    assert (result.finished, result.best) == ("epochs", 1 / 6)
