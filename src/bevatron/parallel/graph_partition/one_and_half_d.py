"""The scheme of Besta et al. (SC 2023, section 7), for comparison: A-stationary, square grids.

Rank (i, j) stores block A_ij and holds row tile i of the features, as all ranks (i, *) do. Forward:
it swaps tiles with rank (j, i) to get column tile j, and all-reduces over ranks (i, *) sum
the rows: largest logit, total, Z. Backward: all-reduces over ranks (*, j) sum the gradients of
columns, which are swapped back; those of the row scores are summed over ranks (i, *). Work per
vertex (projections, activations) is done sqrt(p) times.

Gradients are those of one copy: every rank of (i, *) computes the same loss on the same rows, and
sums over all ranks are divided by `replicas`. Beyond the paper, the gradients of columns
are reduced once instead of twice, and delta = <G, Z> needs no message.
"""

from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.dot_attention import partial as dot_partial
from bevatron.kernels.graph.graph_attention import partial
from bevatron.parallel.graph_partition.dot_blocks import block_scores, col_gradients, row_gradients
from bevatron.parallel.graph_partition.scheme import BlockScheme, divide, rescale, safe_log_total
from bevatron.parallel.groups import Group


class OneAndHalfD(BlockScheme):
    """The graph in s x s blocks, features in s tiles of s copies.

    Parameters
    ----------
    block : A_ij
    vertices : vertices of row tile i
    everyone, row_group, column_group : all ranks; ranks (i, *); ranks (*, j)
    padded : length of every tile with its padding
    """

    name = "one_and_half_d"

    def __init__(
        self,
        block: Csr,
        vertices: Int64[Tensor, "T"],
        everyone: Group,
        row_group: Group,
        column_group: Group,
        *,
        padded: int,
    ) -> None:
        self.functions = _GraphAttention, _DotAttention
        self.block, self.vertices, self.everyone = block, vertices, everyone
        self.row_group, self.column_group, self.padded = row_group, column_group, padded
        self.replicas = row_group.size
        i, j = column_group.index, row_group.index
        self._peer = j * row_group.size + i

    def swap(self, rows: Tensor) -> Tensor:
        """Exchange a tile with rank (j, i)."""
        return self.everyone.exchange(rows, self._peer).wait()


class _GraphAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        row_score: Tensor,
        col_score: Tensor,
        scheme: OneAndHalfD,
        options: tuple[float, float],
        seed: int,
        learns: bool,
    ) -> Tensor:
        width = x[:1].numel()
        tile = scheme.swap(torch.cat([x.flatten(1), col_score], 1))
        x_tile = tile[:, :width].reshape(x.shape)
        col_tile = tile[:, width:].contiguous()
        sums = partial.forward(
            scheme.block, x_tile, row_score, col_tile, *options, seed=seed, backward=learns
        )
        largest = scheme.row_group.all_reduce(sums.largest.clone(), "max").wait()
        common = rescale(sums.largest, largest)
        total = scheme.row_group.all_reduce(sums.total * common).wait()
        z = scheme.row_group.all_reduce(sums.z * common.unsqueeze(-1)).wait()
        z = divide(z, total)
        saved = (sums.largest, sums.positive, sums.z_positive)
        log_total = safe_log_total(largest, total)
        ctx.save_for_backward(z, log_total, row_score, x_tile, col_tile, *saved)
        ctx.scheme, ctx.options, ctx.seed = scheme, options, seed
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), scheme = grads, ctx.scheme
        z, log_total, row_score, x_tile, col_tile, largest, positive, saved = ctx.saved_tensors
        grad = grad.contiguous()
        delta = (grad * z).sum(-1)
        sums = partial.Sums(largest, positive, positive, saved, saved)
        by_row = partial.row_gradient(sums, grad, log_total, delta, ctx.options[0])
        message = scheme.row_group.all_reduce(by_row)
        by_x, by_col = partial.backward(
            *(scheme.block, x_tile, row_score, col_tile, grad, log_total, delta, *ctx.options),
            seed=ctx.seed,
        )
        both = torch.cat([by_x.flatten(1), by_col], 1)
        both = scheme.swap(scheme.column_group.all_reduce(both).wait())
        width = by_x[:1].numel()
        by_x = both[:, :width].reshape(z.shape)
        return by_x, message.wait(), both[:, width:], None, None, None, None


class _DotAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, scheme: OneAndHalfD, normalize: bool, softmax: bool
    ) -> Tensor:
        x_col = scheme.swap(x)
        scores = block_scores(x, x_col, scale, normalize=normalize, softmax=softmax)
        found = dot_partial.forward(scheme.block, scores)
        log_total = None
        if found.largest is None or found.total is None:
            z = scheme.row_group.all_reduce(found.z).wait()
        else:
            largest = scheme.row_group.all_reduce(found.largest.clone(), "max").wait()
            common = rescale(found.largest, largest)
            total = scheme.row_group.all_reduce(found.total * common).wait()
            sums = found.z * common.unsqueeze(-1)
            z = divide(scheme.row_group.all_reduce(sums).wait(), total)
            log_total = safe_log_total(largest, total)
        ctx.save_for_backward(x, scale, x_col, z, log_total)
        ctx.scheme, ctx.options = scheme, {"normalize": normalize, "softmax": softmax}
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scheme, grad = ctx.scheme, grads[0].contiguous()
        x, scale, x_col, z, log_total = ctx.saved_tensors
        delta = None if log_total is None else (grad * z).sum(-1)
        scores = block_scores(x, x_col, scale, **ctx.options)
        by_row, by_scale = row_gradients(scheme.block, scores, scale, grad, log_total, delta)
        rows = scheme.row_group.all_reduce(by_row)
        by_col = col_gradients(scheme.block, scores, grad, log_total, delta)
        cols = scheme.swap(scheme.column_group.all_reduce(by_col).wait())
        # The terms of all blocks sum to one gradient, not to one for every copy.
        return rows.wait() + cols, by_scale * scheme.replicas, None, None, None
