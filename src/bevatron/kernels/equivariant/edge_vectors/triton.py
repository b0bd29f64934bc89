# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Edge vectors in Triton: a linear map and its transpose, each the derivative of the other.

``difference``: one program per ``BLOCK`` edges loads the positions of both ends and writes one
vector per edge. Given cells it adds the periodic shift, which it does not differentiate: cells that
require a gradient are multiplied outside.

``totals``: one warp per node walks its edges ``LANES`` at a time, adding those it receives and
subtracting those it sends in a fixed order, and writes one row; no atomics.
"""

import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder
from bevatron.kernels.equivariant.edge_vectors.reference import offsets
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.triton_math import accumulator

BLOCK, INTERPRETED_BLOCK = 128, 4096
"""Edges per program."""
LANES = 32
"""Edges of a node that a warp sums in parallel, one per thread."""


def edge_vectors(
    positions: Tensor, edges: EdgeOrder, shifts: Tensor, cells: Tensor, structures: Tensor
) -> Tensor:
    """Compute the same as the reference."""
    by_sender, sender_ptr = edges.by_sender(max(edges.num_edges, 1))
    index = (edges.edges, edges.receiver_ptr, edges.permutation, by_sender, sender_ptr)
    if cells.requires_grad or shifts.requires_grad:
        moved: Tensor = difference(positions, *index, None, None, None)
        return moved + offsets(shifts, cells, structures, edges.edges[0])
    result: Tensor = difference(positions, *index, shifts, cells, structures)
    return result


@custom_op("edge_vectors", fake=lambda positions, edges: positions.new_empty(edges.shape[1], 3))
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
        edge_difference[(triton.cdiv(count, block),)](
            positions, edges, *(tensor.contiguous() for tensor in given if tensor is not None),
            vectors, count,
            SHIFTED=shifted, WIDE=accumulator(positions), BLOCK=block,
        )  # fmt: skip
    return vectors


@difference.backward(
    "positions", fake=lambda vectors, receiver_ptr: vectors.new_empty(receiver_ptr.shape[0] - 1, 3)
)
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
        edge_totals[(num_nodes,)](
            vectors, receiver_ptr, by_sender if permutation is None else permutation, by_sender,
            sender_ptr, sums,
            PERMUTED=permutation is not None, WIDE=accumulator(vectors), LANES=LANES,
            num_warps=1,
        )  # fmt: skip
    return sums


def _gradient(
    dsums: Tensor,
    edges: Tensor,
    receiver_ptr: Tensor,
    permutation: Tensor | None,
    by_sender: Tensor,
    sender_ptr: Tensor,
) -> Tensor:
    order = (edges, receiver_ptr, permutation, by_sender, sender_ptr)
    dvectors: Tensor = difference(dsums, *order, None, None, None)
    return dvectors


totals.gradients("vectors", _gradient)


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
