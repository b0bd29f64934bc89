"""Plans the memory of AlphaFold3's steps on 1, 2, ... GPUs per sample, and the longest that fit.

    python -m benchmarks.parallel.memory STORE [--sizes 1 2 4] [--planned 139] [--out results]

Nothing runs and no GPU is needed: a step is planned on fake tensors for the first of the
processes; `benchmarks.train.memory_plan` compares plans with steps on GPUs. Lengths are multiplied
by the square root of the number of GPUs, then refined by bisection.
"""

import argparse
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from benchmarks.alphafold3.arms import built
from benchmarks.alphafold3.memory import ATOMS, Plans
from benchmarks.common.arguments import add_out, script_parser
from benchmarks.common.report import write_result

from bevatron.parallel.axial import one_of

GRANULE, TWICE_FROM = 128, 4096
"""Tokens: crops above 2,048 are padded to multiples, those above 4,096 to multiples of 256."""


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("store", type=Path, help="of complexes; the largest is cropped")
    parser.add_argument("--sizes", nargs="*", type=int, default=[1, 2, 4], help="GPUs a sample")
    parser.add_argument("--lengths", nargs="*", type=int, default=[2048, 2432], help="of one GPU")
    parser.add_argument("--planned", type=float, default=139.0, help="GiB of a GPU")
    parser.add_argument("--policy", default="all")
    parser.add_argument("--rows", type=int, default=1024, help="of the alignment")
    parser.add_argument("--copies", type=int, default=48)
    parser.add_argument("--preset", default="alphafold3")
    add_out(parser)
    given = parser.parse_args()
    given.longest = True
    plans = Plans(built(given.preset, torch.device("cpu")), given)
    longest: dict[int, int] = {}
    for size in given.sizes:
        scale = sqrt(size)
        given.granule = GRANULE * (2 if scale * min(given.lengths) >= TWICE_FROM else 1)
        scaled = [int(scale * n / given.granule) * given.granule for n in given.lengths]
        before = len(plans.rows)
        with one_of(size):
            found = plans.longest("bevatron", given.policy, scaled)
        longest[size] = scaled[-1] if found is None else found
        plans.rows[before:] = [
            {"GPUs a sample": size, "policy": row["policy"], "N": row["N"],
             "of one GPU": row["in all GiB"], "B a pair": row["peak GiB"] * 2**30 / row["N"] ** 2,
             "fits": row["in all GiB"] <= given.planned}
            for row in plans.rows[before:]
        ]  # fmt: skip
        publish(plans.rows, longest, given)


def publish(rows: list[dict[str, Any]], longest: dict[int, int], given: argparse.Namespace) -> None:
    needed = {row["GPUs a sample"]: row["B a pair"] for row in rows}
    one = given.sizes[0]
    notes = (
        f"PLANNED for GPUs of {given.planned:g} GiB, not run: launched steps of AlphaFold3 "
        f"({given.preset}), {given.rows} rows, {given.copies} copies, {ATOMS} atoms a token, "
        f"rollout and confidences, bfloat16, blocks computed again (policy {given.policy}). of one "
        "GPU: GiB, weights, gradients, moments and averages included; B a pair: bytes for each "
        "pair of tokens without them. Buffers of NCCL are not planned. Of the lengths to which "
        "crops are padded, the longest that fit: "
        + ", ".join(f"{most:,} tokens on {size}" for size, most in longest.items())
        + ". By the bytes a pair, equal memory is for lengths of "
        + ", ".join(f"{sqrt(needed[one] / needed[size]):.2f}" for size in longest)
        + " times those of the first."
    )
    write_result(
        "parallel/memory", rows, notes, device="cpu",
        extra={"longest": {str(size): most for size, most in longest.items()}},
        folder=given.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
