"""Write the stores, runs and models in ``tests/fixtures/0.1.0``, as bevatron 0.1.0 wrote them.

``tests/test_fixtures.py`` proves with them that later code reads what 0.1.0 has written and resumes
its runs to the last bit. So they are never made again: this tool tells how they came about. It
hooks into the trainer of 0.1.0 and need not run with any later code::

    OMP_NUM_THREADS=1 python tools/make_fixtures.py [CASE ...]

Every case is a folder with ``run.yaml``, written by hand, to which this adds

=============  ====================================================================================
data           a prepared store and the file it was prepared from, or graphs as npz
``stopped``    a run that SIGTERM stopped, as it left its folder
``finished``   metrics, model.json and weights of the same run without an interruption; in
               ``mace-moved`` those of the stopped run, resumed with `MOVED`
``predicted``  what ``bevatron predict`` wrote with the finished model
=============  ====================================================================================
"""

import argparse
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from bevatron.cli import main as bevatron
from bevatron.data.dataset import Dataset
from bevatron.parallel.mesh import Mesh
from bevatron.recipes import recipe
from bevatron.recipes.training import configuration
from bevatron.train.epochs import plan_epoch
from bevatron.train.logger import Logger
from bevatron.train.loop import fit
from bevatron.typing import Arrays, IntArray

ROOT = Path(__file__).parents[1]
OUT = ROOT / "tests/fixtures/0.1.0"
DEMO = files("bevatron.recipes") / "demo_data"
CUTOFF = "3.0"
LAST_STEP = {"mace": 5, "mace-moved": 7, "gpspp": 13, "graph": 4, "graphs": 4}
"""The step after which SIGTERM arrives; the run stops after the next one."""

MOVED = ["--loader.workers", "0", "--loader.window", "1", "--batch.capacity", "15"]
"""What is changed when the run that was stopped on two ranks goes on, on one."""

KEPT = ("metrics.jsonl", "model.json", "weights.safetensors", "graph_options.json")


def frames(atoms: range) -> list[str]:
    """Return the text of every second bundled structure with so many atoms."""
    found = []
    with gzip.open(str(DEMO / "structures.extxyz.gz"), "rt") as file:
        for line in file:
            frame = "".join([line, *islice(file, int(line) + 1)])
            if int(line) in atoms:
                found.append(frame)
    return found[::2]


