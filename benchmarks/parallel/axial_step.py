"""Times captured training steps of which several GPUs of a host compute one sample, or one each.

    torchrun --nproc-per-node 2 -m benchmarks.parallel.axial_step alphafold3 STORE [--apart]
    python -m benchmarks.parallel.axial_step alphafold3 STORE
    python -m benchmarks.parallel.axial_step --collect axial-rows

With ``--turns N FOLDER`` so many calls on the same GPUs prepare at once and are timed one after
another. Any number of GPUs; one process without torchrun is the yardstick of all other rows with
the same sample. Samples and weights are those of `benchmarks.alphafold2.train_step` and
`benchmarks.alphafold3.train_step`. With ``--apart`` every GPU has a sample of its own and gradients
are summed while the backward pass goes on.
"""

import argparse
import fcntl
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.alphafold2 import train_step as alphafold2
from benchmarks.alphafold3 import arms as alphafold3
from benchmarks.common import trace
from benchmarks.common.arguments import add_rows, read_all
from benchmarks.common.arms import GIB, Arm, Training, difference, or_out_of_memory
from benchmarks.common.report import hardware, versions, write_result

from bevatron.models.alphafold3.task import StepOptions
from bevatron.parallel.collectives import barrier
from bevatron.parallel.mesh import Mesh, open_mesh
from bevatron.parallel.traffic import count_traffic
from bevatron.train.profiling.timeline import Span, occupation
from bevatron.train.run import SamplesApart, SamplesInGroups, Sharing

Case = dict[str, Any]
OUT_OF_MEMORY = "out of memory"
NOTES = (
    "Captured steps (CUDA graphs) in bfloat16, one sample for every 'GPUs a sample' GPUs, loader, "
    "clipping, Adam and averaged weights included: mean of `steps`. loss, gradient norm: of the "
    "first step, which is launched; replayed off by: how far those of its replay are. policy: what "
    "the backward pass computes again. sent MiB: by one GPU to others of its sample in a step. "
    "waited %: time of the host for samples, which it makes while the GPU is busy. "
    "traced ms, idle ms: of a step that is launched by itself. sending ms, hidden %: time of the "
    "kernels of NCCL in it, waiting for the other GPU included, and how much of that lies beside "
    "other kernels. reserved GiB: most that torch took of a GPU, graphs included. x one GPU: "
    "samples a second."
)
LEAD = 2
"""Steps that are not counted."""
PATIENCE = 60
"""Seconds for which a call that is ready waits for the others: one may have failed."""


