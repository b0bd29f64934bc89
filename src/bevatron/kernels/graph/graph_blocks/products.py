"""Sums over edges with one set of values per head, by the fused product on a GPU."""

import torch
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.spmm import spmm
from bevatron.kernels.shared.launch import on_gpu


def weighted_sum(csr: Csr, values: Tensor | None, x: Tensor) -> Tensor:
    """[n, H, K] sums of rows of x [m, H, K] over the entries, times values [nnz, H].

    On a GPU head by head through `bevatron.kernels.graph.spmm`, elsewhere in chunks of edges.
    """
    if not on_gpu(x):
        result: Tensor = registry.dispatch("weighted_sum", x)(csr, values, x)
        return result
    return by_head(csr, values, x)


def by_head(csr: Csr, values: Tensor | None, x: Tensor) -> Tensor:
    """Multiply by one sparse matrix per head, all of one structure."""
    if values is None:
        return spmm(csr.with_values(None), x)
    heads = max(values.shape[1], x.shape[1])
    if values.shape[1] == 1:
        return spmm(csr.with_values(values[:, 0]), x)
    parts = [
        spmm(csr.with_values(values[:, head].contiguous()), x[:, min(head, x.shape[1] - 1)])
        for head in range(heads)
    ]
    return torch.stack(parts, dim=1)
