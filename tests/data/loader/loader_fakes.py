"""Data sets and collate functions for tests of the loader; imported by its worker processes."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import torch


class Numbers:
    """Samples that hold their own number; some kill, stop or delay whoever reads them."""

    def __init__(self, count=40, *, slow=None, kill=None, bad=None, delay=0.0):
        self.count, self.slow, self.kill, self.bad = count, slow or {}, kill, bad
        self.delay = delay

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.slow.get(index, self.delay))
        if index == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.bad:
            raise ValueError("a damaged\nrecord")
        return {"x": np.full(1000, index), "threads": np.array(torch.get_num_threads())}

    def describe(self, index):
        return f"train.xyz, frame {index}"


def collate(samples, indices, weights):
    return {
        "x": torch.stack([torch.from_numpy(s["x"]) for s in samples]),
        "indices": indices,
        "weights": torch.tensor(weights, dtype=torch.float64),
        "half": torch.ones(3, 2, dtype=torch.bfloat16).T,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "threads": int(samples[0]["threads"]),
        "pid": os.getpid(),
    }


def collate_badly(samples, indices, weights):
    raise RuntimeError("shapes differ")


def collate_unpicklable(samples, indices, weights):
    return lambda: None


class Unopenable(Numbers):
    def __setstate__(self, state):
        raise OSError("the store moved")


class SlowToOpen(Numbers):
    def __setstate__(self, state):
        time.sleep(0.3)
        self.__dict__.update(state)


def batches(count=40, size=4):
    return [(np.arange(i, i + size), np.ones(size)) for i in range(0, count, size)]


class KilledOnce(Numbers):
    """Kills the first worker that reads sample 9."""

    def __init__(self, folder):
        super().__init__()
        self.mark = str(folder / "killed")

    def __getitem__(self, index):
        if index == 9 and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class FailsOnce(Numbers):
    """Cannot read sample 9 the first time."""

    def __init__(self, folder):
        super().__init__()
        self.mark = folder / "failed"

    def __getitem__(self, index):
        if index == 9 and not self.mark.exists():
            self.mark.touch()
            raise OSError("the disk is busy")
        return super().__getitem__(index)


class Replaced(Numbers):
    """Another sample stands in for one that cannot be read."""

    def substitute(self, index, attempt):
        return index + 1000 * attempt


class Counted(Numbers):
    """Leaves a file for every sample that was read."""

    def __init__(self, folder):
        super().__init__()
        self.path = str(folder)

    def __getitem__(self, index):
        (Path(self.path) / str(index)).touch()
        return super().__getitem__(index)


class Structures(Numbers):
    def __init__(self, sample):
        super().__init__()
        self.sample = sample

    def __getitem__(self, index):
        return self.sample


def leftovers():
    """Worker processes of this process that still run."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "forkserver" in " ".join(child.cmdline()) and child.ppid() != os.getpid():
                found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found