def graph(seed: int, num_nodes: int, classes: int = 3, width: int = 6) -> dict[str, np.ndarray]:
    """Draw a graph whose classes can be learned from edges and features."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(num_nodes) % classes)
    chance = 0.03 + 0.2 * np.equal.outer(labels, labels)
    pairs = np.argwhere(np.triu(rng.random((num_nodes, num_nodes)) < chance, 1))
    likely = 0.1 + 0.5 * (np.arange(width) % classes == labels[:, None])
    features = rng.random((num_nodes, width)) < likely
    features[:, 0] = True
    return {
        "edge_src": pairs.ravel(), "edge_dst": pairs[:, ::-1].ravel(),
        "num_nodes": np.array(num_nodes), "x": features.astype(np.float32), "y": labels,
    }  # fmt: skip


def mace() -> None:
    """Write structures and prepare them."""
    Path("structures.extxyz").write_text("".join(frames(range(3, 10))[::2][:26]))
    run("prepare", "structures.extxyz", "--out", "store", "--cutoff", CUTOFF, "--workers", "1")


def mace_moved() -> None:
    """Write structures of two heads and prepare the first."""
    some = frames(range(3, 8))
    Path("one.extxyz").write_text("".join(some[::2]))
    Path("two.extxyz").write_text("".join(some[1::2]))
    run("prepare", "one.extxyz", "--out", "store", "--cutoff", CUTOFF, "--workers", "1")


def gpspp() -> None:
    """Write molecules with positions and prepare them."""
    with gzip.open(str(DEMO / "molecules.csv.gz"), "rt") as file:
        Path("molecules.csv").write_text("".join(islice(file, 37)))
    run("prepare", "molecules.csv", "--out", "store", "--workers", "1")


def one_graph() -> None:
    """Write a graph with its splits."""
    order = np.random.default_rng(1).permutation(60)
    parts = dict(zip(("train", "val", "test"), np.split(order, 3), strict=True))
    np.savez_compressed("graph.npz", **graph(0, 60), **parts)


def several_graphs() -> None:
    """Write graphs of several sizes."""
    for i in range(6):
        np.savez_compressed(f"graph-{i}.npz", **graph(i, 18 + 3 * i))


DATA: dict[str, Callable[[], None]] = {
    "mace": mace,
    "mace-moved": mace_moved,
    "gpspp": gpspp,
    "graph": one_graph,
    "graphs": several_graphs,
}
PREDICT = {
    "mace": ("structures.extxyz", "predicted.extxyz", "--dtype", "float64"),
    "mace-moved": ("two.extxyz", "predicted.extxyz", "--dtype", "float64", "--head", "two"),
    "gpspp": ("store", "predicted.csv", "--precision", "float32"),
    "graph": ("graph.npz", "predicted.npz", "--dtype", "float64"),
    "graphs": ("graph-5.npz", "predicted.npz", "--dtype", "float64"),
}


def run(*arguments: str) -> None:
    """Call a command of ``bevatron``."""
    code = bevatron(list(arguments))
    if code != 0:
        raise SystemExit(f"bevatron {' '.join(arguments)} ended with {code}")


@contextmanager
def signal_after(last: int) -> Iterator[None]:
    """Send SIGTERM to this process when the trainer writes the record of a step."""
    write = Logger.step

    def write_and_stop(self: Logger, progress, *others):
        write(self, progress, *others)
        if progress.step == last:
            os.kill(os.getpid(), signal.SIGTERM)

    Logger.step = write_and_stop  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Logger.step = write  # type: ignore[method-assign]


class SlowSamples:
    """A data set of which some samples take their time, so that their batch is overtaken."""

    def __init__(self, dataset: Dataset, slow: frozenset[int]) -> None:
        self.dataset, self.slow = dataset, slow

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Arrays:
        time.sleep(6.0 if index in self.slow else 0.0)
        return self.dataset[index]

    def describe(self, index: int) -> str:
        """Name a sample."""
        return self.dataset.describe(index)

    def lengths(self, field: str) -> IntArray:
        """Count the rows of a field in every sample."""
        return self.dataset.lengths(field)


def stop_on_a_rank() -> None:
    """Train as one of two ranks until SIGTERM, which comes while the next batch is being read."""
    config = configuration("run.yaml")
    made = recipe(config.recipe)[1](config)
    settings, last = made.settings, LAST_STEP["mace-moved"]
    plan = plan_epoch(made.sizes, settings.batch, Mesh(0, 2), seed=settings.train.seed, epoch=0)
    made.train = SlowSamples(made.train, frozenset(plan.batches[last][0].tolist()))
    with signal_after(last):
        fit(made)


def moved_run() -> None:
    """Stop a run on two ranks and finish it on one."""
    # The output is set in the file, for the ranks read nothing else.
    text = Path("run.yaml").read_text()
    Path("run.yaml").write_text(re.sub("output: run", "output: stopped", text))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([sys.executable, *launch, __file__, "--rank"], check=True)
    (state,) = Path("stopped/checkpoints").glob("step-*/state.json")
    segment = json.loads(state.read_text())["progress"]["segments"][-1]
    if not (any(segment["ahead"]) and any(segment["skipped"])):
        raise SystemExit(f"no batch was overtaken: {segment}")
    shutil.copytree("stopped", "finished")
    run("train", "run.yaml", "--output", "finished", "--resume", "must", *MOVED)


def whole_and_stopped_run(case: str) -> None:
    """Train without an interruption, and again until SIGTERM."""
    run("train", "run.yaml", "--output", "finished")
    with signal_after(LAST_STEP[case]):
        code = bevatron(["train", "run.yaml", "--output", "stopped"])
    if code != 128 + signal.SIGTERM:
        raise SystemExit(f"{case}: was not stopped, but ended with {code}")


def make(case: str) -> None:
    """Make all files of a case."""
    out, before = OUT / case, Path.cwd()
    with tempfile.TemporaryDirectory() as work:
        shutil.copy(out / "run.yaml", work)
        os.chdir(work)
        try:
            DATA[case]()
            if case == "mace-moved":
                moved_run()
            else:
                whole_and_stopped_run(case)
            run("predict", "finished", *PREDICT[case])
            Path("run.yaml").unlink()
            for path in Path("finished").iterdir():
                if path.name not in KEPT:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            for path in out.iterdir():
                if path.name != "run.yaml":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            shutil.copytree(".", out, dirs_exist_ok=True)
        finally:
            os.chdir(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(DATA))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank:
        stop_on_a_rank()
        return
    for case in options.cases:
        make(case)


if __name__ == "__main__":
    main()
