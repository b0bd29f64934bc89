"""Sums of consecutive rows in plain PyTorch: the specification."""

import torch
from torch import Tensor

from bevatron.kernels.shared.dtypes import wide_type


def segment_sum(values: Tensor, ptr: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add row by row, 16-bit types in float32, rounded once; return the values too."""
    wide = values.to(wide_type(values))
    if scale is not None:
        wide = wide * scale.detach().to(wide.dtype)[:, None]
    num = len(ptr) - 1
    # Rows before the first segment and after the last go to an extra row.
    segment = segment_of_rows(ptr, len(values))
    sums = wide.new_zeros(num + 1, values.shape[1]).index_add(0, segment, wide)
    return sums[:num].to(values.dtype), values


def segment_of_rows(ptr: Tensor, num_rows: int) -> Tensor:
    """Return the segment of each row, or the number of segments if it is in none."""
    rows = torch.arange(num_rows, device=ptr.device, dtype=ptr.dtype)
    segment = torch.searchsorted(ptr, rows, right=True) - 1
    return torch.where(segment < 0, len(ptr) - 1, segment)
