"""What a checkpoint costs: how long a step waits for it, and how soon it is on disk.

A model of 93 million parameters (AlphaFold2's number) with Adam and averaged weights in float32,
1.5 GB a checkpoint, saved by the trainer's `Saver` while a thread of training works on. Beside it:
the same bytes written to one file on the same disk with one fsync, before or after in turn, and
``torch.save`` with an fsync, during which training waits.

    python -m benchmarks.train.checkpoint [--parameters 93] [--repeats 3]
"""

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.common.arguments import add_out
from benchmarks.common.report import write_result
from torch import nn

from bevatron.parallel.mesh import Mesh
from bevatron.train.checkpoint import (
    PIECE_BYTES,
    RunRecord,
    list_checkpoints,
    read_intact,
    write_checkpoint,
)
from bevatron.train.optim import AveragedWeights, make_optimizer
from bevatron.train.settings import OptimConfig
from bevatron.train.snapshot import Snapshot, SnapshotMemory
from bevatron.train.state import TrainState

RECORD = RunRecord(identity={}, settings={}, threads=1, metrics_bytes=0, num_ranks=1)


def make_state(millions: float, device: str) -> TrainState:
    """Make a model of so many million parameters in matrices of 1,024 x 1,024, and its moments."""
    count = max(round(millions * 1e6 / (1024 * 1024 + 1024)), 1)
    model = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(count)).to(device)
    optimizer = make_optimizer(model, OptimConfig(algorithm="adam", ema=0.999, weight_decay=0.0))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return TrainState(model, optimizer, AveragedWeights(model, 0.999))


def plain_write(folder: Path, snapshot: Snapshot) -> float:
    """Write the same bytes to one file, in the same pieces; return the seconds until fsynced."""
    began = time.perf_counter()
    folder.mkdir()
    with (folder / "plain").open("wb", buffering=0) as file:
        for parts in snapshot.files.values():
            for part in parts:
                for first in range(0, len(part), PIECE_BYTES):
                    file.write(part[first : first + PIECE_BYTES])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


