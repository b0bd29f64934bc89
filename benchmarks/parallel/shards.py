"""Times parts of steps at the shapes of shards for 1, 2, 4, 8 GPUs on one GPU, without exchanges.

    python -m benchmarks.parallel.shards [--tokens 384] [--complexes STORE] [--out results]

Exchanges only write zeros for the received data and pack nothing, as where GPUs read each other's
memory, so times are those of the operators and of these zeros. Bytes are those that a member of
such a group would send. Blocks are timed, the structure module and,
given a store of complexes, the part of AlphaFold3 after the trunk (for two GPUs).
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.alphafold3.arms import Crops, built
from benchmarks.common import trace
from benchmarks.common.arguments import add_out
from benchmarks.common.arms import drawn, free, set_policy
from benchmarks.common.report import write_result
from benchmarks.common.timing import captured, median_ms
from torch import Tensor, nn

from bevatron.data.proteins.complex_batch import collate_complex
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.drops import Drops
from bevatron.models.alphafold2.evoformer import EvoformerBlock
from bevatron.models.alphafold2.msa_attention import (
    MSAColumnAttention,
    MSAColumnGlobalAttention,
    MSARowAttention,
)
from bevatron.models.alphafold2.structure_module import StructureModule
from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.models.alphafold3.model import Representation
from bevatron.models.alphafold3.msa import MsaBlock
from bevatron.models.alphafold3.pairformer import PairformerBlock
from bevatron.models.alphafold3.task import ROLLOUT_STEPS
from bevatron.models.common.folding import (
    Checkpointing,
    OuterProductMean,
    Transition,
    TriangleAttention,
    TriangleMultiplication,
)
from bevatron.models.common.folding.normal import SeededNormal
from bevatron.parallel import traffic
from bevatron.parallel.axial import one_of, own, own_rows
from bevatron.parallel.groups import Pending, Silent, copy
from bevatron.train.capture.cuda_graphs import GraphPool

MIB = 2**20
KEPT = Checkpointing("none")
COPIES = 48

Call = Callable[[], tuple[Tensor, ...]]


def call_of(
    block: nn.Module, state: Sequence[Tensor], shared: Sequence[bool], *masks: Tensor
) -> Call:
    """Return a block's forward and backward pass over own rows of its state.

    ``shared``: which tensors of the state are sharded by rows.
    """
    drawn(block)
    given = [
        (own_rows(x).clone() if divided else x).requires_grad_()
        for x, divided in zip(state, shared, strict=True)
    ]
    wanted = [*given, *block.parameters()]

    def call() -> tuple[Tensor, ...]:
        found = block(tuple(given), *masks)
        kept = [x for x in found if x.requires_grad]
        return torch.autograd.grad(kept, wanted, kept, allow_unused=True)

    return call


def blocks(given: argparse.Namespace, dtype: torch.dtype) -> dict[str, Callable[[], Call]]:
    """Return the timed blocks by name; each is built for a number of processes."""
    two, three = AlphaFold2Config.preset(given.two), AlphaFold3Config.preset(given.three)
    widths, N, R = three.widths, given.tokens, given.residues

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bool)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    def pairformer() -> Call:
        block = PairformerBlock(widths.single, widths.pair, three.pairformer, KEPT)
        state = random(N, widths.single), random(N, N, widths.pair)
        return call_of(block, state, (False, True), ones(N), ones(N, N))

    def module() -> Call:
        block = MsaBlock(widths.pair, three.msa, KEPT, last=False)
        state = random(given.rows, N, three.msa.width), random(N, N, widths.pair)
        return call_of(block, state, (True, True), ones(given.rows, N), ones(N), ones(N, N))

    def evoformer() -> Call:
        block = EvoformerBlock(two.c_m, two.c_z, two.evoformer, MSAColumnAttention, KEPT)
        state = random(128, R, two.c_m), random(R, R, two.c_z)
        return call_of(block, state, (True, True), ones(128, R), ones(R, R))

    def extra() -> Call:
        block = EvoformerBlock(two.c_e, two.c_z, two.extra_msa, MSAColumnGlobalAttention, KEPT)
        state = random(given.rows, R, two.c_e), random(R, R, two.c_z)
        return call_of(block, state, (True, True), ones(given.rows, R), ones(R, R))

    def structure() -> Call:
        module = StructureModule(two.c_s, two.c_z, two.structure)
        drawn(module)
        single, pair = torch.randn(R, two.c_s), torch.randn(R, R, two.c_z)
        state = [single.requires_grad_(), pair.requires_grad_()]
        wanted = [*state, *module.parameters()]

        def call() -> tuple[Tensor, ...]:
            found = module(*state, torch.zeros(R, dtype=torch.long), ones(R), Drops(None))
            kept = [x for x in found.values() if x.requires_grad]
            return torch.autograd.grad(kept, wanted, kept, allow_unused=True)

        return call

    return {
        f"AlphaFold3 Pairformer, N {N}": pairformer,
        f"AlphaFold3 MSA module, N {N}, {given.rows} rows": module,
        f"AlphaFold2 Evoformer, N {R}, 128 rows": evoformer,
        f"AlphaFold2 extra stack, N {R}, {given.rows} rows": extra,
        f"AlphaFold2 structure module, N {R}": structure,
    }


class Alone(nn.Module):
    """An operator as a block: it takes the state's tensors, and ``method`` returns one."""

    def __init__(self, operator: nn.Module, method: str) -> None:
        super().__init__()
        self.operator, self.method = operator, method

    def forward(self, state: Sequence[Tensor], *masks: Tensor) -> tuple[Tensor]:
        """Apply it."""
        return (getattr(self.operator, self.method)(*state, *masks),)


