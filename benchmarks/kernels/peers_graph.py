"""What attention on a graph is compared with: PyTorch Geometric, and cuSPARSE's SpMM.

Layers are made once, as in a model. Vectors are read by `index_select`, as PyTorch Geometric does:
on a GPU the gradient of an index sorts all entries.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bevatron.kernels import Csr


def edge_index(csr: Csr) -> Tensor:
    """Senders and receivers as PyTorch Geometric takes them."""
    return torch.stack([csr.col.long(), csr.row_index.long()])


@functools.cache
def layer(name: str, *sizes: int, **options: Any) -> Any:
    """Return a layer of PyTorch Geometric."""
    import torch_geometric.nn

    return getattr(torch_geometric.nn, name)(*sizes, **options)


def pyg_gat(edges: Tensor, x: Tensor, row_score: Tensor, col_score: Tensor) -> Tensor:
    """GATConv without its linear maps."""
    heads, channels = x.shape[1:]
    conv = layer("GATConv", channels, channels, heads=heads, add_self_loops=False, bias=False)
    size = (len(x), len(row_score))
    alpha = conv.edge_updater(edges, alpha=(col_score, row_score), edge_attr=None, size=size)
    result: Tensor = conv.propagate(edges, x=(x, None), alpha=alpha, size=size)
    return result


def pyg_agnn(edges: Tensor, x: Tensor) -> Tensor:
    """AGNNConv: cosines with a softmax."""
    conv = layer("AGNNConv", requires_grad=False, add_self_loops=False)
    if conv.beta.device != x.device:
        conv.to(x.device)
    result: Tensor = conv(x.squeeze(1), edges)
    return result


def pyg_gatv2(edges: Tensor, x: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    """GATv2Conv without its linear maps; messages go from ``x`` to ``query``."""
    heads, channels = x.shape[1:]
    conv = layer("GATv2Conv", channels, channels, heads=heads, add_self_loops=False, bias=False)
    conv._parameters.pop("att", None)  # noqa: SLF001
    conv.att = weight[None]
    size = (len(x), len(query))
    alpha = conv.edge_updater(edges, x=(x, query), edge_attr=None, size=size)
    result: Tensor = conv.propagate(edges, x=(x, query), alpha=alpha, size=size)
    return result


@functools.cache
def dot_products() -> Any:
    """Return VA in PyTorch Geometric's terms, which has no layer for it: a message per edge."""
    from torch_geometric.nn import MessagePassing

    class DotProducts(MessagePassing):
        def forward(self, edges: Tensor, x: Tensor) -> Tensor:
            return self.propagate(edges, x=x)

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return (x_i * x_j).sum(-1, keepdim=True) * x_j

    return DotProducts(aggr="add")


def pyg_va(edges: Tensor, x: Tensor) -> Tensor:
    result: Tensor = dot_products()(edges, x.squeeze(1))
    return result


class SparseProduct(torch.autograd.Function):
    """cuSPARSE's SpMM with its gradients: that of the transpose, and a sampled dense matmul."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, x: Tensor, csr: Csr) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(values, x)
        ctx.csr = csr
        return _matrix(csr.row_ptr, csr.col, values, csr.shape) @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of values and x."""
        values, x = ctx.saved_tensors
        csr = ctx.csr
        pattern = _matrix(csr.row_ptr, csr.col, torch.zeros_like(values), csr.shape)
        dvalues = torch.sparse.sampled_addmm(pattern, grad, x.T.contiguous()).values()
        back = _matrix(csr.col_ptr, csr.row_of, values[csr.position], csr.shape[::-1])
        return dvalues, back @ grad, None


def cusparse_gat(csr: Csr, row: Tensor, x: Tensor, row_score: Tensor, col_score: Tensor) -> Tensor:
    """Scores and softmax by gathers and sums over entries, the sum by cuSPARSE; one head."""
    of_rows, of_columns = row_score.squeeze(1), col_score.squeeze(1)
    logits = F.leaky_relu(of_rows.index_select(0, row) + of_columns.index_select(0, csr.col), 0.2)
    top = torch.segment_reduce(logits.detach(), "max", offsets=csr.row_ptr)
    weights = torch.exp(logits - top.index_select(0, row))
    total = weights.new_zeros(csr.shape[0]).index_add(0, row, weights)
    result: Tensor = SparseProduct.apply(weights / total.index_select(0, row), x.squeeze(1), csr)
    return result


def prepared_spmm(csr: Csr, x: Tensor) -> Any:
    """Return one SpMM with a matrix of ones, made before."""
    ones = torch.ones(csr.nnz, device=x.device)
    matrix = _matrix(csr.row_ptr, csr.col, ones, csr.shape)
    return lambda: matrix @ x[:, 0]


def _matrix(ptr: Tensor, index: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.sparse_csr_tensor(
        ptr.to(index.dtype), index, values, shape, check_invariants=False
    )
