"""Times captured training steps of which several GPUs of a host compute one sample, or one each.

    torchrun --nproc-per-node 2 -m benchmarks.parallel.axial_step alphafold3 STORE
    python -m benchmarks.parallel.axial_step alphafold3 STORE
    python -m benchmarks.parallel.axial_step alphafold3 STORE --plan 2
    python -m benchmarks.parallel.axial_step --collect axial-rows

Any number of GPUs; one process without torchrun is the yardstick of all other rows with the same
sample. Samples and weights are those of `benchmarks.alphafold2.train_step` and
`benchmarks.alphafold3.train_step`. With ``--sharing apart`` every GPU has a sample of its own and
gradients are summed beside the backward pass, or behind it. ``--launched`` times steps without
graphs too. ``--steps 0`` takes one launched step: for the longest crops. ``--plan`` counts on a
CPU, on tensors without memory, the bytes that the first of so many GPUs will send.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.alphafold2 import train_step as alphafold2
from benchmarks.alphafold3 import arms as alphafold3
from benchmarks.common import trace
from benchmarks.common.arguments import add_rows, read_all, script_parser
from benchmarks.common.arms import (
    GIB,
    OUT_OF_MEMORY,
    Arm,
    Training,
    difference,
    or_out_of_memory,
)
from benchmarks.common.report import hardware, versions, write_result
from benchmarks.parallel.links import carrier, nccl_settings

from bevatron.models.alphafold2.task import CYCLES
from bevatron.models.alphafold3.task import StepOptions
from bevatron.parallel.axial import one_of, sample_group
from bevatron.parallel.collectives import barrier
from bevatron.parallel.mesh import Mesh, open_mesh
from bevatron.parallel.traffic import count_traffic
from bevatron.task import StepNumbers
from bevatron.train.capture.gradients import GradientBuckets
from bevatron.train.memory_plan import plan_memory
from bevatron.train.profiling.timeline import Span, occupation
from bevatron.train.run import SamplesApart, SamplesInGroups, Sharing

MIB = 2**20
Case = dict[str, Any]
NOTES = (
    "Captured steps (CUDA graphs) in bfloat16, launched ones where graphs are off, one sample for "
    "every 'GPUs a sample' GPUs, loader, clipping, Adam and averaged weights included: mean of "
    "`steps`, of launched ones including what the host takes. loss, gradient norm: of the "
    "first step, which is launched; replayed off by: how far those of its replay are. policy: what "
    "the backward pass computes again. sums: of the gradients of GPUs with samples of their own. "
    "exchanges: through windows or NCCL; NCCL: its settings. sent MiB: by one GPU to others of its "
    "sample in a step; planned MiB: the same, counted on a CPU without running the step. waited %: "
    "time of the host for samples, which it makes while the GPU is busy. traced ms, idle ms: of "
    "the replay of one step without recycling, by itself. sending ms, hidden %: time of the "
    "kernels and copies of exchanges in it, waiting for the other GPU included, and how much of "
    "that lies beside other kernels. reserved GiB: most that torch took of a GPU, graphs included. "
    "x one GPU: samples a second, over the fastest policy there, of the same call. peak GiB: most "
    "that was in use of a GPU, of launched steps; where there is one step, the first of its "
    "process, it is to see that a crop of so many tokens fits."
)
OF_TORCH = 0.96
"""Share of a GPU's memory."""
ARMS = {"bevatron": "auto", "eager": "reference"}
"""Which implementation of the operators runs in each."""
LEAD = 2
"""Rounds that are not counted: the loader's workers start in the first; the host is a step ahead of
captured ones, and where one ends is not known."""


