"""A hundred random kills of the processes of one run, which then ends as if there had been none.

The run of ``tests/distributed/kill_loop.py``: samples drawn from two data sets, two stages, gloo on
a CPU, float64, a checkpoint every three steps, in every eighth start a loader's worker for each
rank. A loader's process is replaced; a rank that is killed ends the others, and the same command
starts again.

    python -m benchmarks.train.kill_loop [--kills 100] [--steps 420]
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.report import write_result

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "train"), str(ROOT / "tests" / "distributed")]

import kill_loop  # noqa: E402
import tiny  # noqa: E402

from bevatron.train import Run, fit  # noqa: E402

WITH_WORKERS = 8
"""In one of so many starts batches come from workers."""


def run(
    folder: Path, steps: int, kills: int, seed: int, ranks: Callable[[int], int]
) -> list[kill_loop.Kill]:
    def make(folder: Path) -> Run:
        starts = len(list(folder.glob("output*-0")))
        return kill_loop.make(folder, steps, workers=int(starts % WITH_WORKERS == 1))

    return kill_loop.train_through(folder, make, kills, seed, ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description="Random kills of a run's processes")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    steps, kills = arguments.steps, arguments.kills
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        # Imports here what every rank would.
        fit(tiny.make_run(root / "warm", count=4, train={"epochs": 1}))
        one = run(root / "one", steps, 0, 0, lambda _: 1)
        two = run(root / "two", steps, 0, 0, lambda _: 2)
        assert not one
        assert not two
        same = run(root / "same", steps, kills, arguments.seed, lambda _: 2)
        assert kill_loop.same_to_the_last_bit(root / "same", root / "two")
        assert kill_loop.draws(root / "same") == kill_loop.draws(root / "two")
        other = run(
            root / "other", steps, kills // 4, arguments.seed + 1, lambda start: 1 + start % 3
        )
        assert kill_loop.draws(root / "other") == kill_loop.draws(root / "one")
        difference = kill_loop.largest_difference(root / "other", root / "one")
        assert difference < 1e-10
    rows = [
        {
            "kill": number,
            "ranks": kill.ranks,
            "victim": kill.victim,
            "in step": kill.step,
            "s until all ranks ended": (
                "" if kill.seconds_to_end is None else round(kill.seconds_to_end, 2)
            ),
        }
        for number, kill in enumerate([*same, *other], 1)
    ]
    ends = [kill.seconds_to_end for kill in same + other if kill.seconds_to_end is not None]
    told = sum(f"rank {kill.victim[-1]} failed" in kill.told for kill in same + other)
    alone = sum(kill.ranks == 1 for kill in other if kill.seconds_to_end is not None)
    write_result(
        "train/kill_loop",
        rows,
        notes=(
            f"One run of {steps} steps, killed {len(same)} times on two ranks: records, weights, "
            "optimiser, averages and best weights of its end equal those of a run that nothing "
            f"interrupted, to the last bit. The same run, killed {len(other)} times on one, two "
            "and three ranks in turn: the draws of every step are those of one rank, the losses "
            f"differ by at most {difference:.1e}. {len(ends)} kills hit a rank; the others had "
            f"ended after at most {max(ends):.1f} s, and in {told} of the {len(ends) - alone} "
            "cases with another rank left that one's last words named the rank that was gone. "
            "A loader's process (worker, fork server, resource tracker) is replaced while the run "
            "goes on."
        ),
    )


if __name__ == "__main__":
    main()