def operators(given: argparse.Namespace, dtype: torch.dtype) -> dict[str, Callable[[], Call]]:
    """Name the operators of pairs and alignments, with the widths of their models."""
    two, three = AlphaFold2Config.preset(given.two), AlphaFold3Config.preset(given.three)
    pair, msa, C, R = three.pairformer.pair, two.evoformer, three.widths.pair, given.residues
    heads = pair.num_heads, pair.head_width
    of_rows = msa.num_heads, msa.head_width

    def of_pair(operator: nn.Module, N: int, *, masked: bool = True) -> Call:
        masks = [torch.ones((N, N), dtype=torch.bool)] if masked else []
        return call_of(
            Alone(operator, "forward"), [torch.randn(N, N, C, dtype=dtype)], [True], *masks
        )

    def of_alignment(operator: nn.Module, method: str, *shapes: tuple[int, ...]) -> Call:
        state = [torch.randn(shape, dtype=dtype) for shape in shapes]
        mask = torch.ones((128, R), dtype=torch.bool)
        return call_of(Alone(operator, method), state, [True] * len(state), mask)

    named: dict[str, Callable[[], Call]] = {}
    for N in dict.fromkeys((R, given.tokens)):
        for outgoing, way in ((True, "outgoing"), (False, "incoming")):
            named[f"triangle multiplication, {way}, N {N}"] = partial(
                lambda N, out: of_pair(TriangleMultiplication(C, pair.hidden, outgoing=out), N),
                *(N, outgoing),
            )
        for starting, node in ((True, "starting"), (False, "ending")):
            named[f"triangle attention, {node}, N {N}"] = partial(
                lambda N, start: of_pair(TriangleAttention(C, *heads, starting=start), N),
                *(N, starting),
            )
        named[f"pair transition, N {N}"] = partial(
            lambda N: of_pair(Transition(C, pair.transition), N, masked=False), N
        )
    return named | {
        f"row attention, {R} x 128": lambda: of_alignment(
            MSARowAttention(two.c_m, two.c_z, *of_rows),
            *("forward", (128, R, two.c_m), (R, R, two.c_z)),
        ),
        f"column attention, {R} x 128": lambda: of_alignment(
            MSAColumnAttention(two.c_m, *of_rows), "of_columns", (R, 128, two.c_m)
        ),
        f"outer product mean, {R} x 128": lambda: of_alignment(
            OuterProductMean(two.c_m, msa.outer_width, two.c_z, bias=True),
            *("of_columns", (R, 128, two.c_m)),
        ),
    }


