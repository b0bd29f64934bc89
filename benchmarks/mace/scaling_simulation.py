"""A simulation: epochs of the paper's 2.65 million graphs on 16 to 740 GPUs, three batchings.

    python -m benchmarks.mace.scaling_simulation PATH/mptrj_random_1k.extxyz.gz --costs costs.json

Nothing here is measured on more than the GPU whose steps gave the costs. Sizes are drawn from the
ranges of Table 3 of Firoz et al. (arXiv:2504.10700): MPtrj's from a random sample of it, one in two
thousand log-uniform from there to 444 atoms, those of all other sets uniform (tools/paper_mix.py).
`pack` makes the very plans that training would use. A rank's step takes

    t = a * atoms + b * edges + c * structures + d        (fitted to steps on one GPU)

and every step ends when the slowest rank is done and the gradients are summed:

    t_sum = 2 (p - 1) / p * bytes / bandwidth + 2 ceil(log2 p) * latency        (ring, tree)

with no overlap assumed. The straggler loss is the share of the epoch in which the mean rank waits
for the slowest; the efficiency is relative to the same batching on the fewest GPUs. The paper's
points were taken on other GPUs (A100) with other kernels: compare slopes, not seconds.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.arguments import script_parser
from benchmarks.common.report import add_picture, write_result
from tools.paper_mix import CAPACITY, Mix, paper_mix

from bevatron.data.packing import Plan, pack
from bevatron.models.mace import MACE, MaceConfig
from bevatron.train.report import plots

BATCHINGS: dict[str, dict[str, Any]] = {
    "fixed_count": {"algorithm": "fixed_count", "batch_size": 7},
    "algorithm1": {"algorithm": "algorithm1", "oversized": "alone"},
    "balanced": {"algorithm": "balanced", "oversized": "alone"},
}
STRONG = (16, 32, 64, 128, 256, 512, 740)
WEAK = ((0.6, 168), (1.2, 335), (2.65, 740))
"""Millions of graphs and GPUs: the same number of graphs for each GPU."""

ELEMENTS = 89
"""Of MPtrj: most weights, and so most of what is summed over the GPUs, belong to an element."""

POINTS = {
    "the paper, fixed counts": {64: 100.0, 740: 12.0},
    "the paper, its batches and kernels": {16: 80.0, 64: 18.0, 740: 2.0},
}
"""Minutes of an epoch by the number of GPUs (A100)."""

PAPER = (
    "The paper: 80 min an epoch at 16 GPUs; 100 min with fixed counts and 18 min with its batches "
    "and kernels at 64; 12 and 2 min at 740; weak scaling over 0.6, 1.2 and 2.65 million graphs."
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what its batch holds."""

    atoms: float
    edges: float
    graphs: float
    constant: float

    def of(self, plan: Plan, mix: Mix) -> np.ndarray:
        """Return the time of every rank's step, [ranks, steps]."""
        owner = np.repeat(np.arange(plan.num_batches), np.diff(plan.offsets))
        weights = (mix.num_atoms, mix.num_edges, np.ones_like(mix.num_atoms))
        atoms, edges, graphs = (
            np.bincount(owner, weights=w[plan.indices], minlength=plan.num_batches) for w in weights
        )
        seconds = self.atoms * atoms + self.edges * edges + self.graphs * graphs + self.constant
        return seconds.reshape(len(plan), -1)


