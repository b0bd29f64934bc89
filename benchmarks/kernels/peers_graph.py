"""What attention on a graph is compared with: PyTorch Geometric, and cuSPARSE's SpMM."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bevatron.kernels import Csr


def edge_index(csr: Csr) -> Tensor:
    """Senders and receivers as PyTorch Geometric takes them."""
    return torch.stack([csr.col.long(), csr.row_index.long()])


def pyg_gat(edges: Tensor, x: Tensor, row_score: Tensor, col_score: Tensor) -> Tensor:
    """GATConv without its linear maps."""
    from torch_geometric.nn import GATConv

    heads, channels = x.shape[1:]
    conv = GATConv(channels, channels, heads=heads, add_self_loops=False, bias=False)
    size = (len(x), len(row_score))
    alpha = conv.edge_updater(edges, alpha=(col_score, row_score), edge_attr=None, size=size)
    result: Tensor = conv.propagate(edges, x=(x, None), alpha=alpha, size=size)
    return result


def pyg_agnn(edges: Tensor, x: Tensor) -> Tensor:
    """AGNNConv: cosines with a softmax."""
    from torch_geometric.nn import AGNNConv

    conv = AGNNConv(requires_grad=False, add_self_loops=False).to(x.device)
    result: Tensor = conv(x[:, 0], edges)
    return result


def pyg_gatv2(edges: Tensor, x: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    """GATv2Conv without its linear maps; messages go from ``x`` to ``query``."""
    from torch_geometric.nn import GATv2Conv

    heads, channels = x.shape[1:]
    conv = GATv2Conv(channels, channels, heads=heads, add_self_loops=False, bias=False)
    del conv.att
    conv.att = weight[None]
    size = (len(x), len(query))
    alpha = conv.edge_updater(edges, x=(x, query), edge_attr=None, size=size)
    result: Tensor = conv.propagate(edges, x=(x, query), alpha=alpha, size=size)
    return result


def pyg_va(edges: Tensor, x: Tensor) -> Tensor:
    """VA in PyTorch Geometric's terms, which has no layer for it: a message for every edge."""
    from torch_geometric.nn import MessagePassing

    class DotProducts(MessagePassing):
        def forward(self, edges: Tensor, x: Tensor) -> Tensor:
            return self.propagate(edges, x=x)

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return (x_i * x_j).sum(-1, keepdim=True) * x_j

    result: Tensor = DotProducts(aggr="add")(edges, x[:, 0])
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
    logits = F.leaky_relu(row_score[row, 0] + col_score[csr.col, 0], 0.2)
    top = torch.segment_reduce(logits.detach(), "max", offsets=csr.row_ptr)
    weights = torch.exp(logits - top[row])
    total = weights.new_zeros(csr.shape[0]).index_add(0, row, weights)
    result: Tensor = SparseProduct.apply(weights / total[row], x[:, 0], csr)
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
