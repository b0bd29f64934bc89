"""Peak memory of launched training steps of AlphaFold3 by length, and the longest that train.

    python -m benchmarks.alphafold3.memory STORE [--lengths 64 128] [--policies all] [--longest]

One step an arm and length; weights, gradients, moments and averaged weights are not counted. With
``--longest`` lengths between the last that fitted and the first that did not are halved down to a
multiple of 32, for each policy and arm. Crops come from the largest complex of the store.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from benchmarks.alphafold3.arms import Crops, built, peak_gib, training_of
from benchmarks.common.arguments import add_out
from benchmarks.common.arms import Arm, or_out_of_memory
from benchmarks.common.report import write_result

from bevatron.models.alphafold3.model import AlphaFold3
from bevatron.models.alphafold3.task import StepOptions
from bevatron.models.common.folding.checkpointing import Kind

KERNELS = {"bevatron": "auto", "eager": "reference"}
GRANULE = 32
"""Tokens; crops are padded to multiples."""
OUT_OF_MEMORY = "out of memory"


class Memory:
    """Steps of one model, whose peaks are rows."""

    def __init__(self, model: AlphaFold3, given: argparse.Namespace) -> None:
        self.model, self.given = model, given
        self.rows: list[dict[str, Any]] = []

    def fits(self, name: str, policy: Kind, tokens: int) -> bool:
        """Take a step; add its row; return whether there was enough memory."""
        given, on_gpu = self.given, next(self.model.parameters()).is_cuda
        crops = Crops(given.store, tokens, rows=given.rows, different=1)
        arm, trained = Arm(name, KERNELS[name], policy, captured=False, workers=0), []
        row: dict[str, Any] = {"arm": name, "policy": policy, "N": tokens}

        def step() -> bool:
            options = StepOptions(copies=given.copies)
            trained.append(training_of(arm, self.model, crops, options))
            trained[0].steps([0])
            return True

        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        fitted = or_out_of_memory(step) is not None
        row["peak GiB"] = (peak_gib(self.model) if on_gpu else "") if fitted else OUT_OF_MEMORY
        for training in trained:
            training.release()
        self.rows.append(row)
        print(row, flush=True)
        return fitted

    def longest(self, name: str, policy: Kind, lengths: list[int]) -> int | None:
        """Try lengths in their order until one does not fit, then halve what lies between."""
        fitted = 0
        for tokens in lengths:
            if not self.fits(name, policy, tokens):
                break
            fitted = tokens
        else:
            return None
        failed = tokens
        while self.given.longest and failed - fitted > GRANULE:
            middle = (fitted + failed) // 2 // GRANULE * GRANULE
            if self.fits(name, policy, middle):
                fitted = middle
            else:
                failed = middle
        return fitted


def main() -> None:
    """Measure all arms and policies and write the result after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("store", type=Path, help="of complexes; the largest is cropped")
    parser.add_argument("--lengths", nargs="*", type=int, default=[64, 128, 256, 384, 512, 768])
    parser.add_argument("--policies", nargs="*", default=["none", "pair", "all", "paper"])
    parser.add_argument("--arms", nargs="*", choices=[*KERNELS], default=[*KERNELS])
    parser.add_argument("--longest", action="store_true", help="find it by halving")
    parser.add_argument("--rows", type=int, default=1024, help="of the alignment")
    parser.add_argument("--copies", type=int, default=48)
    parser.add_argument("--preset", default="alphafold3")
    parser.add_argument("--device", default="cuda")
    add_out(parser)
    measure(parser.parse_args())


def measure(given: argparse.Namespace) -> None:
    """Measure the arms and policies."""
    memory = Memory(built(given.preset, torch.device(given.device)), given)
    longest: dict[str, int | None] = {}
    for policy in given.policies:
        for name in given.arms:
            longest[f"{name}, {policy}"] = memory.longest(name, policy, sorted(given.lengths))
            notes = (
                f"Launched steps, {given.rows} rows, {given.copies} copies, one pass, rollout and "
                "confidences, bfloat16; peak GiB: less weights, gradients, moments and averages."
            )
            write_result(
                "alphafold3/memory", memory.rows, notes, device=given.device,
                extra={"longest": longest}, folder=given.out,
            )  # fmt: skip


if __name__ == "__main__":
    main()