class Measurement:
    """Cases of one system on the GPUs of this call.

    Parameters
    ----------
    given
        Arguments.
    mesh, sharing
        All ranks, and how they divide samples.
    """

    def __init__(self, given: argparse.Namespace, mesh: Mesh, sharing: Sharing) -> None:
        self.given, self.mesh, self.sharing = given, mesh, sharing
        given.device = str(mesh.device)
        self._model: Any = None

    def cases(self) -> Iterable[tuple[Case, Arm]]:
        """Name every case, and how it is trained."""
        given = self.given
        sizes = given.lengths if given.system == "alphafold3" else [given.crop]
        each = len(sizes) if len(given.policies) == 1 else 1
        for size, policy in zip(sizes, given.policies * each, strict=True):
            for passes in given.passes:
                case = {"system": given.system, "N": size, "passes": passes, "policy": policy}
                yield case, Arm("bevatron", policy=policy, workers=given.workers)

    def training(self, case: Case, arm: Arm) -> Training:
        """Make the training of a case; all of one system share a model."""
        given = self.given
        if case["system"] == "alphafold2":
            run = alphafold2.run_of(given)
            task = alphafold2.task_of(arm, run, case["passes"])
            return Training(arm, replace(run, task=task, sharing=self.sharing), self.mesh)
        if self._model is None:
            self._model = alphafold3.built(given.preset or "alphafold3", self.mesh.device)
        crops = alphafold3.Crops(given.store, case["N"], rows=given.rows)
        return alphafold3.training_of(
            *(arm, self._model, crops, StepOptions(copies=given.copies)),
            cycles=case["passes"], mesh=self.mesh, sharing=self.sharing,
        )  # fmt: skip

    def row(self, case: Case, arm: Arm) -> tuple[dict[str, Any], list[trace.KernelRow]]:
        """Measure a case, all ranks together; list the kernels of a step that was traced."""
        mesh, on_gpu = self.mesh, self.mesh.device.type == "cuda"
        group = self.sharing.repeats
        row = {**case, "GPUs": mesh.world, "GPUs a sample": group}
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trained: list[Training] = []
        kernels: list[trace.KernelRow] = []

        def measure() -> bool:
            began = time.perf_counter()
            training = self.training(case, arm)
            trained.append(training)
            first = training.steps([0]).results[0]
            row["loss"], row["gradient norm"] = first.loss, first.grad_norm
            with count_traffic() as traffic:
                again = training.steps([0]).results[0]
            pair = (again.loss, again.grad_norm), (first.loss, first.grad_norm)
            row["replayed off by"] = difference(*pair)
            # A capture runs the work twice and records it once.
            row["sent MiB"] = traffic.total / (3 if on_gpu else 1) / 2**20
            row["ready s"] = time.perf_counter() - began
            with turn(self.given, mesh):
                # The host is a step ahead: where one ends is not known of the first two.
                steps = training.steps(range(LEAD + self.given.steps))
                if on_gpu and mesh.world > 1:
                    found, kernels[:] = exchange(training)
                    row.update(found)
            row["steps"], seconds = self.given.steps, sum(steps.seconds[LEAD:])
            row["s/step"] = seconds / self.given.steps
            row["waited %"] = 100 * sum(steps.waited[LEAD:]) / seconds
            if on_gpu:
                row["reserved GiB"] = torch.cuda.max_memory_reserved() / GIB
            return True

        if or_out_of_memory(measure) is None:
            row["s/step"] = OUT_OF_MEMORY
        for training in trained:
            training.release()
        return row, kernels


@contextmanager
def turn(given: argparse.Namespace, mesh: Mesh) -> Iterator[None]:
    """Wait until all calls that take turns are ready, and then for the turn of this one."""
    if given.turns is None:
        yield
        return
    count, folder = int(given.turns[0]), Path(given.turns[1])
    with (folder / "turn").open("w") as lock:
        if mesh.is_main:
            (folder / f"ready-{time.time_ns()}").touch()
            last = time.monotonic() + PATIENCE
            while len([*folder.glob("ready-*")]) < count and time.monotonic() < last:
                time.sleep(0.05)
            fcntl.flock(lock, fcntl.LOCK_EX)
        barrier(mesh)
        yield
        barrier(mesh)


def exchange(training: Training) -> tuple[dict[str, float], list[trace.KernelRow]]:
    """Trace one step of this rank: how long it communicates, how much of that is hidden."""
    batch = training.run.task.collate([training.run.train[0]], np.zeros(1, np.int64), [1.0])
    profiler = trace.profiled(lambda: training.launch(batch, 0).result(), 1)
    spans = [
        Span(event.name(), event.start_ns(), event.duration_ns())
        for event in trace.device_events(profiler)
    ]
    found = occupation(spans, (min(s.start for s in spans), max(s.end for s in spans)))
    sending = found.communicating + found.overlapped
    row = {
        "traced ms": found.window / 1e6,
        "idle ms": found.idle / 1e6,
        "sending ms": sending / 1e6,
        "hidden %": 100 * found.overlapped / max(sending, 1),
    }
    return row, trace.by_kernel(profiler, 1)[:60]


def measure_all(given: argparse.Namespace) -> None:
    """Measure all cases and keep the row of each."""
    with open_mesh(given.device, timeout_seconds=300) as mesh:
        apart = given.apart or mesh.world == 1
        sharing = SamplesApart() if apart else SamplesInGroups(mesh.world)
        with sharing.joined(mesh):
            measurement = Measurement(given, mesh, sharing)
            for case, arm in measurement.cases():
                row, kernels = measurement.row(case, arm)
                if mesh.is_main:
                    keep(row, kernels, given, mesh)


