# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Edge vectors in Triton: a linear map and its transpose, each the derivative of the other.

``difference``: one program per ``BLOCK`` edges loads the positions of both ends and writes one
vector per edge; given the cells it adds the periodic shift, with respect to which it has no
derivative: cells that need a gradient are multiplied outside.

``totals``: one warp per node walks its edges ``LANES`` at a time, adding those it receives and
subtracting those it sends in a fixed order, and writes one row; no atomics.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder
from bevatron.kernels.equivariant.edge_vectors.reference import offsets

BLOCK, INTERPRETED_BLOCK = 128, 4096
"""Edges of a program."""
LANES = 32
"""Edges of a node that are summed apart, one per thread."""


def edge_vectors(
    positions: Tensor, edges: EdgeOrder, shifts: Tensor, cells: Tensor, structures: Tensor
) -> Tensor:
    """Compute what the reference does."""
    by_sender, sender_ptr = edges.by_sender(max(edges.num_edges, 1))
    index = (edges.edges, edges.receiver_ptr, edges.permutation, by_sender, sender_ptr)
    if cells.requires_grad or shifts.requires_grad:
        moved: Tensor = difference(positions, *index, None, None, None)
        return moved + offsets(shifts, cells, structures, edges.edges[0])
    result: Tensor = difference(positions, *index, shifts, cells, structures)
    return result


@torch.library.custom_op("bevatron::edge_vectors", mutates_args=())
def difference(
    positions: Tensor,
    edges: Tensor,
    receiver_ptr: Tensor,
    permutation: Tensor | None,
    by_sender: Tensor,
    sender_ptr: Tensor,
    shifts: Tensor | None,
    cells: Tensor | None,
    structures: Tensor | None,
) -> Tensor:
    """[E, 3] from [N, 3]; an `EdgeOrder`'s tensors are for the derivative."""
    del receiver_ptr, permutation, by_sender, sender_ptr
    positions, edges = positions.contiguous(), edges.contiguous()
    count = edges.shape[1]
    vectors = positions.new_empty(count, 3)
    if count:
        block = BLOCK if positions.is_cuda else INTERPRETED_BLOCK
        shifted = shifts is not None and cells is not None and structures is not None
        given = (shifts, cells, structures) if shifted else (positions, positions, edges)
        with torch.cuda.device_of(positions):
            edge_difference[(triton.cdiv(count, block),)](
                positions,
                edges,
                *(tensor.contiguous() for tensor in given if tensor is not None),
                vectors,
                count,
                SHIFTED=shifted,
                WIDE=_wide(positions),
                BLOCK=block,
            )
    return vectors


@torch.library.custom_op("bevatron::edge_vectors_backward", mutates_args=())
def totals(
    vectors: Tensor,
    edges: Tensor,
    receiver_ptr: Tensor,
    permutation: Tensor | None,
    by_sender: Tensor,
    sender_ptr: Tensor,
) -> Tensor:
    """[N, 3] from [E, 3]."""
    del edges
    vectors = vectors.contiguous()
    num_nodes = receiver_ptr.shape[0] - 1
    sums = vectors.new_zeros(num_nodes, 3)
    if len(vectors):
        with torch.cuda.device_of(vectors):
            edge_totals[(num_nodes,)](
                vectors,
                receiver_ptr,
                by_sender if permutation is None else permutation,
                by_sender,
                sender_ptr,
                sums,
                PERMUTED=permutation is not None,
                WIDE=_wide(vectors),
                LANES=LANES,
                num_warps=1,
            )
    return sums


@difference.register_fake
def _(positions: Tensor, edges: Tensor, *_: Any) -> Tensor:
    return positions.new_empty(edges.shape[1], 3)


@totals.register_fake
def _(vectors: Tensor, edges: Tensor, receiver_ptr: Tensor, *_: Any) -> Tensor:
    del edges
    return vectors.new_empty(receiver_ptr.shape[0] - 1, 3)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    ctx.save_for_backward(*inputs[1:6])


difference.register_autograd(
    lambda ctx, g: (totals(g, *ctx.saved_tensors), *(None,) * 8), setup_context=_keep
)
totals.register_autograd(
    lambda ctx, g: (difference(g, *ctx.saved_tensors, *(None,) * 3), *(None,) * 5),
    setup_context=_keep,
)


