"""What one rank does in the tests of several processes: ``torchrun rank.py MODE FOLDER``."""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import numpy as np
import test_mace
import tiny
import torch

from bevatron.errors import BevatronError
from bevatron.parallel import collectives, data_parallel
from bevatron.parallel.data_parallel import GradientSums
from bevatron.parallel.mesh import open_mesh
from bevatron.recipes.mace import capacity as capacities
from bevatron.train.capture import step as captured_step
from bevatron.train.capture.gradients import GradientBuckets
from bevatron.train.loop import fit
from bevatron.train.optim import FusedAdamEMA
from bevatron.train.settings import TrainConfig

SIZES = [1, 9, 7, 8, 8, 1, 5, 9, 3, 2, 9, 1, 6]
"""Clouds that make unequal batches, some of a single point."""

GROUPS = {
    "batch": {"algorithm": "fixed_count", "size": 1},
    "train": {"epochs": 2, "timeout_minutes": 2.0},
    "optim": {"accumulate": 1},
}


def make(folder: Path, **changes):
    """A run over clouds of `SIZES`."""
    task = changes.pop("task", None) or tiny.TinyTask()
    groups = {
        key: {**GROUPS.get(key, {}), **value}
        for key, value in changes.items()
        if isinstance(value, dict)
    }
    run = tiny.make_run(folder, task=task, **{**GROUPS, **groups})
    run.train = tiny.TinyData(len(SIZES), sizes=SIZES)
    run.sizes = run.train.sizes
    run.resume = changes.get("resume", False)
    return run


def this_rank() -> int:
    """Number of this process."""
    return int(os.environ.get("RANK", "0"))


def talk(folder: Path) -> int:
    """Call every collective."""
    rank = this_rank()
    with open_mesh("cpu") as mesh:
        found = {
            "bytes": [len(b) for b in collectives.gather_bytes(b"x" * rank, mesh)],
            "json": collectives.gather_json({"rank": rank}, mesh),
            "broadcast": collectives.broadcast_json(rank + 7, mesh),
            "sum": float(collectives.sum_scalars({"a": rank + 1.0}, mesh)["a"]),
        }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    return 0


def meet_again(folder: Path) -> int:
    """Open the process group three times, in a store that outlives them as that of torchrun does.

    Rank 1 comes late, when rank 0 already looks for it.
    """
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = None
    if this_rank() == 0:
        server = torch.distributed.TCPStore(*place, is_master=True, wait_for_workers=False)
    sums = []
    for number in range(3):
        time.sleep(0.5 * this_rank() * number)
        with open_mesh("cpu") as mesh:
            sums.append(float(collectives.sum_over_ranks(torch.ones(1) * (number + 1), mesh)))
    (folder / f"rank{this_rank()}.json").write_text(json.dumps(sums))
    if server is not None:
        time.sleep(1)  # until rank 1 has left the store
    return 0


def train(folder: Path) -> int:
    """Train; rank 0's weights must win."""
    run = make(folder)
    run.model = tiny.TinyModel(seed=this_rank())
    fit(run)
    (folder / f"seen{this_rank()}.json").write_text(json.dumps(run.task.seen))
    return 0


def train_on_gpus(folder: Path) -> int:
    """Train with a GPU for each rank."""
    fit(make(folder, train={"device": "cuda"}))
    return 0


def end(folder: Path) -> int:
    """Train within a mesh that stays open; tell whether all was written when `fit` was over."""

    def on_end(*_):
        time.sleep(0.3)
        (folder / "told").touch()

    run = make(folder, train={"epochs": 1})
    run.on_end = on_end
    with open_mesh("cpu"):
        fit(run)
        (folder / f"end{this_rank()}.json").write_text(json.dumps((folder / "told").exists()))
    return 0


def fail_at_the_end(folder: Path) -> int:
    """Train, and fail in what only rank 0 does when the run is over."""

    def on_end(*_):
        raise BevatronError("no room for a report")

    run = make(folder, train={"epochs": 1})
    run.on_end = on_end
    return attempt(run)


def stop(folder: Path) -> int:
    """Train one epoch in which rank 1 gets SIGTERM."""

    class Stopped(tiny.TinyTask):
        def loss(self, *args):
            if this_rank() == 1 and len(self.seen) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().loss(*args)

    task = Stopped()
    result = fit(make(folder, task=task, train={"epochs": 1}))
    (folder / f"stop{this_rank()}.json").write_text(json.dumps(task.seen))
    return result.exit_code - 143


def potential(folder: Path, device: str = "cpu", *, captured: bool = True, poison: bool = False):
    """A run of a small potential; a captured one on a CPU is what is not captured there."""
    if captured and device == "cpu":
        captured_step.obstacle = lambda *_: None
    run = test_mace.make_run(
        folder,
        batch={"algorithm": "fixed_count", "size": 2},
        train={"epochs": 2, "timeout_minutes": 2.0, "device": device, "cuda_graphs": captured},
        optim={"ema": 0.9, "accumulate": 2},
    )
    if poison:
        run.train.samples[3]["energy"] = np.array(np.inf)
    return run


class Failing(tiny.TinyTask):
    """Rank 1 fails in its fourth step; perhaps rank 0 is busy with something else then."""

    def __init__(self, busy: float) -> None:
        super().__init__()
        self.busy = busy

    def loss(self, *args):
        if len(self.seen) == 3:
            if this_rank() == 1:
                raise BevatronError("the dog ate sample 3")
            time.sleep(self.busy)
        return super().loss(*args)


