"""Times blocks at the shapes of shards for 1, 2, 4, 8 GPUs on one GPU, nothing being sent.

    python -m benchmarks.parallel.shards [--tokens 384] [--out results]

What an exchange would bring is memory as it is found: times are those of the operators alone, and
the bytes are those that a member of such a group would send.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import trace
from benchmarks.common.arguments import add_out
from benchmarks.common.arms import drawn, free
from benchmarks.common.report import write_result
from benchmarks.common.timing import captured, median_ms
from torch import Tensor, nn

from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.evoformer import EvoformerBlock
from bevatron.models.alphafold2.msa_attention import MSAColumnAttention, MSAColumnGlobalAttention
from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.models.alphafold3.msa import MsaBlock
from bevatron.models.alphafold3.pairformer import PairformerBlock
from bevatron.models.common.folding import Checkpointing
from bevatron.parallel.axial import groups, own_rows
from bevatron.parallel.groups import Group, Pending
from bevatron.parallel.traffic import count_traffic, record
from bevatron.train.capture.cuda_graphs import GraphPool

MIB = 2**20
KEPT = Checkpointing("none")


class Silent(Group):
    """The first of some processes that are not there: what they would send is not written."""

    def __init__(self, size: int) -> None:
        super().__init__(range(size), 0)

    def all_gather(self, part: Tensor) -> Pending:
        """Return room for the parts of all."""
        record("all_gather", part, self.size)
        return Pending(part.new_empty((self.size * part.shape[0], *part.shape[1:])))

    def all_to_all(
        self,
        rows: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
    ) -> Pending:
        """Return room for what all would send; the rows are laid out to be sent."""
        rows = rows.contiguous()
        send = list(send) if send is not None else [len(rows) // self.size] * self.size
        record("all_to_all", rows, self.size, parts=send[0] * rows[:1].numel())
        return Pending(rows.new_empty((sum(receive or send), *rows.shape[1:])))

    def pass_on(self, x: Tensor, received: Tensor) -> Pending:
        """Leave what the next would send as it is."""
        record("pass_on", x, self.size)
        x.contiguous()
        return Pending(received)


@contextmanager
def one_of(size: int) -> Iterator[None]:
    """Be one of so many processes that share a sample."""
    groups._joined.append(Silent(size) if size > 1 else groups._ALONE)  # noqa: SLF001
    try:
        yield
    finally:
        groups._joined.pop()  # noqa: SLF001


def call_of(
    block: nn.Module, state: Sequence[Tensor], shared: Sequence[bool], *masks: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """Return a block's forward and backward pass over own rows of its state.

    ``shared`` says which tensors of the state are divided by rows.
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


def blocks(
    given: argparse.Namespace, dtype: torch.dtype
) -> dict[str, Callable[[], Callable[[], tuple[Tensor, ...]]]]:
    """Name what is timed; each is made anew for a number of processes."""
    two, three = AlphaFold2Config.preset(given.two), AlphaFold3Config.preset(given.three)
    widths, N, R = three.widths, given.tokens, given.residues

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bool)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    def pairformer() -> Callable[[], tuple[Tensor, ...]]:
        block = PairformerBlock(widths.single, widths.pair, three.pairformer, KEPT)
        state = random(N, widths.single), random(N, N, widths.pair)
        return call_of(block, state, (False, True), ones(N), ones(N, N))

    def module() -> Callable[[], tuple[Tensor, ...]]:
        block = MsaBlock(widths.pair, three.msa, KEPT, last=False)
        state = random(given.rows, N, three.msa.width), random(N, N, widths.pair)
        return call_of(block, state, (True, True), ones(given.rows, N), ones(N), ones(N, N))

    def evoformer() -> Callable[[], tuple[Tensor, ...]]:
        block = EvoformerBlock(two.c_m, two.c_z, two.evoformer, MSAColumnAttention, KEPT)
        state = random(128, R, two.c_m), random(R, R, two.c_z)
        return call_of(block, state, (True, True), ones(128, R), ones(R, R))

    def extra() -> Callable[[], tuple[Tensor, ...]]:
        block = EvoformerBlock(two.c_e, two.c_z, two.extra_msa, MSAColumnGlobalAttention, KEPT)
        state = random(given.rows, R, two.c_e), random(R, R, two.c_z)
        return call_of(block, state, (True, True), ones(given.rows, R), ones(R, R))

    return {
        f"AlphaFold3 Pairformer, N {N}": pairformer,
        f"AlphaFold3 MSA module, N {N}, {given.rows} rows": module,
        f"AlphaFold2 Evoformer, N {R}, 128 rows": evoformer,
        f"AlphaFold2 extra stack, N {R}, {given.rows} rows": extra,
    }


def measured(name: str, make: Any, sizes: Sequence[int], device: torch.device) -> tuple[Any, Any]:
    """Time a block for every number of GPUs; return rows, and its kernels."""
    rows: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for size in sizes:
        with one_of(size), device:
            call = make()
            GraphPool(device).compile_ahead(call, print)
            call()
            with count_traffic() as traffic:
                call()
            row = {"block": name, "GPUs": size, "sent MiB": traffic.total / MIB}
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
    """Measure all blocks and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--residues", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--sizes", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--only", nargs="*", default=[""], help="blocks whose names begin so")
    parser.add_argument("--two", default="alphafold2", help="preset of AlphaFold2")
    parser.add_argument("--three", default="alphafold3", help="preset of AlphaFold3")
    parser.add_argument("--device", default="cuda")
    add_out(parser)
    given = parser.parse_args()
    measure(given)


def measure(given: argparse.Namespace) -> Path:
    """Measure and write the result."""
    device = torch.device(given.device)
    rows: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    torch.manual_seed(0)
    for name, make in blocks(
        given, torch.bfloat16 if device.type == "cuda" else torch.float32
    ).items():
        if name.startswith(tuple(given.only)):
            some = measured(name, make, given.sizes, device)
            rows, kernels = rows + some[0], kernels + some[1]
    notes = (
        "Forward and backward pass of one block with all gradients, bfloat16 activations, nothing "
        "computed again, no dropout; replayed CUDA graphs, L2 flushed. of whole / GPUs: time over "
        "that of one GPU divided by the number, 1 at best. sent MiB: by one GPU."
    )
    return write_result(
        "parallel/shards", rows, notes, device=device.type, folder=given.out,
        extra={"kernels": kernels},
    )  # fmt: skip


if __name__ == "__main__":
    main()
