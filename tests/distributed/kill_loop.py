"""Kills processes of one run, at random times and again and again, until the run is over.

The run draws its samples, from two data sets and in two stages. Used by ``test_kill_loop.py`` and,
for a hundred kills, by ``benchmarks/train/kill_loop.py``.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import drawn_system
import tiny
import torch
from forks import end_of, fork

from bevatron.train import fit

LIMIT = 30.0
"""Seconds within which the other ranks must have ended."""


@dataclass(frozen=True)
class Kill:
    """One kill: of which process, after how many steps, and what it cost."""

    ranks: int
    victim: str
    step: int
    seconds_to_end: float | None
    told: str


class Recorded(drawn_system.RecycledTask):
    """Appends the draws of each step to a file, and takes its time."""

    def __init__(self, file: Path, pause: float) -> None:
        super().__init__()
        self.file, self.pause = file, pause

    def loss(self, *args):
        found = super().loss(*args)
        line = json.dumps(self.seen[-1]) + "\n"
        with self.file.open("a") as file:
            file.write(line)
        time.sleep(self.pause)
        return found


def make(folder: Path, steps: int, *, pause: float = 0.004, workers: int = 0, **groups):
    """A run of so many steps, the last third of them in a second stage."""
    second = steps // 3
    return drawn_system.make_run(
        folder / "run",
        task=Recorded(folder / "draws.jsonl", pause),
        resume=True,
        first=replace(drawn_system.FIRST, steps=steps - second, evaluate_every=7),
        second=replace(drawn_system.SECOND, steps=second, evaluate_every=7),
        loader={"workers": workers},
        checkpoint={"every_steps": 3},
        **{"train": {"seed": 0, "timeout_minutes": 2.0}, **groups},
    )


def train_through(
    folder: Path, make_run: Callable, kills: int, seed: int, ranks: Callable[[int], int]
) -> list[Kill]:
    """Train to the end with so many kills; ``ranks`` of the number of the start."""

    def train(_: int) -> None:
        fit(make_run(folder))

    choice, killed, starts = random.Random(seed), [], 0
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        world = ranks(starts)
        name = f"output{starts}"
        processes = fork(world, train, lambda rank, name=name: folder / f"{name}-{rank}")
        starts += 1
        begun = folder / f"{name}-0"
        while len(killed) < kills and (found := strike(folder, begun, processes, choice)):
            killed.append(found)
            if found.seconds_to_end is not None:
                break
        else:
            codes = end_of(processes, 600.0)
            said = "\n".join(p.read_text() for p in folder.glob(f"{name}-*"))
            assert codes == [0] * world, said
            assert len(killed) == kills, f"the run was over after {len(killed)} kills"
            return killed


def strike(folder: Path, said: Path, ranks: list[int], choice: random.Random) -> Kill | None:
    """Kill one process of the run some steps from now; None if the run is over before.

    The ranks have met by then: of one that dies earlier only a launcher knows.
    """
    target, begun = choice.randint(0, 5), None
    while begun is None or steps_done(folder) < begun + target:
        if any(os.waitid(os.P_PID, one, os.WEXITED | os.WNOHANG | os.WNOWAIT) for one in ranks):
            return None
        if begun is None and said.exists() and "CPU threads" in said.read_text():
            begun = steps_done(folder)
        time.sleep(0.002)
    time.sleep(0.03 * choice.random())
    others = [process for rank in ranks for process in below(rank)]
    victim = choice.choice([*ranks, *others])
    name = f"rank {ranks.index(victim)}" if victim in ranks else "loader's process"
    step, began = steps_done(folder), time.monotonic()
    os.kill(victim, signal.SIGKILL)
    if victim not in ranks:
        return Kill(len(ranks), name, step, None, "")
    codes = end_of(ranks, LIMIT)
    assert None not in codes, f"after the kill of {name} ranks went on for {LIMIT} s: {codes}"
    survivor = min((rank for rank, one in enumerate(ranks) if one != victim), default=None)
    told = "" if survivor is None else said.with_name(f"{said.name[:-1]}{survivor}").read_text()
    lines = [line for line in told.splitlines() if line.startswith("error: ")]
    seconds = time.monotonic() - began
    return Kill(len(ranks), name, step, seconds, lines[0].strip() if lines else "")


def below(process: int) -> list[int]:
    """List the processes that a process has started, and those that they have."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = []
    waiting = [process]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return sorted(found)


def steps_done(folder: Path) -> int:
    """Return the step of the last whole line of the journal."""
    try:
        lines = (folder / "run" / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    except OSError:
        return 0
    return int(json.loads(lines[-1]).get("step", 0)) if lines else 0


def draws(folder: Path) -> dict[int, set[int]]:
    """The draws of every step; a step that was repeated after a kill has the same ones again."""
    found: dict[int, set[int]] = {}
    for line in (folder / "draws.jsonl").read_text().splitlines():
        step, numbers = json.loads(line)
        found.setdefault(step, set()).update(numbers)
    return found


def same_to_the_last_bit(one: Path, other: Path) -> bool:
    """Whether two runs have the same records, weights and optimiser."""
    names = ["run/weights.safetensors", "run/best/weights.safetensors"]
    last = [max((f / "run" / "checkpoints").iterdir()).relative_to(f) for f in (one, other)]
    if last[0] != last[1]:
        return False
    names += [str(last[0] / f"{kind}.safetensors") for kind in ("model", "optimizer", "ema")]
    return tiny.records(one / "run") == tiny.records(other / "run") and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def largest_difference(one: Path, other: Path) -> float:
    """Largest relative difference between the losses of two runs."""
    losses = [torch.tensor(tiny.losses(f / "run"), dtype=torch.float64) for f in (one, other)]
    assert len(losses[0]) == len(losses[1])
    return float(((losses[0] - losses[1]) / losses[1]).abs().max())
