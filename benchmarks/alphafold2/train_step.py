"""Times whole training steps of AlphaFold2 on one GPU, the loader included, beside plain PyTorch.

    python -m benchmarks.alphafold2.train_step STORE [--arms ...] [--ladder ...] [--turns 5]
    python -m benchmarks.alphafold2.train_step STORE --stage fine-tuning --arms --compared 0
        --ladder "pair blocks computed again" "each block computed again" --planned

Samples are those of a stage, by default of initial training: crops of 256 residues, 124 rows of the
alignment and 4 of templates (their slots are computed, none is there), 1,024 extra rows; a step is
one of them with 0 to 3 recyclings in turn, dropout, all losses, clipping, Adam and averaged
weights. Arms: our kernels captured as CUDA graphs; the same model in eager PyTorch; each of its
blocks through torch.compile, static shapes; and, if asked for, OpenFold's own source as it trains
with PyTorch alone, its samples made beforehand. Loss and norm of the gradient of every other arm
are compared with those of eager PyTorch in float32 over the same steps. The ladder switches each
optimisation off by itself, in steps without recycling; of fine-tuning's sizes few of its rows fit.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from benchmarks.alphafold2 import openfold
from benchmarks.common import trace
from benchmarks.common.arguments import add_out, script_parser
from benchmarks.common.arms import (
    GIB,
    OUT_OF_MEMORY,
    Arm,
    Steps,
    Training,
    compiled_blocks,
    difference,
    drawn,
    first_batch,
    free,
    or_out_of_memory,
    peak_gib,
    set_policy,
)
from benchmarks.common.report import write_result

from bevatron.data.packing.draws import Draws, Source
from bevatron.data.proteins.chain_samples import ChainSizes
from bevatron.data.proteins.clusters_of_rows import AlignmentRows
from bevatron.errors import DivergenceError
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.evoformer import EvoformerBlock
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.alphafold2.task import AlphaFold2Task
from bevatron.models.alphafold2.templates import TemplatePairBlock
from bevatron.recipes.alphafold2.data import ChainDataset, chain_table
from bevatron.recipes.alphafold2.run import CYCLES, AlphaFold2Run, ChainStage, published_stages
from bevatron.recipes.alphafold2.stores import open_chains
from bevatron.task import StepNumbers
from bevatron.train.memory_plan import plan_memory
from bevatron.train.profiling.timeline import COMMUNICATION, COPY, FUSED, MATRIX, MEMORY, classify
from bevatron.train.run import Run, Stage

BEST = Arm("bevatron")
AGAIN = Arm("each block computed again", policy="all")
EAGER = Arm("eager PyTorch", "reference", "all", captured=False)
COMPILED = replace(EAGER, name="torch.compile", compiled=True)
OPENFOLD = "OpenFold"


def again(name: str, **changes: Any) -> Arm:
    """Change one thing more where each block is computed again; else there is too little memory."""
    return replace(AGAIN, name=f"{AGAIN.name}, {name}", **changes)


LADDER = {
    arm.name: arm
    for arm in (
        BEST,
        AGAIN,
        again("pair attention of PyTorch", plain=("pair_attention",)),
        again("triangle multiplication of PyTorch", plain=("triangle_multiply",)),
        again("queries, keys, values and gates of PyTorch", plain=("qkvg",)),
        again("norms of PyTorch", plain=("layer_norm", "layer_norm_linear")),
        again("all operators of PyTorch", kernels="reference"),
        again("all operators of torch.compile", kernels="reference", compiled=True),
        again("float32", precision="float32"),
        again("float32 with TF32", precision="tf32"),
        again("float16, without scaling of the loss", precision="float16"),
        replace(BEST, name="no CUDA graphs", captured=False),
        replace(BEST, name="no CUDA graphs, Adam not fused", captured=False, fused=False),
        replace(
            BEST, name="no CUDA graphs, no garbage collection", captured=False, collected=False
        ),
        replace(BEST, name="gradients not clipped", clipped=False),
        replace(BEST, name="samples made by the training process", workers=0),
        replace(BEST, name="pair blocks computed again", policy="pair"),
        replace(BEST, name="each sub-layer computed again", policy="paper"),
        EAGER,
        COMPILED,
    )
}
ACTIVATIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EXACT = replace(EAGER, precision="float32")
"""Whose losses and gradients the others' are compared with."""

