"""How soon `bevatron train` trains: seconds to the first step, kernels compiled anew and cached.

    python -m benchmarks.train.start [--systems mace mace:small gpspp]

Every run is a process of its own on the bundled data, with all defaults: interpreter, imports,
preparing the data, compiling, capturing. Cold, Triton's cache is empty; warm, a run before has
filled it. "waited" is the share of an epoch that its steps waited for batches. Python's bytecode
must be cached, as in an installation: train once before where packages come without.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.common.arguments import add_out, script_parser
from benchmarks.common.report import write_result

import bevatron
from bevatron.train.logger import read_journal

DATA = Path(bevatron.__file__).parent / "recipes" / "demo_data"
FILES = {"mace": DATA / "structures.extxyz.gz", "gpspp": DATA / "molecules.csv.gz"}
TURNS = ("cold", "warm", "warm again")
WATCH_SECONDS = 0.01


def started(system: str, preset: str | None, folder: Path, cache: Path, epochs: int) -> Any:
    """Train; return the seconds to the first recorded step, the records and what was printed."""
    run = folder / "run"
    command = [sys.executable, "-u", "-m", "bevatron", "train", system, "--no-report"]
    command += ["--data", str(FILES[system]), "--output", str(run), "--train.epochs", str(epochs)]
    command += ["--preset", preset] if preset else []
    journal, began, first = run / "metrics.jsonl", time.monotonic(), 0.0
    with (folder / "printed").open("w") as printed:
        process = subprocess.Popen(
            command,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        )
        while process.poll() is None:
            if not first and journal.exists() and '"step"' in journal.read_text():
                first = time.monotonic() - began
            time.sleep(WATCH_SECONDS)
    words = (folder / "printed").read_text()
    if process.returncode:
        raise SystemExit(words)
    return first, list(read_journal(journal)), words


def row_of(what: str, turn: str, first: float, records: list[Any]) -> dict[str, Any]:
    """Put together what a run says of its start and of its waiting."""
    row: dict[str, Any] = {"training of": what, "kernels": turn, "first step s": round(first, 1)}
    steps = [record for record in records if record["kind"] == "step"]
    for name in ("first", "later"):
        times = [r["time"] for r in steps if (r["epoch"] == 0) == (name == "first")]
        if not times:
            continue
        waited = sum(time["seconds"] * time["wait_share"] for time in times)
        # The first step compiles and captures: waiting is not compared with that.
        training = [time["seconds"] for time in times[1 if name == "first" else 0 :]]
        row["steps an epoch"] = len(times)
        row[f"waited, {name} %"] = round(100 * waited / max(sum(training), 1e-9), 1)
        row["ms a step"] = round(1e3 * median(training), 2) if training else 0.0
    return row


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--systems", nargs="*", default=["mace", "mace:small", "gpspp"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--turns", nargs="*", choices=TURNS, default=TURNS)
    parser.add_argument("--cache", type=Path, help="of Triton, filled before: for warm turns alone")
    add_out(parser)
    arguments = parser.parse_args()
    rows, printed = [], {}
    for what in arguments.systems:
        system, _, preset = what.partition(":")
        with tempfile.TemporaryDirectory() as empty:
            for turn in arguments.turns:
                with tempfile.TemporaryDirectory() as scratch:
                    given = (system, preset or None, Path(scratch), arguments.cache or Path(empty))
                    first, records, words = started(*given, arguments.epochs)
                rows.append(row_of(what, turn, first, records))
                for folder in (scratch, Path(__file__).parents[2]):
                    words = words.replace(f"{folder}/", "")
                printed[f"{what}, {turn}"] = words.splitlines()
                print(json.dumps(rows[-1]), flush=True)
                write_result(
                    "train/start",
                    rows,
                    f"{len(os.sched_getaffinity(0))} cores; all defaults, {arguments.epochs} "
                    "epochs of the bundled data without a report. Waited: seconds waited for "
                    "batches in the first and in later epochs over the time of their steps, "
                    "without the first step of all, which captures.",
                    device="cuda" if torch.cuda.is_available() else "cpu",
                    extra={"printed": printed},
                    folder=arguments.out,
                )


if __name__ == "__main__":
    main()