def keep(
    row: dict[str, Any], kernels: list[trace.KernelRow], given: argparse.Namespace, mesh: Mesh
) -> None:
    """Write a row with its kernels and what it was measured on."""
    print(row, flush=True)
    on = {"hardware": hardware(mesh.device.type), "versions": versions()}
    found = {"measured on": on, "notes": notes(given), "row": row, "kernels": kernels}
    given.out.mkdir(parents=True, exist_ok=True)
    keys = ("system", "N", "passes", "policy", "GPUs", "GPUs a sample")
    path = given.out / ("step-" + "-".join(str(row[key]) for key in keys) + ".json")
    path.write_text(json.dumps(found))


def collect(folder: Path, results: Path) -> None:
    """Join the rows of all calls, set them beside one GPU, and write the result."""
    found = read_all(folder, "step-*.json")
    rows = compared([one["row"] for one in found])
    kernels = [
        {key: one["row"][key] for key in ("system", "N", "GPUs", "GPUs a sample")} | kernel
        for one in found
        for kernel in one["kernels"]
    ]
    said = list(dict.fromkeys(one["notes"] for one in found))
    on = max(found, key=lambda one: one["row"]["GPUs"])["measured on"]
    device = "cpu" if on["hardware"].startswith("cpu") else "cuda"
    write_result(
        "parallel/axial_step", rows, " ".join([*said, NOTES]), device=device, folder=results,
        measured_on=on, extra={"kernels": kernels},
    )  # fmt: skip


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort the rows and set each beside one GPU: samples a second over its, loss, memory."""
    rows = sorted(rows, key=lambda r: (r["system"], r["N"], r["passes"], r["policy"], r["GPUs"]))
    for row in rows:
        same = [
            r for r in rows
            if r["GPUs"] == 1 and all(r[k] == row[k] for k in ("system", "N", "passes", "policy"))
        ]  # fmt: skip
        if not same or "loss" not in same[0] or "loss" not in row:
            continue
        one = same[0]
        samples = row["GPUs"] // row["GPUs a sample"]
        if "s/step" in row:
            row["x one GPU"] = samples * one["s/step"] / row["s/step"]
        if samples == 1:
            row["loss off by"] = abs(row["loss"] - one["loss"]) / abs(one["loss"])
            row["gradient off by"] = (
                abs(row["gradient norm"] - one["gradient norm"]) / one["gradient norm"]
            )
        if "reserved GiB" in row:
            row["x its memory"] = row["reserved GiB"] / one["reserved GiB"]
    return rows


def notes(given: argparse.Namespace) -> str:
    """Say what was trained."""
    if given.system == "alphafold2":
        said = (
            f"alphafold2: crops of {given.crop} residues, {given.msa_rows} rows, {given.templates} "
            f"of templates, {given.extra_rows} extra rows; passes: 1 + recyclings."
        )
    else:
        said = (
            f"alphafold3: crops of N tokens, {given.rows} rows, {given.copies} noisy copies, "
            "rollout of 20 steps and confidence head in every step."
        )
    return said


def main() -> None:
    """Measure on the ranks of this call, or join the rows of all calls."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("system", nargs="?", choices=["alphafold2", "alphafold3"])
    parser.add_argument("store", nargs="?", type=Path, help="made by `bevatron prepare`")
    parser.add_argument("--apart", action="store_true", help="every GPU has samples of its own")
    parser.add_argument("--lengths", nargs="*", type=int, default=[384, 768], help="of alphafold3")
    parser.add_argument("--policies", nargs="*", default=["none"], help="for each length, or all")
    parser.add_argument("--passes", nargs="*", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--preset")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=1024, help="of the alignment, of alphafold3")
    parser.add_argument("--copies", type=int, default=48)
    parser.add_argument("--crop", type=int, default=256, help="and all below: of alphafold2")
    parser.add_argument("--msa-rows", type=int, default=124)
    parser.add_argument("--extra-rows", type=int, default=1024)
    parser.add_argument("--templates", type=int, default=4)
    parser.add_argument("--turns", nargs=2, metavar=("N", "FOLDER"), help="of N calls at once")
    parser.set_defaults(stage="initial")
    add_rows(parser, "axial-rows")
    given = parser.parse_args()
    if given.preset is None and given.system is not None:
        given.preset = given.system
    collect(given.collect, given.results) if given.collect else measure_all(given)


if __name__ == "__main__":
    main()