PUBLISHED = {"host": 9.10, MATRIX: 24.06, MEMORY: 65.03, COPY: 1.82}
"""Shares of the time of OpenFold's step, % (ScaleFold, table 1)."""


class FullChains(ChainDataset):
    """Crops padded to the full size, whatever the chain and its alignment have."""

    def sizes_for(self, rows: AlignmentRows, templates: object | None) -> ChainSizes:  # noqa: ARG002
        """Return the full size."""
        return self.sizes


class InTurn(AlphaFold2Task):
    """The task, with 1 to ``cycles`` passes in turn, or always as many as ``only``."""

    only: int | None = None

    def begin_step(self, numbers: StepNumbers) -> dict[str, int]:
        """Draw all else."""
        super().begin_step(numbers)
        self.cycles = self.only or 1 + numbers.step % self.most_cycles
        return {"cycles": self.cycles}


def sizes_of(given: argparse.Namespace) -> ChainSizes:
    """Return the sizes of the stage, but for those that are given."""
    stage = published_stages()[given.stage]
    return ChainSizes(
        given.crop or stage.crop,
        given.msa_rows or stage.rows,
        given.extra_rows or stage.extra_rows,
        given.templates,
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add what `run_of` takes, but for the stage, which is the first by default."""
    parser.add_argument("store", type=Path, help="of chains, made by `bevatron prepare`")
    parser.add_argument("--preset", default="alphafold2")
    parser.add_argument("--crop", type=int, help="default: that of the stage, as of the rows")
    parser.add_argument("--msa-rows", type=int)
    parser.add_argument("--extra-rows", type=int)
    parser.add_argument("--templates", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.set_defaults(stage="initial")


def run_of(given: argparse.Namespace) -> Run:
    """Build the run that all arms are of; its weights are on the device."""
    sizes = sizes_of(given)
    table = chain_table(open_chains(given.store))
    # Attention passes over padding: what is to be timed are chains that fill a crop.
    if (fills := table.length >= sizes.residues).any():
        table = table.take(fills)
    data = FullChains(given.store, table.units, table.length, sizes, CYCLES)
    draws = Draws([Source("chains", data)], seed=0)
    counted = {"tokens": draws.lengths("tokens")}
    torch.manual_seed(0)
    with torch.device(given.device):
        model = AlphaFold2(AlphaFold2Config.preset(given.preset))
    drawn(model)
    config = AlphaFold2Run.from_values({"train": {"device": given.device}})
    stage = ChainStage(steps=1, samples_per_step=1)
    return Run(
        model=model,
        task=InTurn(CYCLES, [published_stages()[given.stage].loss]),
        train=draws,
        sizes=counted,
        folder=Path("unused"),
        settings=config.settings,
        stages=[Stage("initial", stage, draws, counted)],
    )


def task_of(arm: Arm, run: Run, only: int | None = None) -> InTurn:
    """Make the task of an arm."""
    assert isinstance(run.task, InTurn)
    task = InTurn(CYCLES, run.task.stages, ACTIVATIONS.get(arm.precision))
    task.only = only
    return task


def measured(
    arm: Arm, run: Run, turns: int, only: int | None = None, *, traced: bool = False
) -> tuple[dict[str, Any], Steps | None, list[dict[str, Any]]]:
    """Time an arm; return its row, its steps and the classes of its kernels."""
    each = 1 if only else CYCLES
    # Steps are launched in the first turn and captured in the second; in a third the loader gets
    # ahead. Blocks are compiled in the first two steps: with gradients alone, and without, too.
    lead = 3 * each if arm.captured else 1 + arm.compiled
    row: dict[str, Any] = {"arm": arm.name}
    classes: list[dict[str, Any]] = []
    blocks = [m for m in run.model.modules() if isinstance(m, EvoformerBlock | TemplatePairBlock)]
    on_gpu = next(run.model.parameters()).is_cuda
    trained: list[Training] = []

    def measure() -> Steps:
        training = Training(arm, replace(run, task=task_of(arm, run, only)))
        trained.append(training)
        steps = training.steps(range(lead + each * turns))
        seconds = np.reshape(steps.seconds[lead:], (turns, each))
        row["s/step"] = float(seconds.mean())
        if turns > 1:
            row["spread %"] = 100 * float(np.ptp(seconds.mean(1))) / row["s/step"]
        row["waited %"] = 100 * sum(steps.waited[lead:]) / float(seconds.sum())
        for passes in range(CYCLES if only is None else 0):
            once = seconds[:, (passes - lead) % CYCLES]
            row[f"s, {passes} recyclings"] = (
                alone(training, passes) if arm.captured else float(np.median(once))
            )
        if on_gpu:
            row["peak GiB"] = peak_gib()
            if traced:
                found, classes[:] = shares(training)
                row.update(found)
        return steps

    free()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with compiled_blocks(blocks) if arm.compiled else nullcontext():
        try:
            steps = or_out_of_memory(measure)
            row |= {} if steps else {"s/step": OUT_OF_MEMORY}
        except DivergenceError:
            steps, row["s/step"] = None, "not finite"
    for training in trained:
        training.release()
    return row, steps, classes


def alone(training: Training, number: int, repeats: int = 3) -> float:
    """Time one step by itself, without the loader, in seconds: the median of some."""
    batch = first_batch(training.run)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        training.launch(batch, number).result()
        times.append(time.perf_counter() - began)
    return median(times)


def shares(training: Training) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Trace steps of 1 and 2 recyclings, which are as many as the mean over 0 to 3.

    Returns launches and kernels of a step, and the time by class of kernel.
    """
    batch = first_batch(training.run)
    steps = 2
    numbers = iter(range(1, 1 + steps))
    profiler = trace.profiled(lambda: training.launch(batch, next(numbers)).result(), steps)
    found = trace.summary(profiler, steps)
    spent: dict[str, list[float]] = {}
    for kernel in trace.by_kernel(profiler, steps):
        total = spent.setdefault(classify(str(kernel["kernel"])), [0.0, 0.0])
        total[0] += float(kernel["ms"])
        total[1] += float(kernel["launches"])
    idle = found["idle %"] / 100 * found["busy ms"] / max(1 - found["idle %"] / 100, 1e-9)
    spent["host"] = [idle, found["launches"]]
    whole = sum(ms for ms, _ in spent.values())
    order = ("host", MATRIX, FUSED, MEMORY, COPY, COMMUNICATION)
    rows = [
        {
            "class": name,
            "ms/step": ms,
            "share %": 100 * ms / whole,
            "launches/step": count,
            "OpenFold, published %": PUBLISHED.get(name, ""),
        }
        for name, (ms, count) in sorted(spent.items(), key=lambda item: order.index(item[0]))
    ]
    longest = [{"arm": training.arm.name, **row} for row in trace.by_kernel(profiler, steps)[:60]]
    rows[0]["longest"] = longest
    return {"launches/step": found["launches"], "kernels/step": found["kernels"]}, rows


def exact_steps(run: Run, count: int) -> Steps:
    """Train the first steps exactly."""
    if not count:
        return Steps()
    free()
    training = Training(EXACT, replace(run, task=task_of(EXACT, run)))
    found = training.steps(range(count))
    training.release()
    return found


def off_by(steps: Steps, exact: Steps) -> dict[str, float]:
    """Return how far losses and gradients are from those of the same steps, computed exactly."""
    pair = steps.results, exact.results
    return {
        "loss off by": difference(*([r.loss for r in results] for results in pair)),
        "gradient off by": difference(*([r.grad_norm for r in results] for results in pair)),
    }


def measure(given: argparse.Namespace, run: Run, exact: Steps, *, ladder: bool) -> None:
    """Measure the arms, or what each optimisation brings, and write the result after each."""
    rows: list[dict[str, Any]] = []
    title, ratio, only = ("without", "x all on", 1) if ladder else ("arm", "x ours", None)
    stage = "" if given.stage == "initial" else f"_{given.stage}"
    name_of_result = f"alphafold2/ladder{stage}" if ladder else "alphafold2/train_step"
    exact = Steps(exact.results[:1]) if ladder else exact  # without recycling, too
    for name in given.ladder if ladder else given.arms:
        classes: list[dict[str, Any]] = []
        if name == OPENFOLD:
            row = openfold.measured_step(run, given.slow_turns, CYCLES)
        else:
            arm = LADDER[name]
            turns = given.turns if arm.captured else given.slow_turns
            traced = name in given.traced and not ladder
            row, steps, classes = measured(arm, run, turns, only, traced=traced)
            row |= off_by(steps, exact) if steps and exact.results else {}
            if given.planned and arm.kernels == "auto" and not arm.plain:
                row["planned GiB"] = planned_gib(arm, run, only)
        rows.append({title: row.pop("arm"), **row})
        if isinstance(row["s/step"], float):
            rows[-1][ratio] = row["s/step"] / rows[0]["s/step"]
            rows[-1] |= beside_again(rows) if ladder else {}
        if classes:
            extra = {"kernels": classes[0].pop("longest")}
            write_result(
                f"alphafold2/kernels-{name.split()[0].replace('.', '-')}", classes,
                "Time of a step by class of kernel, mean of 1 and 2 recyclings, of a trace.",
                device=given.device, folder=given.out, extra=extra,
            )  # fmt: skip
        print(rows[-1], flush=True)
        write_result(name_of_result, rows, notes(given), device=given.device, folder=given.out)


def planned_gib(arm: Arm, run: Run, only: int | None) -> float:
    """Plan the peak memory of a step on a GPU, which is not asked for it."""
    set_policy(run.model, arm.policy)
    task = task_of(arm, run, only)
    batch = first_batch(run)
    shape = batch.padding.rounded(batch.padding.size_of(batch.sizes))
    on_host = replace(run, model=deepcopy(run.model).cpu(), task=task)
    return plan_memory(on_host, batch, shape=shape, captured=arm.captured).peak / GIB


def beside_again(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return how much longer the last step takes than one that computes each block again, too."""
    again = [row["s/step"] for row in rows if row["without"] == AGAIN.name]
    if not again or not rows[-1]["without"].startswith(f"{AGAIN.name}, "):
        return {}
    return {"x computed again": rows[-1]["s/step"] / again[0]}


def notes(given: argparse.Namespace) -> str:
    """Say what was trained, and how it was timed."""
    sizes = sizes_of(given)
    return (
        f"Preset {given.preset}, batch 1, crops of {sizes.residues} residues, {sizes.msa_rows} rows"
        f" and {sizes.templates} of templates, {sizes.extra_rows} extra rows, losses of the stage "
        f"{given.stage}, bfloat16 activations unless stated, dropout, all losses, clipping, Adam "
        "and averaged weights. s/step: mean of whole steps end to end, with samples made by the "
        "loader's workers meanwhile, and the spread of its turns; s, n recyclings: of one by "
        "itself, without the loader, where it is captured. peak GiB: all memory, with what graphs "
        "hold. Operators of PyTorch do not fit without computing each block again in the backward "
        "pass. off by: largest relative difference of loss and norm of the gradient from those of "
        "eager PyTorch in float32 over the same steps; of OpenFold, which draws its own dropout, "
        "the loss of one pass without any."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write the results."""
    parser = script_parser(__doc__)
    add_run(parser)
    arms = [arm.name for arm in (BEST, EAGER, COMPILED)]
    parser.add_argument("--arms", nargs="*", choices=[*arms, OPENFOLD], default=arms)
    parser.add_argument("--ladder", nargs="*", choices=[*LADDER], default=[*LADDER])
    parser.add_argument("--traced", nargs="*", choices=arms, default=[BEST.name])
    parser.add_argument("--turns", type=int, default=5, help="of 0 to 3 recyclings")
    parser.add_argument("--slow-turns", type=int, default=1, help="of steps without CUDA graphs")
    parser.add_argument("--compared", type=int, default=2, help="steps that are compared; 0 = none")
    parser.add_argument("--planned", action="store_true", help="also plan their memory on a GPU")
    parser.add_argument("--stage", choices=[*published_stages()])
    add_out(parser)
    given = parser.parse_args(argv)
    run = run_of(given)
    exact = exact_steps(run, given.compared)
    measure(given, run, exact, ladder=False)
    measure(given, run, exact, ladder=True)


if __name__ == "__main__":
    main()
