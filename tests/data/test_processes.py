"""A user's script needs no guard around its main part, although worker processes are started."""

import subprocess
import sys

SCRIPT = """
print("script runs")
from pathlib import Path
from bevatron.recipes.mace.data import prepare_structures

frame = "2\\nenergy={} Properties=species:S:1:pos:R:3\\nH 0 0 0\\nH 0 0 {}\\n"
Path("two.xyz").write_text("".join(frame.format(-31.0 - i, 0.7 + 0.001 * i) for i in range(64)))
store = prepare_structures(["two.xyz"], Path("store"), 3.0, workers=2, samples_per_shard=16)
print(len(store))
"""


def test_a_script_without_a_guard_prepares_in_worker_processes(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["script runs", "64"]
