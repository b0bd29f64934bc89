"""How well and how fast packings fill batches on the paper's size mix.

Fill = cost / (batches x capacity). Imbalance = time of the slowest rank of every step over the
time of a perfect split; next to the worst step. "Meet again": the probability that two samples
of one batch share a batch in the next epoch too, over what a random shuffle into batches of these
sizes gives. Times are CPU times of one core: the whole of `pack`, with the drawing of
randomness.

    python -m benchmarks.data.packing PATH/mptrj_random_1k.extxyz.gz [--scale 1.0]
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.report import write_result
from tools.paper_mix import CAPACITY, paper_mix

from bevatron.data.packing import Plan, pack

PACKINGS: dict[str, dict[str, Any]] = {
    "balanced (ours)": {"oversized": "alone"},
    "algorithm1, emptiest first": {"algorithm": "algorithm1", "oversized": "alone"},
    "algorithm1, fullest first": {
        "algorithm": "algorithm1",
        "order": "fullest",
        "oversized": "alone",
    },
    "streaming": {"algorithm": "streaming"},
    "fixed_count, 7 graphs": {"algorithm": "fixed_count", "batch_size": 7},
}


def meet_again(first: Plan, second: Plan) -> tuple[float, float]:
    """Return the probability that samples of one batch meet in the next epoch, and by chance."""
    count = first.num_samples

    def owners(plan: Plan) -> np.ndarray:
        owner = np.empty(count, dtype=np.int64)
        owner[plan.indices] = np.repeat(np.arange(plan.num_batches), np.diff(plan.offsets))
        return owner

    def pairs(sizes: np.ndarray) -> float:
        return float((sizes * (sizes - 1) // 2).sum())

    before, after = owners(first), owners(second)
    together = np.unique(before * second.num_batches + after, return_counts=True)[1]
    chance = pairs(np.bincount(after)) / pairs(np.array([count]))
    return pairs(together) / pairs(np.bincount(before)), chance


def timed_plans(
    costs: np.ndarray, capacity: float, num_ranks: int, repeats: int, **arguments: Any
) -> tuple[Plan, Plan, float]:
    """Plan some epochs; return two of them and the least time of a core."""
    times, plans = [], []
    for epoch in range(repeats):
        begin = time.process_time()
        plans.append(pack(costs, capacity, num_ranks, epoch=epoch, **arguments))
        times.append(time.process_time() - begin)
        plans = plans[-2:]
    return plans[0], plans[1], min(times)


def structures(plan: Plan) -> dict[str, Any]:
    """Say how many samples a batch holds, and how much that varies."""
    counts = np.diff(plan.offsets)
    return {
        "structures of a batch": f"{counts.min()}-{counts.max()}",
        "their variation %": round(100 * float(counts.std() / counts.mean()), 1),
    }


def row(
    case: str, name: str, costs: np.ndarray, capacity: float, num_ranks: int, repeats: int
) -> dict[str, Any]:
    first, second, seconds = timed_plans(costs, capacity, num_ranks, repeats, **PACKINGS[name])
    meet, chance = meet_again(first, second)
    return {
        "case": case,
        "ranks": num_ranks,
        "packing": name,
        "batches": first.num_batches,
        "fill": round(first.fill, 4),
        "largest batch": int(first.costs.max()),
        **structures(first),
        "imbalance": f"{first.imbalance:.4f}",
        "worst step": f"{first.step_imbalance.max():.4f}",
        "meet again": f"{meet:.2e}",
        "over chance": round(meet / chance, 2),
        "core seconds": round(seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Packings on the paper's size mix")
    parser.add_argument("mptrj", type=Path, help="mptrj_random_1k.extxyz.gz")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    mix = paper_mix(arguments.mptrj, arguments.scale)
    case = f"paper's mix, {len(mix.num_atoms):,} graphs, capacity {CAPACITY}"
    rows = [
        row(case, name, mix.num_atoms, CAPACITY, num_ranks, arguments.repeats)
        for num_ranks in (64, 740)
        for name in PACKINGS
    ]
    sizes = np.random.default_rng(0).choice(mix.num_atoms[mix.source <= 2], 1_000_000)
    # Some MPtrj structures have more atoms than that: they go alone.
    capacity = 361
    case = f"1,000,000 graphs (MPtrj, water clusters, TMD), capacity {capacity}"
    rows += [
        row(case, name, sizes, capacity, num_ranks, arguments.repeats)
        for num_ranks in (64, 740)
        for name in list(PACKINGS)[:3]
    ]
    write_result(
        "data/packing",
        rows,
        notes=(
            "Sizes: tools/paper_mix.py. Imbalance and worst step are max/mean over ranks; 1 is "
            "perfect. 'Over chance': how often two samples of a batch meet again in the next "
            "epoch, relative to a random shuffle; 1 is perfect shuffling. Batches of 7 graphs do "
            "not keep to the capacity (see their largest). Variation: standard deviation over "
            "mean. Core seconds: CPU time, "
            f"least of {arguments.repeats} calls, one thread."
        ),
    )


if __name__ == "__main__":
    main()
