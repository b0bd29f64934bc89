"""Distributes the rows of a sparse matrix over programs.

Rows of real graphs have one entry or hundreds of thousands. A row longer than a chunk is cut into
parts, which are merged in order, so that results repeat bit for bit. Parts are sorted by length:
those of one program take equally long, and the longest start first.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.graph.csr.ordering import expand

SMALLEST_CHUNK = 256
"""Rows up to this length are never cut."""
ROWS_PER_PART = 0.5
"""Most parts of cut rows per row of the matrix, which bounds the memory of partial results."""


@dataclass(frozen=True, eq=False)
class Work:
    """Parts of rows, longest first.

    Attributes
    ----------
    row : [parts] int32, row of each part
    start : [parts] int64, its first entry
    length : [parts] int32, its number of entries, at most ``chunk``
    slot : [parts] int32, index of the partial result of a cut row's part; -1 for a whole row
    cut_row : [cut rows] int32
    cut_ptr : [cut rows + 1] int32, offsets of the slots of each cut row
    lengths : on the host, the number of parts with at least 1, 2, 4, 8 ... entries
    chunk : longest part
    num_slots : number of slots
    """

    row: Tensor
    start: Tensor
    length: Tensor
    slot: Tensor
    cut_row: Tensor
    cut_ptr: Tensor
    lengths: tuple[int, ...]
    chunk: int
    num_slots: int

    def map(self, move: Callable[[Tensor], Tensor]) -> "Work":
        """Return a copy with every tensor moved."""
        tensors = {each.name: getattr(self, each.name) for each in fields(self)}
        moved: dict[str, Any] = {
            name: move(tensor) for name, tensor in tensors.items() if isinstance(tensor, Tensor)
        }
        return replace(self, **moved)


def make_work(ptr: Tensor) -> Work:
    """Schedule the segments between ``ptr``; waits for the device."""
    num_rows, device = len(ptr) - 1, ptr.device
    length = ptr.diff()
    chunk = _chunk(num_rows, int(ptr[-1]))
    parts = ((length + chunk - 1) // chunk).clamp(min=1)
    part_ptr = torch.cat([parts.new_zeros(1), parts.cumsum(0)])
    row = expand(part_ptr, torch.int64, int(part_ptr[-1]))
    number = torch.arange(len(row), device=device) - (parts.cumsum(0) - parts)[row]
    part_length = (length[row] - number * chunk).clamp(max=chunk)
    cut = parts > 1
    cut_parts = torch.where(cut, parts, 0)
    first_slot = cut_parts.cumsum(0) - cut_parts
    slot = torch.where(cut[row], first_slot[row] + number, -1)
    order = torch.argsort(part_length, descending=True, stable=True)
    sorted_length = part_length[order].contiguous()
    cut_row = cut.nonzero().squeeze(1)
    cut_ptr = torch.cat([first_slot[cut_row], cut_parts.sum()[None]])
    bounds = 2 ** torch.arange(chunk.bit_length(), device=device)
    lengths = (sorted_length[:, None] >= bounds).sum(0) if len(order) < 2**16 else None
    if lengths is None:
        lengths = len(order) - torch.searchsorted(sorted_length.flip(0), bounds)
    return Work(
        row[order].to(torch.int32),
        (ptr[row] + number * chunk)[order],
        sorted_length.to(torch.int32),
        slot[order].to(torch.int32),
        cut_row.to(torch.int32),
        cut_ptr.to(torch.int32),
        tuple(lengths.tolist()),
        chunk,
        int(cut_ptr[-1]),
    )


def _chunk(num_rows: int, nnz: int) -> int:
    """Choose the longest part: a power of two that grows with the average row."""
    wanted = max(SMALLEST_CHUNK, nnz / max(num_rows, 1) / ROWS_PER_PART)
    return 1 << (int(wanted) - 1).bit_length()
