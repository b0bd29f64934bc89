"""Chunks of edges: tensors as wide as the features exist for one chunk at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bevatron.kernels.graph.csr import Csr

_elements = 2**22


@contextmanager
def piece_elements(count: int) -> Iterator[None]:
    """Set the most elements of a temporary tensor for one chunk of edges."""
    global _elements  # noqa: PLW0603  a setting of this module
    before, _elements = _elements, count
    try:
        yield
    finally:
        _elements = before


def pieces(csr: Csr, width: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Cut the entries, in CSR order, into chunks of (slice, rows, columns).

    Parameters
    ----------
    csr : the matrix
    width : elements per entry that the caller allocates
    """
    length = max(1, _elements // max(width, 1))
    row = csr.row_index
    for start in range(0, csr.nnz, length):
        place = slice(start, min(start + length, csr.nnz))
        yield place, row[place], csr.col[place]


def accumulator(*tensors: Tensor) -> torch.dtype:
    """Return the type in which sums accumulate: at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


PART = 512
"""Most elements of a segment that one GPU thread adds."""


def segment_sum(values: Tensor, ptr: Tensor) -> Tensor:
    """Sum the rows of each segment in a fixed order: [S, ...] from [E, ...]."""
    if values.device.type != "cpu":
        return sum_by_parts(values, ptr)
    count = len(ptr) - 1
    index = torch.repeat_interleave(torch.arange(count), ptr.diff())
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, index, values)


def sum_by_parts(values: Tensor, ptr: Tensor) -> Tensor:
    """Sum segments in parts, then the parts: no thread walks a hub alone, and no atomics."""
    count = len(ptr) - 1
    if len(values) == 0:
        return values.new_zeros(count, *values.shape[1:])
    cuts = torch.arange(0, len(values), PART, device=ptr.device)
    bounds = torch.cat([ptr, cuts]).unique()
    flat = values.reshape(len(values), -1)
    parts = torch.segment_reduce(flat, "sum", offsets=bounds, axis=0, initial=0)
    sums = torch.segment_reduce(
        parts, "sum", offsets=torch.searchsorted(bounds, ptr), axis=0, initial=0
    )
    return sums.reshape(count, *values.shape[1:])


def add_rows(out: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values to their rows, which ascend; results repeat bit for bit."""
    if values.device.type == "cpu":
        out.index_add_(0, rows, values)
        return
    touched, ptr = runs(rows)
    out[touched] += sum_by_parts(values, ptr)


def runs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct values of an ascending vector and their offsets."""
    touched, counts = torch.unique_consecutive(rows, return_counts=True)
    return touched.long(), torch.cat([counts.new_zeros(1), counts.cumsum(0)])
