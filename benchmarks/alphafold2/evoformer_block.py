"""Times one Evoformer block of AlphaFold2 on one GPU, beside the same block in plain PyTorch.

    python -m benchmarks.alphafold2.evoformer_block [--peers "eager PyTorch" torch.compile OpenFold]

Forward and backward with all gradients of 128 rows and 256 residues, dropout, activations in
bfloat16 and weights in float32, everything kept for the backward pass; replays of CUDA graphs, for
us and the peers alike. Values and gradients are compared with those of the reference operators in
float32. OpenFold's block is its own source with our weights, under autocast as it trains; it draws
its dropout by itself, so it is compared without and timed with it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from benchmarks.alphafold2 import openfold
from benchmarks.common import trace
from benchmarks.common.arguments import add_out, script_parser
from benchmarks.common.arms import compiled_blocks, drawn, free, peak_gib
from benchmarks.common.report import write_result
from benchmarks.common.timing import captured, median_ms
from torch import Tensor

from bevatron import kernels
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.evoformer import EvoformerBlock
from bevatron.models.alphafold2.msa_attention import MSAColumnAttention
from bevatron.models.alphafold2.openfold_layout import openfold_name
from bevatron.models.common.folding import Checkpointing, keep_masks

Call = Callable[[], tuple[Tensor, ...]]


class Case:
    """A block and its inputs.

    Parameters
    ----------
    preset
        Of the model that the block is of.
    rows, residues
        Of the alignment, templates included.
    device
        Where it runs.
    """

    def __init__(self, preset: str, rows: int, residues: int, device: str) -> None:
        self.config = config = AlphaFold2Config.preset(preset)
        torch.manual_seed(0)
        self.device = device
        with torch.device(device):
            self.block = EvoformerBlock(
                config.c_m, config.c_z, config.evoformer, MSAColumnAttention, Checkpointing("none")
            )
            drawn(self.block)
            self.m = torch.randn(rows, residues, config.c_m)
            self.z = torch.randn(residues, residues, config.c_z)
            self.masks = (
                torch.ones(rows, residues, dtype=torch.bool),
                torch.ones(residues, residues, dtype=torch.bool),
            )
            self.cotangents = torch.randn_like(self.m), torch.randn_like(self.z)
            seed = torch.tensor(7)
        rates = config.evoformer.dropout, config.evoformer.triangles.dropout
        self.drops = [
            keep_masks(seed, call, x, count, rate)
            for call, x, count, rate in zip((1, 2), (self.m, self.z), (1, 4), rates, strict=True)
        ]

    def call(self, dtype: torch.dtype, *, dropped: bool = True) -> Call:
        """Return what computes the block's results and all gradients."""
        drops = [each.to(dtype) for each in self.drops]
        chosen = (drops[0][0], list(drops[1])) if dropped else ()
        return self._call(dtype, lambda *state: self.block(state, *self.masks, *chosen),
                          [*self.block.parameters()])  # fmt: skip

    def call_openfold(self, block: torch.nn.Module) -> Call:
        """Return the same of OpenFold's block."""
        theirs, masks = dict(block.named_parameters()), [mask.float() for mask in self.masks]
        weights = [theirs[openfold_name(name)] for name, _ in self.block.named_parameters()]
        return self._call(torch.bfloat16, lambda *state: block(*state, *masks), weights)

    def _call(
        self,
        dtype: torch.dtype,
        block: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        weights: Sequence[Tensor],
    ) -> Call:
        state = tuple(x.to(dtype, copy=True).requires_grad_() for x in (self.m, self.z))
        cotangents = [each.to(dtype) for each in self.cotangents]

        def run() -> tuple[Tensor, ...]:
            with torch.autocast(self.device, torch.bfloat16, dtype != torch.float32):
                found = block(*state)
            return (*found, *torch.autograd.grad(found, [*state, *weights], cotangents))

        return run


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    """Return the relative errors of the results, and of all gradients together."""

    def off(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
        pairs = [
            (a.detach().float(), b.detach().float()) for a, b in zip(ours, theirs, strict=True)
        ]
        wrong = sum(float((a - b).square().sum()) for a, b in pairs)
        return float((wrong / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)

    results, gradients = off(found[:2], exact[:2]), off(found[2:], exact[2:])
    return {"results off by": results, "gradients off by": gradients}


def measured(case: Case, who: str, repeats: int) -> dict[str, Any]:
    """Check and time one implementation."""
    free()
    theirs = None
    if who == "OpenFold":
        theirs = openfold.block_with(case.block.state_dict(), case.config).eval()
    with kernels.use("reference"):
        exact = [x.detach() for x in case.call(torch.float32, dropped=theirs is None)()]
    with (
        kernels.use("auto" if who == "bevatron" else "reference"),
        compiled_blocks([case.block]) if who == "torch.compile" else nullcontext(),
    ):
        run = case.call(torch.bfloat16) if theirs is None else case.call_openfold(theirs)
        row: dict[str, Any] = {"who": who} | errors(run(), exact)
        del exact
        if case.device == "cuda":
            if theirs is not None:
                theirs.train()
            free()
            torch.cuda.reset_peak_memory_stats()
            replay = captured(run)
            row["ms"] = median_ms(replay, repeats)
            row["peak GiB"] = peak_gib()
            profiler = trace.profiled(replay, 5)
            row["kernels"] = trace.summary(profiler, 5)["kernels"]
            row["longest"] = trace.by_kernel(profiler, 5)[:40]
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write the result."""
    parser = script_parser(__doc__)
    parser.add_argument("--peers", nargs="*", default=["eager PyTorch", "torch.compile"],
                        help="also: OpenFold")  # fmt: skip
    parser.add_argument("--preset", default="alphafold2")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--residues", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    add_out(parser)
    given = parser.parse_args(argv)
    case = Case(given.preset, given.rows, given.residues, given.device)
    rows: list[dict[str, Any]] = []
    longest: dict[str, Any] = {}
    for who in ("bevatron", *given.peers):
        row = measured(case, who, given.repeats)
        longest[who] = row.pop("longest", [])
        rows.append(row)
        if "ms" in row:
            row["x ours"] = row["ms"] / rows[0]["ms"]
        print(row, flush=True)
        write_result(
            "alphafold2/evoformer_block", rows, (__doc__ or "").split("\n\n")[-1],
            device=given.device, folder=given.out, extra={"kernels": longest},
        )  # fmt: skip


if __name__ == "__main__":
    main()