class Measurement:
    """Cases of one system on the GPUs of this call.

    Parameters
    ----------
    given
        Arguments.
    mesh
        All ranks.

    Attributes
    ----------
    sharing
        How they divide samples.
    """

    def __init__(self, given: argparse.Namespace, mesh: Mesh) -> None:
        self.given, self.mesh = given, mesh
        self.sharing: Sharing = SamplesApart()
        given.device = str(mesh.device)
        self._model: Any = None

    def cases(self) -> Iterable[tuple[Case, Arm]]:
        """Name every case, and how it is trained; divide its samples while it is."""
        given, mesh = self.given, self.mesh
        sizes = given.lengths if given.system == "alphafold3" else [given.crop]
        lists = (given.policies, given.sharing)
        each = [x * len(sizes) if len(x) == 1 else x for x in lists]
        for size, policy, sharing in zip(sizes, *each, strict=True):
            together = sharing == "together" and mesh.world > 1
            self.sharing = SamplesInGroups(mesh.world) if together else SamplesApart()
            with self.sharing.joined(mesh):
                for passes in given.passes:
                    mean = passes or (1 + CYCLES) / 2
                    case = {"system": given.system, "N": size, "passes": mean, "policy": policy}
                    case["arm"], implementation = given.arm, ARMS[given.arm]
                    captured = given.steps > 0 and given.arm == "bevatron"
                    arm = Arm(given.arm, implementation, policy, captured, workers=given.workers)
                    yield case, arm
                    if given.launched and captured:
                        yield case, replace(arm, captured=False)

    def training(self, case: Case, arm: Arm) -> Training:
        """Make the training of a case; all of one system share a model."""
        given = self.given
        if case["system"] == "alphafold2":
            run = alphafold2.run_of(given)
            task = alphafold2.task_of(arm, run, int(case["passes"]) if alone(case) else None)
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
        row["NCCL"] = nccl_settings() if on_gpu else ""
        row["graphs"] = "on" if arm.captured else "off"
        row["exchanges"] = carrier(sample_group(), mesh.device)
        if mesh.world > group:
            row["sums"] = "behind" if self.given.behind else "beside"
        first_round = range(1 if alone(case) else CYCLES)
        rounds = self.given.steps if arm.captured else self.given.launched
        counted = LEAD * len(first_round), rounds * len(first_round)
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            # Kernels are loaded into what torch leaves, and would not ask for what it only keeps.
            torch.cuda.set_per_process_memory_fraction(OF_TORCH)
        trained: list[Training] = []
        kernels: list[trace.KernelRow] = []

        def measure() -> bool:
            began = time.perf_counter()
            training = self.training(case, arm)
            trained.append(training)
            first = training.steps(first_round).results[0]
            row["loss"], row["gradient norm"] = first.loss, first.grad_norm
            if not arm.captured:
                if self.given.launched:
                    seconds = training.steps(range(sum(counted))).seconds
                    lead, row["steps"] = counted
                    row["s/step"] = sum(seconds[lead:]) / row["steps"]
                else:
                    row["s/step"], row["steps"] = time.perf_counter() - began, 1
                if on_gpu:
                    row["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
                return True
            with count_traffic() as traffic:
                again = training.steps(first_round).results[0]
            pair = (again.loss, again.grad_norm), (first.loss, first.grad_norm)
            row["replayed off by"] = difference(*pair)
            # A capture runs the work twice and records it once; processes agree on its size.
            sent = traffic.total - traffic.sent["all_reduce"]
            row["sent MiB"] = sent / (3 if on_gpu else 1) / len(first_round) / MIB
            row["ready s"] = time.perf_counter() - began
            steps = training.steps(range(sum(counted)))
            if on_gpu:
                found, kernels[:] = exchange(training, mesh)
                row.update(found)
            lead, row["steps"] = counted
            seconds = sum(steps.seconds[lead:])
            row["s/step"] = seconds / row["steps"]
            row["waited %"] = 100 * sum(steps.waited[lead:]) / seconds
            if on_gpu:
                row["reserved GiB"] = torch.cuda.max_memory_reserved() / GIB
            return True

        # Others would wait for a rank that goes on with the next case.
        if (or_out_of_memory(measure) if mesh.world == 1 else measure()) is None:
            row["s/step"] = OUT_OF_MEMORY
        for training in trained:
            training.release()
        return row, kernels


def alone(case: Case) -> bool:
    """Whether all steps of a case have the same number of passes."""
    return float(case["passes"]).is_integer()


def exchange(training: Training, mesh: Mesh) -> tuple[dict[str, float], list[trace.KernelRow]]:
    """Trace one step of this rank: how long it communicates, how much of that is hidden."""
    batch = training.run.task.collate([training.run.train[0]], np.zeros(1, np.int64), [1.0])

    def step() -> None:
        barrier(mesh)  # none waits for another that made its sample later
        training.launch(batch, 0).result()

    profiler = trace.profiled(step, 1)
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
        measurement = Measurement(given, mesh)
        with sums_behind() if given.behind else nullcontext():
            for case, arm in measurement.cases():
                row, kernels = measurement.row(case, arm)
                if mesh.is_main:
                    keep(row, kernels, given, mesh)


@contextmanager
def sums_behind() -> Iterator[None]:
    """Sum gradients over GPUs behind the backward pass, not beside it."""
    make = GradientBuckets.__init__

    def made(buckets: GradientBuckets, *given: Any) -> None:
        make(buckets, *given)
        buckets._stream, buckets._ends = None, []  # noqa: SLF001

    with patch.object(GradientBuckets, "__init__", made):
        yield


def plan_all(given: argparse.Namespace) -> None:
    """Plan what the first of so many GPUs sends in each case, and keep a file of each."""
    measurement = Measurement(given, Mesh())
    for case, arm in measurement.cases():
        measurement.sharing = SamplesInGroups(given.plan)
        training = measurement.training(case, replace(arm, captured=False))
        task, rounds = training.run.task, 1 if alone(case) else CYCLES
        task.activations = torch.bfloat16
        batch = task.collate([training.run.train[0]], np.zeros(1, np.int64), [1.0])
        shape = batch.padding.rounded(batch.padding.size_of(batch.sizes))
        with one_of(given.plan), count_traffic() as traffic:
            for number in range(rounds):
                plan_memory(training.run, batch, shape=shape, numbers=StepNumbers(number, 0))
        planned = {**case, "GPUs a sample": given.plan, "planned MiB": traffic.total / rounds / MIB}
        given.out.mkdir(parents=True, exist_ok=True)
        name = "-".join(str(planned[key]) for key in ("system", "N", "passes", "policy"))
        (given.out / f"plan-{name}-{given.plan}.json").write_text(json.dumps(planned))
        print(planned, flush=True)


def keep(
    row: dict[str, Any], kernels: list[trace.KernelRow], given: argparse.Namespace, mesh: Mesh
) -> None:
    """Write a row with its kernels and what it was measured on."""
    print(row, flush=True)
    on = {"hardware": hardware(mesh.device.type), "versions": versions()}
    found = {"measured on": on, "notes": notes(given), "row": row, "kernels": kernels}
    given.out.mkdir(parents=True, exist_ok=True)
    keys = ("system", "N", "passes", "policy", "arm", "GPUs", "GPUs a sample", "sums", "graphs")
    path = given.out / ("step-" + "-".join(str(row.get(key, "")) for key in keys) + ".json")
    path.write_text(json.dumps(found))


def collect(folder: Path, results: Path) -> None:
    """Join the rows of all calls, set them beside one GPU, and write the result."""
    found = read_calls(folder)
    plans = [json.loads(path.read_text()) for path in folder.rglob("plan-*.json")]
    rows = compared([planned(one["row"], plans) for one in found])
    kernels = [
        {key: one["row"].get(key) for key in ("system", "N", "GPUs", "GPUs a sample", "call")}
        | kernel
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


def read_calls(folder: Path) -> list[dict[str, Any]]:
    """Read all rows; those in a folder of their own are of another call, which they name."""
    found = read_all(folder, "step-*.json")
    for one, path in zip(found, sorted(folder.rglob("step-*.json")), strict=True):
        if path.parent != folder:
            one["row"]["call"] = path.parent.name
    return found


def planned(row: dict[str, Any], plans: list[dict[str, Any]]) -> dict[str, Any]:
    """Add what was planned to a row."""
    keys = ("system", "N", "passes", "policy", "GPUs a sample")
    same = [plan for plan in plans if all(plan[key] == row[key] for key in keys)]
    return row | {"planned MiB": same[0]["planned MiB"]} if same else row


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort the rows and set each beside one GPU of its call: samples a second, loss, memory."""
    order = ("system", "N", "passes", "policy", "GPUs")
    alike = ("system", "N", "passes", "arm", "graphs", "call")
    rows = sorted(map(dict, rows), key=lambda row: [row[key] for key in order])
    for row in rows:
        same = [
            r for r in rows
            if r["GPUs"] == 1 and all(r.get(k) == row.get(k) for k in alike)
            and not isinstance(r["s/step"], str)
        ]  # fmt: skip
        if not same or isinstance(row["s/step"], str):
            continue
        one = min(same, key=lambda r: r["s/step"])
        samples = row["GPUs"] // row["GPUs a sample"]
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
    if given.system == "alphafold2":
        said = (
            f"alphafold2: crops of {given.crop} residues, {given.msa_rows} rows, {given.templates} "
            f"of templates, {given.extra_rows} extra rows; passes: 1 + recyclings, 2.5 on average "
            "if 1 to 4 in turn."
        )
    else:
        said = (
            f"alphafold3: crops of N tokens, {given.rows} rows, {given.copies} noisy copies, "
            "rollout of 20 steps and confidence head in every step."
        )
    return said


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("system", nargs="?", choices=["alphafold2", "alphafold3"])
    parser.add_argument("store", nargs="?", type=Path, help="made by `bevatron prepare`")
    parser.add_argument("--lengths", nargs="*", type=int, default=[384, 768], help="of alphafold3")
    parser.add_argument("--policies", nargs="*", default=["none"], help="for each length, or all")
    parser.add_argument(
        "--sharing", nargs="*", choices=["together", "apart"], default=["together"], help="the same"
    )
    parser.add_argument(
        "--passes", nargs="*", type=int, default=[1], help="of alphafold2 0: 1 to 4 in turn"
    )
    parser.add_argument("--arm", choices=[*ARMS], default="bevatron", help="eager: launched only")
    parser.add_argument("--steps", type=int, default=10, help="of every number of passes")
    parser.add_argument("--launched", type=int, default=0, help="the same, without graphs")
    parser.add_argument("--behind", action="store_true", help="sum gradients behind the pass")
    parser.add_argument("--plan", type=int, metavar="GPUS", help="count what will be sent")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--preset")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=1024, help="of the alignment, of alphafold3")
    parser.add_argument("--copies", type=int, default=48)
    parser.add_argument("--crop", type=int, default=256, help="and all below: of alphafold2")
    parser.add_argument("--msa-rows", type=int, default=124)
    parser.add_argument("--extra-rows", type=int, default=1024)
    parser.add_argument("--templates", type=int, default=4)
    parser.set_defaults(stage="initial")
    add_rows(parser, "axial-rows")
    given = parser.parse_args()
    if given.preset is None and given.system is not None:
        given.preset = given.system
    if given.collect:
        collect(given.collect, given.results)
    elif given.plan:
        plan_all(given)
    else:
        measure_all(given)


if __name__ == "__main__":
    main()
