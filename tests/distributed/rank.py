"""What one rank does in the tests of several processes: ``torchrun rank.py MODE FOLDER``."""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import tiny
import torch

from bevatron.errors import BevatronError
from bevatron.parallel import collectives
from bevatron.parallel.mesh import open_mesh
from bevatron.train.loop import fit

SIZES = [1, 9, 7, 8, 8, 1, 5, 9, 3, 2, 9, 1, 6]
"""Clouds that make unequal batches, some of a single point."""

GROUPS = {
    "batch": {"algorithm": "fixed_count", "size": 1},
    "train": {"epochs": 2, "timeout_minutes": 0.5},
    "optim": {"accumulate": 1},
}


def make(folder: Path, **changes):
    """A run over clouds of `SIZES`."""
    task = changes.pop("task", None) or tiny.TinyTask()
    groups = {key: {**GROUPS.get(key, {}), **value} for key, value in changes.items()
              if isinstance(value, dict)}
    run = tiny.make_run(folder, task=task, **{**GROUPS, **groups})
    run.train = tiny.TinyData(len(SIZES), sizes=SIZES)
    run.sizes = run.train.sizes
    run.resume = changes.get("resume", False)
    return run


def main(mode: str, folder: Path) -> int:
    """Do what a test asks for; return the exit status."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    if mode == "collectives":
        with open_mesh("cpu") as mesh:
            found = {
                "bytes": [len(b) for b in collectives.gather_bytes(b"x" * rank, mesh)],
                "json": collectives.gather_json({"rank": rank}, mesh),
                "broadcast": collectives.broadcast_json(rank + 7, mesh),
                "sum": float(collectives.sum_scalars({"a": rank + 1.0}, mesh)["a"]),
            }
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
        return 0
    if mode == "fit":
        model = tiny.TinyModel(seed=rank)  # rank 0's weights must win
        run = make(folder)
        run.model = model
        fit(run)
        (folder / f"seen{rank}.json").write_text(json.dumps(run.task.seen))
        return 0
    if mode in {"stop", "resume"}:

        class Stopped(tiny.TinyTask):
            def loss(self, *args):
                if mode == "stop" and rank == 1 and len(self.seen) == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                return super().loss(*args)

        task = Stopped()
        result = fit(make(folder, task=task, resume=mode == "resume", train={"epochs": 1}))
        (folder / f"{mode}{rank}.json").write_text(json.dumps(task.seen))
        return 0 if mode == "resume" else result.exit_code - 143
    if mode == "fail":

        class Failing(tiny.TinyTask):
            def loss(self, *args):
                if rank == 1 and len(self.seen) == 3:
                    raise BevatronError("the dog ate sample 3")
                return super().loss(*args)

        return attempt(make(folder, task=Failing()))
    if mode == "stuck":

        class Stuck(tiny.TinyTask):
            def loss(self, *args):
                if rank == 1 and len(self.seen) == 3:
                    raise BevatronError("the dog ate sample 3")
                if rank == 0 and len(self.seen) == 3:
                    time.sleep(600)
                return super().loss(*args)

        return attempt(make(folder, task=Stuck()))
    if mode == "diverge":
        return attempt(make(folder, task=tiny.TinyTask(poison=3)))
    raise ValueError(mode)


def attempt(run) -> int:
    """Fit and report an error as the command line does."""
    try:
        fit(run)
    except BevatronError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
