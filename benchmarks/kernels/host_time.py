"""Times small operators launched from Python, where the host is the bottleneck.

    python -m benchmarks.kernels.host_time
    python -m benchmarks.kernels.host_time --op transition --peers eager compile

Forward and backward with all gradients while the host runs ahead: one operator at a time; eight
whose gradients are computed together, as in a model; and one whose backward pass stays on
the calling thread instead of autograd's.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.common.arguments import add_out
from benchmarks.common.report import write_result
from benchmarks.kernels import cases_folding, cases_pair  # noqa: F401  they register operators
from benchmarks.kernels.cases import (
    OPERATORS,
    Case,
    Operator,
    Row,
    Setup,
    cases_of,
    direction,
    leaves_of,
)
from benchmarks.kernels.run import peers_of

from bevatron import kernels

CASES = {
    "pair_attention": ("triangle 64", "triangle 128"),
    "triangle_multiply": ("N 64, C 128", "N 128, C 128"),
    "transition": ("N 64, 128 wide", "N 128, 128 wide"),
    "layer_norm": ("N 64, 128 wide", "N 128, 128 wide"),
    "layer_norm_linear": ("N 64, 128 wide", "N 128, 128 wide"),
    "invariant_point_attention": ("N 256",),
}
PEERS = ("eager",)
IN_A_ROW = 8
NOTES = (
    "bfloat16 (invariant point attention: float32), forward and backward with all gradients, "
    "launched from Python without waiting for the GPU; us of the best of {passes} x {rounds} "
    "rounds of {calls} calls, in {passes} passes over all rows, because a host is not equally fast "
    "all the time. {row} in a row: per operator, of {row} with separate inputs followed by the "
    "gradients of all. One thread: autograd stays on the calling thread "
    "(torch.autograd.set_multithreading_enabled(False))."
)


def steps(case: Case, operator: Operator, count: int) -> Callable[[], Any]:
    """Make a call of several operators with separate inputs, and of their backward passes."""
    drawn = [case.draw(seed) for seed in range(count)]
    leaves = [leaf.requires_grad_() for inputs in drawn for leaf in leaves_of(inputs).values()]
    along = [direction(case, inputs) for inputs in drawn]

    def run() -> Any:
        return torch.autograd.grad([operator(**inputs) for inputs in drawn], leaves, along)

    return run


def best_us(call: Callable[[], Any], rounds: int, calls: int, wait: Callable[[], Any]) -> float:
    """Time a call, the host running ahead of the GPU within a round."""
    best = float("inf")
    for number in range(rounds + 1):  # the first compiles and allocates
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if number:
            best = min(best, time.perf_counter() - begin)
    wait()
    return 1e6 * best / calls


class Timed:
    """The row of one implementation, of which passes keep the best times."""

    def __init__(self, case: Case, who: str, operator: Operator) -> None:
        self._one, self._many = steps(case, operator, 1), steps(case, operator, IN_A_ROW)
        self.row = Row(op=case.op, case=case.name, who=who)

    def measure(self, rounds: int, calls: int, wait: Callable[[], Any]) -> None:
        """Time it once more."""
        self._keep("us", best_us(self._one, rounds, calls, wait))
        in_a_row = best_us(self._many, rounds, max(calls // IN_A_ROW, 1), wait) / IN_A_ROW
        self._keep(f"us, {IN_A_ROW} in a row", in_a_row)
        with torch.autograd.set_multithreading_enabled(False):
            self._keep("us, one thread", best_us(self._one, rounds, calls, wait))

    def _keep(self, column: str, us: float) -> None:
        self.row[column] = min(round(us), self.row.get(column, round(us)))


def main() -> None:
    """Check every case, then time it and its peers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--op", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--peers", nargs="+", default=list(PEERS), metavar="NAME")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=40)
    add_out(parser)
    args = parser.parse_args()
    timed = []
    with kernels.use("triton"):
        for op in args.op:
            setup = Setup(getattr(torch, OPERATORS[op].family.dtype))
            for case in cases_of(op, setup, CASES[op]):
                case.check(case)
                arms = (("bevatron", case.ours), *peers_of(case, args.peers))
                timed += [Timed(case, who, operator) for who, operator in arms]
        for _ in range(args.passes):
            for one in timed:
                one.measure(args.rounds, args.calls, torch.cuda.synchronize)
                print(one.row, flush=True)
    rows = [one.row for one in timed]
    notes = NOTES.format(passes=args.passes, rounds=args.rounds, calls=args.calls, row=IN_A_ROW)
    write_result("kernels/host_time", rows, notes, device="cuda", folder=args.out)


if __name__ == "__main__":
    main()
