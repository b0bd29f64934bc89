# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Compiles and launches the generated kernels; sums gradients of edges over their senders.

`_sum_by_sender`: a program owns BLOCK columns of one node's row, adds the rows of the edges the
node sends in a fixed order and writes the row once.
"""

import os
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.equivariant.channelwise_tensor_product.couplings import Product
from bevatron.kernels.equivariant.channelwise_tensor_product.triton_source import (
    Variant,
    argument_names,
    kernel_name,
    num_blocks,
    write_source,
)
from bevatron.kernels.equivariant.edge_order import EdgeOrder
from bevatron.kernels.shared.triton_generated import generated
from bevatron.kernels.shared.triton_math import accumulator

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in the interpreter, where few large programs are fastest."""

BLOCK = 32
"""Channels of a program, which is one warp, so sums over channels need no shared memory."""

EDGES = 32 if INTERPRETED else 1
"""Edges at once; more than one needs masks, which are slower on a GPU."""

PIECES = 2
"""Programs that share a receiver's edges in kernels that sum nothing over edges."""


MOST_SUMS = 64
"""Most sums per channel of a one-kernel double backward; more would exhaust the registers."""


@cache
def compiled(product: Product, variant: Variant, layouts: bool) -> Any:
    """Return the kernel of a variant, with explicit layouts for a GPU or without."""
    source = write_source(product, variant, layouts)
    counts = ["first", "stop", "num_rows"]
    return generated(source, kernel_name(variant), __name__, layouts, counts)


class Index(NamedTuple):
    """The tensors of an `EdgeOrder` that kernels read; custom operators take them one by one."""

    senders: Tensor
    receiver_ptr: Tensor
    permutation: Tensor | None
    by_sender: Tensor
    sender_ptr: Tensor

    @classmethod
    def of(cls, order: EdgeOrder, chunk: int) -> "Index":
        """Sort by receiver and, chunk by chunk, by sender."""
        return cls(
            order.senders, order.receiver_ptr, order.permutation, *order.by_sender(max(chunk, 1))
        )


class Chunk(NamedTuple):
    """Edges ``first .. stop - 1`` in receiver order; all chunks have the same length."""

    number: int
    first: int
    stop: int


def chunks(num_edges: int, size: int) -> list[Chunk]:
    """Cut the edges."""
    starts = range(0, num_edges, max(size, 1))
    return [Chunk(i, first, min(first + size, num_edges)) for i, first in enumerate(starts)]


def run(
    product: Product,
    kind: str,
    tensors: Mapping[str, Tensor],
    into: Mapping[str, Tensor],
    index: Index,
    chunk: Chunk,
) -> None:
    """Run one kernel on one chunk of edges.

    Parameters
    ----------
    kind : see `Variant`
    tensors : x, y, w and what else the kind reads, contiguous, by the names of `Variant`
    into
        Destinations by name; nothing else is computed. ``out`` and ``dg`` [N, D_mid] and
        the gradients of x [N, D_in] accumulate and must be zero before the first chunk.
    index
        With a ``permutation``, edge tensors have all rows and the chunk must be all edges;
        without one, they have the rows of this chunk.
    """
    if not product.couplings:
        for result in into.values():
            result.zero_()
        return
    components = sum(coupling.path.out.dim for coupling in product.couplings)
    if "dg" in into and len(into) > 1 and components > MOST_SUMS:
        # The forward sum first, because gradients may overwrite the weights.
        others = {name: result for name, result in into.items() if name != "dg"}
        run(product, kind, tensors, {"dg": into["dg"]}, index, chunk)
        run(product, kind, tensors, others, index, chunk)
        return
    x, w = tensors["x"], tensors["w"]
    given = {name for name in ("ax", "ay", "aw") if name in tensors}
    variant = variant_of(product, kind, x.dtype, into, given, index.permutation is not None)
    results = dict(into)
    by_x = next((name for name in ("gx", "dx") if name in into), None)
    by_y = next((name for name in ("gy", "dy") if name in into), None)
    if by_x:
        results[by_x] = x.new_empty(chunk.stop - chunk.first, x.shape[1])
    if by_y and num_blocks(product, variant) > 1:
        results[by_y] = x.new_empty(num_blocks(product, variant), *into[by_y].shape)
    arguments = [{**tensors, **results}[name] for name in argument_names(variant)]
    arguments += [t for t in index[:3] if t is not None]
    num_nodes = index.receiver_ptr.shape[0] - 1
    grid = (num_nodes * variant.pieces * num_blocks(product, variant),)
    kernel = compiled(product, variant, x.is_cuda)
    kernel[grid](*arguments, chunk.first, chunk.stop, w.shape[0], num_warps=1)
    if by_y and results[by_y] is not into[by_y]:
        torch.sum(results[by_y], 0, out=into[by_y])
    if by_x:
        _to_senders(results[by_x], into[by_x], index, chunk)


def variant_of(
    product: Product,
    kind: str,
    dtype: torch.dtype,
    wanted: Collection[str],
    given: Collection[str] = (),
    permuted: bool = False,
) -> Variant:
    """Choose the variant of a kernel."""
    widest = triton.next_power_of_2(max(product.channels, 1))
    return Variant(
        kind=kind,
        given=frozenset(given),
        wanted=frozenset(wanted),
        dtype=str(dtype).removeprefix("torch."),
        block=widest if INTERPRETED else min(BLOCK, widest),
        edges=EDGES,
        pieces=PIECES if kind == "backward" else 1,
        permuted=permuted,
    )


def _to_senders(rows: Tensor, out: Tensor, index: Index, chunk: Chunk) -> None:
    """Add the rows of a chunk's edges to their senders, in order."""
    num_nodes, dim = out.shape
    block = triton.next_power_of_2(dim) if INTERPRETED else min(triton.next_power_of_2(dim), 128)
    grid = (num_nodes * triton.cdiv(dim, block),)
    dtype = accumulator(out)
    constants = {"DIM": dim, "BLOCK": block, "DTYPE": dtype, "num_warps": 1}
    tensors = (rows, index.by_sender, index.sender_ptr, out)
    runs = (index.sender_ptr.shape[0] - 1) // num_nodes
    _sum_by_sender[grid](*tensors, runs, chunk.number, chunk.first, **constants)


@triton.jit(do_not_specialize=["runs", "run", "first"])
def _sum_by_sender(
    rows_ptr, permutation_ptr, ptr_ptr, out_ptr, runs, run, first,
    DIM: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the rows of one chunk's edges to the rows of their senders."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = (DIM + BLOCK - 1) // BLOCK
    node = pid // blocks
    column = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < DIM
    begin = tl.load(ptr_ptr + node * runs + run)  # []
    end = tl.load(ptr_ptr + node * runs + run + 1)  # []
    if begin < end:
        total = tl.load(out_ptr + node * DIM + column, mask=mask, other=0.0).to(DTYPE)  # [BLOCK]
        for i in range(begin, end):
            row = tl.load(permutation_ptr + i) - first  # []
            row_ptr = rows_ptr + row * DIM + column
            total += tl.load(row_ptr, mask=mask, other=0.0).to(DTYPE)  # [BLOCK]
        tl.store(out_ptr + node * DIM + column, total, mask=mask)
