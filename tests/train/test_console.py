"""What a run prints: where it is among all epochs, how long it will take, nothing if quiet."""

import io
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from rich.console import Console as RichConsole

from bevatron.errors import CheckpointError
from bevatron.output import quietly
from bevatron.train import console as module
from bevatron.train import fit
from bevatron.train.console import Console, Pace
from bevatron.train.logger import Journal


def record(epoch, **more):
    return {"epoch": epoch, "loss": 1.0, "lr": 0.1, "time": {}, "valid": {}, "best": False} | more


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_counts_all_epochs_and_validation(clock):
    pace = Pace(epochs=10, done=0.0)
    pace.begin_epoch(0, 0, 4)
    assert pace.seconds_left() is None
    clock[0] = 8.0
    pace.step()
    pace.step()
    assert pace.seconds_left() == pytest.approx(8.0 * 9.5 / 0.5)
    for _ in range(2):
        pace.step()
    clock[0] = 20.0  # of which 4 s of validation
    pace.begin_epoch(1, 0, 4)
    assert pace.seconds_left() == pytest.approx(180.0)


def test_a_resumed_run_goes_by_the_speed_of_this_process(clock):
    pace = Pace(epochs=10, done=8.5)
    pace.begin_epoch(8, 2, 4)
    clock[0] = 3.0
    pace.step()
    pace.step()
    assert pace.done == 9.0
    assert pace.seconds_left() == pytest.approx(6.0)


def test_lines_without_a_terminal_say_the_epoch_among_all_and_the_time_left(clock, capsys):
    console = Console(None)
    console.begin_epoch(2, 100, 0, 2)
    clock[0] = 60.0
    console.step(record(2))
    console.step(record(2))
    console.epoch(record(2))
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("epoch 3/100  step 1/2  loss 1")
    assert first.endswith("3:15:00 left")
    assert last.startswith("epoch 3/100  loss 1")
    assert last.endswith("1:37:00 left")


def test_of_short_epochs_some_are_printed_the_last_one_too_and_all_logged(clock, tmp_path, capsys):
    console = Console(tmp_path / "log.txt")
    for epoch in range(9):
        clock[0] = epoch / 3
        console.begin_epoch(epoch, 9, 0, 1)
        console.epoch(record(epoch))
    console.end()
    printed = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["1/9", "4/9", "7/9", "9/9"]
    assert (tmp_path / "log.txt").read_text().count("  epoch ") == 9


def test_the_epoch_before_a_line_is_printed_before_it(clock, capsys):
    console = Console(None)
    for epoch in range(2):
        console.begin_epoch(epoch, 9, 0, 1)
        console.epoch(record(epoch))
    console.say("a warning")
    console.end()
    printed = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["1/9", "2/9", "warning"]


def test_a_long_validation_says_how_far_it_is(clock, capsys):
    console = Console(None)
    for batch in console.validating(iter("abcdefgh"), 8):
        clock[0] += 12.0
        assert batch in "abcdefgh"
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["validation: 3 of 8 batches", "validation: 6 of 8 batches"]


def test_one_bar_covers_the_whole_run(monkeypatch, clock):
    text = io.StringIO()
    rich = RichConsole(file=text, force_terminal=True, width=60, highlight=False)
    monkeypatch.setattr(module, "RichConsole", lambda **_: rich)
    console = Console(None)
    bars = set()
    for epoch in range(2):
        console.begin_epoch(epoch, 4, 0, 2)
        bars.add(id(console._progress))
        console.step(record(epoch))
        console.step(record(epoch))
        console.epoch(record(epoch))
    assert len(bars) == 1
    assert console._progress.tasks[0].percentage == 50
    assert console._progress.tasks[0].fields["epoch"] == "2/4"
    console.close()
    bars = re.findall(r"epoch [^\r\n]*━[^\r\n]*", text.getvalue())
    assert re.match(r"epoch 1/4 .* 0 %", bars[0])
    assert re.match(r"epoch 2/4 .* 50 % .*loss 1", bars[-1])  # only the end is cut


def test_a_run_numbers_its_epochs_and_a_quiet_one_only_writes_its_log(tmp_path, capsys):
    fit(tiny.make_run(tmp_path / "loud", train={"epochs": 3}))
    said = capsys.readouterr().out
    assert "epoch 1/3  loss" in said
    assert "epoch 3/3  loss" in said
    with quietly():
        fit(tiny.make_run(tmp_path / "quiet", train={"epochs": 3}))
    assert capsys.readouterr().out == ""
    assert "epoch 3/3  loss" in (tmp_path / "quiet" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("name", "opened", "write"),
    [
        ("log.txt", Console, lambda console: console.say("x" * 99)),
        (
            "metrics.jsonl",
            lambda path: Journal(path, 2**20),
            lambda own: own.write({"a": "x" * 99}),
        ),
    ],
)
def test_a_full_disk_is_one_sentence_also_when_the_file_is_closed(tmp_path, name, opened, write):
    path, before = tmp_path / name, resource.getrlimit(resource.RLIMIT_FSIZE)
    path.touch()
    with path.open("r+b") as file:
        file.truncate(2**20)  # more than pytest has taken of what is printed
    found = opened(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20 + 50, before[1]))
    try:
        with pytest.raises(CheckpointError, match=f"{name}: cannot be written"):
            write(found)
        found.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


RUN = """
import sys, tiny
from bevatron.train import fit
fit(tiny.make_run(sys.argv[1]))
"""


def test_a_run_goes_on_when_what_shows_it_is_full_or_gone(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", RUN, str(tmp_path)]
        done = subprocess.run(
            command, stdout=full, env={**os.environ, "PYTHONPATH": path}, check=False, timeout=100
        )
    assert done.returncode == 0
    assert "training ended: all epochs are done" in (tmp_path / "log.txt").read_text()


def test_a_run_goes_on_when_nobody_reads_what_it_prints_any_more(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as running:
        running.stdout.readline()
        running.stdout.close()
        assert running.wait(100) == 0
    assert "training ended: all epochs are done" in (tmp_path / "log.txt").read_text()