def simulate(
    mix: Mix, batching: str, num_gpus: int, step_time: StepTime, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Plan an epoch and add up its steps."""
    balance = step_time.atoms * mix.num_atoms + step_time.edges * mix.num_edges + step_time.graphs
    ours = {"balance": balance} if batching == "balanced" else {}
    plan = pack(mix.num_atoms, CAPACITY, num_gpus, **BATCHINGS[batching], **ours)
    seconds = step_time.of(plan, mix)
    slowest = float(seconds.max(axis=0).sum())
    moved = 2 * (num_gpus - 1) / num_gpus * arguments.gradient_bytes
    communication = plan.num_steps * (
        moved / arguments.bandwidth + 2 * math.ceil(math.log2(num_gpus)) * arguments.latency
    )
    total = slowest + communication
    return {
        "GPUs": num_gpus,
        "batching": batching,
        "graphs": len(mix.num_atoms),
        "steps": plan.num_steps,
        "epoch min": round(total / 60, 3),
        "waiting for the slowest %": round(
            100 * (slowest - float(seconds.mean(axis=0).sum())) / total, 2
        ),
        "communication %": round(100 * communication / total, 2),
        "fill": round(plan.fill, 3),
        "seconds": total,
    }


def with_efficiency(rows: list[dict[str, Any]], *, weak: bool) -> None:
    """Add the efficiency relative to the fewest GPUs of the same batching."""
    for row in rows:
        first = min(
            (
                r
                for r in rows
                if r["batching"] == row["batching"] and r["kernels"] == row["kernels"]
            ),
            key=lambda r: r["GPUs"],
        )
        work = row["graphs"] / first["graphs"] if weak else 1.0
        ideal = first["seconds"] * first["GPUs"] * work / row["GPUs"]
        row["efficiency %"] = round(100 * ideal / row["seconds"], 1)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("mptrj", type=Path, help="mptrj_random_1k.extxyz.gz")
    parser.add_argument(
        "--costs", type=Path, required=True, help="kernels -> seconds per atom, edge, graph, step"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the graphs")
    parser.add_argument("--bandwidth", type=float, default=50e9, help="bytes/s of a GPU's link")
    parser.add_argument("--latency", type=float, default=10e-6, help="seconds of a message")
    arguments = parser.parse_args()
    model = MACE(
        MaceConfig.preset("paper").with_data(
            atomic_numbers=tuple(range(1, ELEMENTS + 1)),
            atomic_energies=((0.0,) * ELEMENTS,),
            avg_num_neighbors=20.0,
        )
    )
    arguments.gradient_bytes = 4 * sum(p.numel() for p in model.parameters())
    costs = json.loads(arguments.costs.read_text())
    names = ("atoms", "edges", "graphs", "constant")
    tables: dict[str, list[dict[str, Any]]] = {"strong": [], "weak": []}
    cases = [("strong", arguments.scale, gpus) for gpus in STRONG]
    cases += [("weak", arguments.scale * millions / 2.65, gpus) for millions, gpus in WEAK]
    for kind, scale, num_gpus in cases:
        mix = paper_mix(arguments.mptrj, scale)
        for kernels in costs:
            step_time = StepTime(*(costs[kernels][name] for name in names))
            for batching in BATCHINGS:
                row = simulate(mix, batching, num_gpus, step_time, arguments)
                tables[kind].append({"scaling": kind, "kernels": kernels, **row})
                print(tables[kind][-1], flush=True)
    for kind, rows in tables.items():
        with_efficiency(rows, weak=kind == "weak")
    rows = [{k: v for k, v in row.items() if k != "seconds"} for t in tables.values() for row in t]
    notes = (
        "SIMULATION, not a measurement. "
        + " ".join((__doc__ or "").split("\n\n")[2:4]).replace("\n", " ")
        + f" Here: {arguments.gradient_bytes} bytes of gradients, "
        f"{arguments.bandwidth / 1e9:g} GB/s, {1e6 * arguments.latency:g} us; costs {costs}. "
        + PAPER
    )
    path = write_result("mace/scaling_simulation", rows, notes=notes)
    add_picture(picture(rows), path)


def picture(rows: list[dict[str, Any]]) -> Any:
    """Draw minutes of an epoch by GPUs next to the paper's points, and efficiencies."""
    minutes, efficiency, weak = [], [], []
    for case in dict.fromkeys((row["batching"], row["kernels"]) for row in rows):
        own = [row for row in rows if (row["batching"], row["kernels"]) == case]
        strong = [row for row in own if row["scaling"] == "strong"]
        grown = [row for row in own if row["scaling"] == "weak"]
        gpus, label = [row["GPUs"] for row in strong], f"{case[0].replace('_', ' ')}, {case[1]}"
        minutes.append(plots.Curve(label, gpus, [row["epoch min"] for row in strong]))
        efficiency.append(plots.Curve(label, gpus, [row["efficiency %"] for row in strong]))
        shares = [row["efficiency %"] for row in grown]
        weak.append(plots.Curve(label, [row["GPUs"] for row in grown], shares))
    for label, points in POINTS.items():
        minutes.append(plots.Curve(label, list(points), list(points.values()), dashed=True))
    panels = [
        plots.Panel("Simulated epoch of 2.65 million graphs", "minutes", minutes),
        plots.Panel(
            "Strong scaling", "% of 16 GPUs", efficiency, logarithmic=False, from_zero=True
        ),
        plots.Panel("Weak scaling", "% of 168 GPUs", weak, logarithmic=False, from_zero=True),
    ]
    return plots.curves(panels, "GPUs", logarithmic_x=True)


if __name__ == "__main__":
    main()
