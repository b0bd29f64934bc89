"""A user's script needs no guard around its main part, although worker processes are started."""

import multiprocessing
import subprocess
import sys
import threading
from multiprocessing import spawn

import pytest

from bevatron.data import processes
from bevatron.data.processes import start_without_main

SCRIPT = """
print("script runs")
import os, signal
from multiprocessing import forkserver
from pathlib import Path
from bevatron.recipes.mace.stores import prepare_structures

frame = "2\\nenergy={} Properties=species:S:1:pos:R:3\\nH 0 0 0\\nH 0 0 {}\\n"
Path("two.xyz").write_text("".join(frame.format(-31.0 - i, 0.7 + 0.001 * i) for i in range(64)))
store = prepare_structures(["two.xyz"], Path("store"), 3.0, workers=2, samples_per_shard=16)
print(len(store))
server = forkserver._forkserver._forkserver_pid
status = Path(f"/proc/{server}/status").read_text().splitlines()
(blocked,) = [int(line.split()[1], 16) for line in status if line.startswith("SigBlk")]
stops = signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2
print(*(bool(blocked >> number - 1 & 1) for number in stops))
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the script prints, line by line."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


def test_a_script_without_a_guard_prepares_in_worker_processes(printed):
    assert printed[:2] == ["script runs", "64"]


def test_signals_to_all_processes_do_not_end_the_server_that_a_preparation_starts(printed):
    assert printed[2:4] == ["True True True", "set()"]


def test_threads_that_start_processes_at_once_leave_nothing_behind(monkeypatch):
    before, entered = spawn.get_preparation_data, threading.Event()
    made = [multiprocessing.get_context("spawn").Process(name=f"worker {i}") for i in range(2)]
    first, second = (threading.Thread(target=start_without_main, args=(one,)) for one in made)

    def start(process):
        if process is made[0]:
            second.start()
            entered.wait(0.3)  # both within, if both may be
        else:
            entered.set()
            first.join()

    monkeypatch.setattr(processes, "_start", start)
    first.start()
    first.join()
    second.join()
    assert spawn.get_preparation_data is before