def after_the_trunk(
    given: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], Call]]:
    """Return the parts of AlphaFold3 after the trunk by name, on a crop of a store."""
    model, widths = built(given.three, device), AlphaFold3Config.preset(given.three).widths
    set_policy(model, "none")
    crops = Crops(given.complexes, given.tokens, rows=given.rows)
    batch = collate_complex([crops[0]], np.zeros(1, np.int64), [1.0]).to(device).tensors()
    N, seed = batch["token_mask"].shape[-1], torch.zeros((), dtype=torch.long, device=device)
    shapes = (N, widths.inputs), (N, widths.single), (N, N, widths.pair)
    single, of_tokens, z = (torch.randn(s, device=device, dtype=dtype) for s in shapes)
    structure = batch["position"]
    noisy = structure + torch.randn(COPIES, *structure.shape, device=device)
    sigma = torch.rand(COPIES, device=device) + 1

    def trunk() -> Representation:
        return Representation(single, of_tokens, own_rows(z))

    def rollout() -> Call:
        with torch.no_grad():
            shared = model.condition(batch, trunk())
        return lambda: (model.sample(batch, shared, 1, ROLLOUT_STEPS, SeededNormal(seed)),)

    def copies() -> Call:
        wanted = [*model.diffusion.parameters()]

        def call() -> tuple[Tensor, ...]:
            shared = model.condition(batch, trunk())
            denoised = model.diffusion(own_rows(noisy), own(sigma, -1), shared)
            return torch.autograd.grad(denoised, wanted, denoised, allow_unused=True)

        return call

    def confidences() -> Call:
        wanted = [*model.confidence.parameters()]

        def call() -> tuple[Tensor, ...]:
            logits = [*model.judge(batch, trunk(), structure)]
            return torch.autograd.grad(logits, wanted, logits, allow_unused=True)

        return call

    return {
        f"AlphaFold3 rollout, N {N}": rollout,
        f"AlphaFold3 {COPIES} copies, N {N}": copies,
        f"AlphaFold3 confidence head, N {N}": confidences,
    }


def zeros_received(
    group: Silent, parts: Sequence[Tensor], places: Sequence[Tensor], result: Tensor, _: int
) -> Pending:
    """Take the own part and zeros for those of others."""
    for k, (place, part) in enumerate(zip(places, parts, strict=True)):
        if k == group.index:
            copy(place, part)
        else:
            traffic.record("pass_on", part, group.size)
            place.zero_()
    return Pending(result)


def measured(name: str, make: Any, sizes: Sequence[int], device: torch.device) -> tuple[Any, Any]:
    """Time a block for every number of GPUs; return rows, and its kernels."""
    rows: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for size in sizes:
        with one_of(size), device:
            call = make()
            call()
            with traffic.count_traffic() as sent:
                call()
            row = {"block": name, "GPUs": size, "sent MiB": sent.total / MIB}
            if device.type == "cuda":
                replay = captured(call)
                row["ms"] = median_ms(replay, 7, flush=True)
                profiler = trace.profiled(replay, 1)
                kernels = trace.by_kernel(profiler, 1)
                row["kernels"] = sum(float(one["launches"]) for one in kernels)
                row["of whole / GPUs"] = row["ms"] * size / (rows[0] if rows else row)["ms"]
                found += [{"block": name, "GPUs": size, **one} for one in kernels[:40]]
                del replay
        rows.append(row)
        print(row, flush=True)
        free()
    return rows, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--residues", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--sizes", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--operators", action="store_true", help="instead of blocks of them")
    parser.add_argument("--only", nargs="*", default=[""], help="parts whose names begin so")
    parser.add_argument("--complexes", type=Path, help="store, for what follows the trunk")
    parser.add_argument("--two", default="alphafold2", help="preset of AlphaFold2")
    parser.add_argument("--three", default="alphafold3", help="preset of AlphaFold3")
    parser.add_argument("--device", default="cuda")
    add_out(parser)
    given = parser.parse_args()
    measure(given)


def measure(given: argparse.Namespace) -> Path:
    device = torch.device(given.device)
    rows: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    made = operators if given.operators else blocks
    named = [(*part, given.sizes) for part in made(given, dtype).items()]
    if given.complexes is not None:
        following = after_the_trunk(given, device, dtype)
        named += [(*part, given.sizes[:2]) for part in following.items()]
    rollout = "" if given.complexes is None else " (the rollout: 20 steps without)"
    notes = (
        f"Forward and backward pass with all gradients{rollout}, bfloat16 activations, nothing "
        "computed again, no dropout; replayed CUDA graphs, L2 flushed. of whole / GPUs: time over "
        "that of one GPU divided by the number, 1 at best. ms includes writing zeros in place of "
        "what others would send. sent MiB: by one GPU."
    )
    path, name_of_page = Path(), "parallel/shards" + ("_operators" if given.operators else "")
    named = [part for part in named if part[0].startswith(tuple(given.only))]
    with patch.object(Silent, "trade", zeros_received):
        GraphPool(device).compile_ahead(lambda: once_each(named, device), print)
        for name, make, sizes in named:
            some = measured(name, make, sizes, device)
            rows, kernels = rows + some[0], kernels + some[1]
            path = write_result(
                name_of_page, rows, notes, device=device.type, folder=given.out,
                extra={"kernels": kernels},
            )  # fmt: skip
    return path


def once_each(named: Sequence[tuple[str, Any, Sequence[int]]], device: torch.device) -> None:
    for _, make, sizes in named:
        for size in sizes:
            with one_of(size), device:
                make()()


if __name__ == "__main__":
    main()
