"""Aggregation over the columns of each row in plain PyTorch: the specification."""

import torch
from torch import Tensor

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.sums import weighted_sum
from bevatron.kernels.shared.dtypes import wide


def spmm(csr: Csr, x: Tensor, reduce: str) -> Tensor:
    """Compute the sum, mean, maximum or minimum over the columns j of every row i."""
    if reduce in {"sum", "mean"}:
        return _sum(csr, x, reduce == "mean").to(x.dtype)
    row, col = csr.row_index.long(), csr.col
    message = wide(x)[col]
    if csr.values is not None:
        message = message + csr.values.to(message.dtype)[:, None, None]
    first = first_extreme(message.detach() if reduce == "max" else -message.detach(), row, csr)
    taken = message.gather(0, first.clamp(max=max(csr.nnz - 1, 0))) if csr.nnz else x.new_zeros(0)
    empty = first == csr.nnz
    if not csr.nnz:
        return x[:1].sum() * 0 + x.new_zeros(first.shape)
    return torch.where(empty, 0.0, taken).to(x.dtype)


def first_extreme(message: Tensor, row: Tensor, csr: Csr) -> Tensor:
    """Return the first maximal entry of each row, and the number of entries for an empty row."""
    index = row[:, None, None].expand_as(message)
    shape = (csr.shape[0], *message.shape[1:])
    largest = message.new_full(shape, -torch.inf).scatter_reduce(0, index, message, "amax")
    is_largest = (message == largest[row]) | message.isnan()
    entry = torch.arange(len(row), device=row.device)[:, None, None]
    entry = torch.where(is_largest, entry, len(row))
    start = torch.full(shape, len(row), device=row.device, dtype=torch.int64)
    return start.scatter_reduce(0, index, entry, "amin")


def _sum(csr: Csr, x: Tensor, mean: bool) -> Tensor:
    features = wide(x)
    row, num_heads = csr.row_index, x.shape[1]
    values = features.new_ones(csr.nnz) if csr.values is None else csr.values.to(features.dtype)
    weights = values[:, None].expand(-1, num_heads)
    total = weighted_sum(weights, features, row, csr.col, csr.shape[0])
    if not mean:
        return total
    amount = values.new_zeros(csr.shape[0]).index_add(0, row, values)
    amount = torch.where(csr.row_ptr.diff() > 0, amount, 1.0)
    return total / amount[:, None, None]