def _wide(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


@triton.jit(do_not_specialize=["count"])
def edge_difference(
    positions_ptr, edges_ptr, shifts_ptr, cells_ptr, structures_ptr, vectors_ptr, count,
    SHIFTED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Subtract the sender's position from the receiver's and add the shift by cell vectors."""
    edge = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = edge < count
    sender = tl.load(edges_ptr + edge, mask=mask, other=0).to(tl.int64)  # [BLOCK]
    receiver = tl.load(edges_ptr + count + edge, mask=mask, other=0).to(tl.int64)  # [BLOCK]
    cell = edge
    if SHIFTED:
        cell = tl.load(structures_ptr + sender, mask=mask, other=0).to(tl.int64) * 9  # [BLOCK]
    for axis in tl.static_range(3):
        to_ptr = positions_ptr + receiver * 3 + axis
        receiver_x = tl.load(to_ptr, mask=mask, other=0.0).to(WIDE)  # [BLOCK]
        from_ptr = positions_ptr + sender * 3 + axis
        sender_x = tl.load(from_ptr, mask=mask, other=0.0).to(WIDE)  # [BLOCK]
        vector = receiver_x - sender_x
        if SHIFTED:
            for i in tl.static_range(3):
                shift_ptr = shifts_ptr + edge * 3 + i
                shift = tl.load(shift_ptr, mask=mask, other=0.0).to(WIDE)  # [BLOCK]
                cell_ptr = cells_ptr + cell + (3 * i + axis)
                cell_vector = tl.load(cell_ptr, mask=mask, other=0.0).to(WIDE)  # [BLOCK]
                vector += shift * cell_vector
        tl.store(vectors_ptr + edge * 3 + axis, vector, mask=mask)


@triton.jit
def edge_totals(
    vectors_ptr, receiver_ptr, permutation_ptr, by_sender_ptr, sender_ptr, sums_ptr,
    PERMUTED: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Sum over the edges of one node: received edges minus sent edges."""
    node = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    x = tl.zeros([LANES], WIDE)
    y = tl.zeros([LANES], WIDE)
    z = tl.zeros([LANES], WIDE)
    begin, end = tl.load(receiver_ptr + node), tl.load(receiver_ptr + node + 1)  # [], []
    for first in range(begin, end, LANES):
        slot = first + lane
        row = slot.to(tl.int64)
        if PERMUTED:
            row = tl.load(permutation_ptr + slot, mask=slot < end, other=0).to(tl.int64)  # [LANES]
        x += tl.load(vectors_ptr + row * 3, mask=slot < end, other=0.0).to(WIDE)  # [LANES]
        y += tl.load(vectors_ptr + row * 3 + 1, mask=slot < end, other=0.0).to(WIDE)  # [LANES]
        z += tl.load(vectors_ptr + row * 3 + 2, mask=slot < end, other=0.0).to(WIDE)  # [LANES]
    begin, end = tl.load(sender_ptr + node), tl.load(sender_ptr + node + 1)  # [], []
    for first in range(begin, end, LANES):
        slot = first + lane
        row = tl.load(by_sender_ptr + slot, mask=slot < end, other=0).to(tl.int64)  # [LANES]
        if PERMUTED:
            row = tl.load(permutation_ptr + row, mask=slot < end, other=0).to(tl.int64)  # [LANES]
        x -= tl.load(vectors_ptr + row * 3, mask=slot < end, other=0.0).to(WIDE)  # [LANES]
        y -= tl.load(vectors_ptr + row * 3 + 1, mask=slot < end, other=0.0).to(WIDE)  # [LANES]
        z -= tl.load(vectors_ptr + row * 3 + 2, mask=slot < end, other=0.0).to(WIDE)  # [LANES]
    tl.store(sums_ptr + node * 3, tl.sum(x, 0))  # []
    tl.store(sums_ptr + node * 3 + 1, tl.sum(y, 0))  # []
    tl.store(sums_ptr + node * 3 + 2, tl.sum(z, 0))  # []