def torch_save(folder: Path, state: TrainState) -> float:
    """Save with ``torch.save`` and fsync; return the seconds that training waits."""
    began = time.perf_counter()
    folder.mkdir()
    values = {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "ema": state.ema.averages if state.ema is not None else {},
    }
    with (folder / "checkpoint.pt").open("wb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


class Work:
    """Steps of training, of which only the speed matters."""

    def __init__(self, device: str) -> None:
        self.a = torch.randn(600, 600, device=device)
        self.device = device

    def step(self) -> None:
        """Multiply some matrices."""
        for _ in range(10):
            self.a = torch.tanh(self.a @ self.a)
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds_a_step(self, until: Callable[[int], bool]) -> tuple[float, float, int]:
        """Return wall and CPU seconds of a step, and how many there were."""
        count, began, core = 0, time.perf_counter(), time.thread_time()
        while not until(count):
            self.step()
            count += 1
        done = max(count, 1)
        return (time.perf_counter() - began) / done, (time.thread_time() - core) / done, count


def measure(state: TrainState, folder: Path, repeats: int, device: str) -> dict[str, list[float]]:
    """Save, write plainly and work, in turns."""
    memory, work, mesh = SnapshotMemory(), Work(device), Mesh(device=torch.device(device))
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    memory.take(state, mesh)  # takes its memory, once for a run
    work.seconds_a_step(lambda count: count == 20)
    for turn in range(repeats):
        alone = work.seconds_a_step(lambda count: count == 200)
        began = time.perf_counter()
        snapshot = memory.take(state, mesh)
        assert snapshot is not None
        note("copy", time.perf_counter() - began)
        note("bytes", sum(len(part) for parts in snapshot.files.values() for part in parts))
        if turn % 2:
            note("plain", plain_write(folder / "plain", snapshot))
        ended: list[float] = []

        def write(snapshot: Snapshot = snapshot, ended: list[float] = ended) -> None:
            write_checkpoint(folder / "checkpoints", snapshot, RECORD)
            ended.append(time.perf_counter())

        state.progress.step = turn
        began = time.perf_counter()
        writer = threading.Thread(target=write)
        writer.start()
        meanwhile = work.seconds_a_step(lambda _, ended=ended: bool(ended))
        writer.join()
        note("durable", ended[0] - began)
        note("steps", meanwhile[2])
        for kind, place in (("wall", 0), ("core", 1)):
            note(f"alone {kind}", alone[place])
            note(f"meanwhile {kind}", meanwhile[place])
        if not turn % 2:
            note("plain", plain_write(folder / "plain", snapshot))
        began = time.perf_counter()
        write_checkpoint(folder / "alone", snapshot, RECORD)
        note("alone", time.perf_counter() - began)
        shutil.rmtree(folder / "alone")
        note("torch", torch_save(folder / "torch", state))
        read_intact(list_checkpoints(folder / "checkpoints")[-1])
        shutil.rmtree(folder / "checkpoints")
    return found


def rows_of(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Medians of the repeats."""
    middle = {name: median(values) for name, values in found.items()}
    size = middle["bytes"] / 1e9

    def over_plain(name: str) -> float:
        pairs = zip(found[name], found["plain"], strict=True)
        return round(median(one / plain for one, plain in pairs), 2)

    def slower(kind: str) -> float:
        pairs = zip(found[f"meanwhile {kind}"], found[f"alone {kind}"], strict=True)
        return 100 * (median(one / other for one, other in pairs) - 1)

    return [
        {"what": "bytes of a checkpoint (GB)", "value": round(size, 3)},
        {"what": "training waits for the copy (s)", "value": round(middle["copy"], 3)},
        {"what": "training waits for torch.save, fsync (s)", "value": round(middle["torch"], 2)},
        {"what": "checkpoint is durable after (s)", "value": round(middle["durable"], 2)},
        {"what": "plain writes and fsync of these bytes (s)", "value": round(middle["plain"], 2)},
        {"what": "durable over plain, median of the turns", "value": over_plain("durable")},
        {"what": "the same without training beside it", "value": over_plain("alone")},
        {"what": "rate of the plain writes (MB/s)", "value": round(1e3 * size / middle["plain"])},
        {"what": "steps meanwhile", "value": round(middle["steps"])},
        {"what": "CPU time of a step meanwhile, more by (%)", "value": round(slower("core"), 1)},
        {"what": "wall time of a step meanwhile, more by (%)", "value": round(slower("wall"), 1)},
        {
            "what": "share of waiting at a checkpoint every 10 minutes (%)",
            "value": round(100 * middle["copy"] / 600, 3),
        },
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="What a checkpoint costs")
    parser.add_argument("--parameters", type=float, default=93.2, help="millions")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="a folder on it")
    parser.add_argument("--device", default="cpu")
    add_out(parser)
    arguments = parser.parse_args()
    state = make_state(arguments.parameters, arguments.device)
    with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
        found = measure(state, Path(folder), arguments.repeats, arguments.device)
    write_result(
        "train/checkpoint",
        rows_of(found),
        notes=(
            f"{sum(p.numel() for p in state.model.parameters()) / 1e6:.1f} million parameters, "
            "Adam and averaged weights in float32; medians of "
            f"{arguments.repeats} turns, in each of which all is measured. A step multiplies "
            "matrices in one thread. Others use the disk too: the plain writes took "
            f"{min(found['plain']):.1f} to {max(found['plain']):.1f} s, the checkpoints "
            f"{min(found['durable']):.1f} to {max(found['durable']):.1f} s. "
            "The load average at the end was "
            f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: where no core is free, the "
            "writing thread and training share one, and wall times say little; CPU time of the "
            "training thread does not count what others take."
        ),
        device=arguments.device,
        extra={"turns": found},
        folder=arguments.out,
    )


if __name__ == "__main__":
    main()