class Killed(tiny.TinyTask):
    """A rank is killed in its fourth step; perhaps the other is busy with something else then."""

    def __init__(self, victim: int, busy: float) -> None:
        super().__init__()
        self.victim, self.busy = victim, busy

    def loss(self, *args):
        if len(self.seen) == 3:
            if this_rank() == self.victim:
                print("its last words", flush=True)  # tests read when
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(self.busy)
        return super().loss(*args)


def mace(folder: Path):
    """A run of a small potential, one molecule a batch; one of them is a single atom."""
    return test_mace.make_run(
        folder,
        batch={"algorithm": "fixed_count", "size": 1},
        train={"epochs": 2, "timeout_minutes": 2.0},
    )


def capacity(folder: Path) -> int:
    """Measure a run's capacity twice; every rank finds another one the first time."""
    capacities.choose_capacity = lambda measured, _: (
        {"atoms": 100 - measured, "edges": 500 + measured},
        "",
    )
    capacities.unmeasured_capacity = lambda *_: None
    capacities.place_of_choice = lambda *_: folder / f"choice{this_rank()}.json"
    config = TrainConfig(device="cpu", timeout_minutes=2.0)
    found = []
    for rank in (this_rank(), 50):
        path = folder / "capacity.json"
        found.append(capacities.capacity_of_run(path, config, {}, lambda _, rank=rank: rank)[0])
    (folder / f"found{this_rank()}.json").write_text(json.dumps(found))
    return 0


def clip_from_buckets(folder: Path) -> int:
    """Train with norms of DDP's buckets; write the weights and the norms."""
    torch.manual_seed(0)
    with open_mesh("cpu") as mesh:
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 400), torch.nn.Tanh(), torch.nn.Linear(400, 2)
        )
        model = torch.nn.parallel.DistributedDataParallel(model.double(), bucket_cap_mb=0.004)
        optimizer = FusedAdamEMA(model.parameters(), lr=0.01, clip=0.3)
        optimizer.clip_from_buckets(model)
        norms = []
        for step in range(4):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
            model(x.double()).square().mean().backward()
            optimizer.step()
            norms.append(float(optimizer.grad_norm))
        weights = [p.detach().clone() for p in model.parameters()]
    torch.save({"weights": weights, "norms": norms}, folder / f"clipped{mesh.rank}")
    return 0


class Forked(torch.nn.Module):
    """Rank 1 does not reach the last branch; the first layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(4)).double()

    def forward(self, x, rank: int):
        first, second, third, branch = self.layers
        y = third(second(first(first(x).tanh())).tanh())
        return branch(y) if rank == 0 else y


def sums_overlap(folder: Path) -> int:
    """Sum gradients during a second backward pass; write them and when their sums began."""
    data_parallel.BUCKET_BYTES = 400
    found, began, started = [], [], []
    start = GradientSums._start
    GradientSums._start = lambda sums: (started.append(sums), start(sums))
    with open_mesh("cpu") as mesh:
        for kind in ("apart", "flat"):
            model = Forked()
            if kind == "apart":
                sums = GradientSums(model.parameters(), mesh)
            else:
                optimizer = FusedAdamEMA(model.parameters())
                sums = GradientSums(model.parameters(), mesh, optimizer.gradient)
            x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(mesh.rank)).double()
            model(x[0], mesh.rank).square().sum().backward()
            with sums.overlapping():
                model(x[1], mesh.rank).square().sum().backward()
            began.append(started.count(sums))
            sums.finish()
            found.append([p.grad.clone() for p in model.parameters()])
        model = Forked()
        optimizer = FusedAdamEMA(model.parameters())
        captured = GradientBuckets(optimizer, mesh)
        for x in torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(mesh.rank)).double():
            captured.differentiate(model(x, mesh.rank).square().sum())
        captured.sum()
        found.append([p.clone() for p in optimizer.gradients])
    torch.save(
        {"gradients": found, "began": began, "order": captured._order}, folder / f"sums{mesh.rank}"
    )
    return 0


MODES = {
    "sums": sums_overlap,
    "capacity": capacity,
    "clip": clip_from_buckets,
    "mace": lambda folder: attempt(mace(folder)),
    "talk": talk,
    "meet-again": meet_again,
    "train": train,
    "gpus": train_on_gpus,
    "end": end,
    "fail-at-the-end": fail_at_the_end,
    "stop": stop,
    "killed": lambda folder: attempt(make(folder, task=Killed(1, 0))),
    "killed-while-busy": lambda folder: attempt(make(folder, task=Killed(1, 600))),
    "first-killed": lambda folder: attempt(make(folder, task=Killed(0, 600))),
    "fail": lambda folder: attempt(make(folder, task=Failing(0))),
    "stuck-gpus": lambda folder: attempt(make(folder, task=Failing(600), train={"device": "cuda"})),
    "fail-gpus": lambda folder: attempt(make(folder, task=Failing(0), train={"device": "cuda"})),
    "stuck": lambda folder: attempt(make(folder, task=Failing(600))),
    "launched": lambda folder: attempt(potential(folder, captured=False)),
    "captured": lambda folder: attempt(potential(folder)),
    "launched-gpus": lambda folder: attempt(potential(folder, "cuda", captured=False)),
    "captured-gpus": lambda folder: attempt(potential(folder, "cuda")),
    "captured-diverge": lambda folder: attempt(potential(folder, poison=True)),
    "diverge": lambda folder: attempt(make(folder, task=tiny.TinyTask(poison=3))),
}


def attempt(run) -> int:
    """Fit and report an error as the command line does."""
    try:
        fit(run)
    except BevatronError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(MODES[sys.argv[1]](Path(sys.argv[2])))
