r"""Attention over a Px x Py grid: one all-gather and one reduce-scatter per layer and direction.

Rank (i, j) stores block A_ij and owns piece (i, j) of the vertices (see `grid`). Forward, GAT:

1. [X | r] of column block j is gathered over ranks (*, j); l of row block i over ranks (i, *).
2. The block is summed up with a softmax of its own (largest logit m, sums relative to it).
3. The largest m over ranks (i, *) is found, sums are rescaled to it, and [Z | s] is reduced and
   scattered over ranks (i, *): each rank gets its own piece and divides.

Backward: [G | delta, L] is gathered over ranks (i, *); the gradients of x and r are reduced and
scattered over ranks (*, j), that of l, u = (1 - alpha)(<G, Z+> - delta p+), over ranks (i, *). The
sums over entries with positive logit Z+, p+ are this block's own part and never move.

Volume, in words a rank sends and with k = heads x channels: 2 [n k / Py (1 - 1/Px) + n k / Px
(1 - 1/Py)] and a few scalars. The features are cut into chunks of channels: chunk c + 1 is on
its way while chunk c is computed, and its sums leave while the next is computed.
"""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.csr import Csr
from bevatron.parallel.graph_partition import local
from bevatron.parallel.graph_partition.groups import Group
from bevatron.parallel.graph_partition.scheme import (
    Scheme,
    channel_chunks,
    divide,
    pad_rows,
    rescale,
    safe_log_total,
    scale_gradient,
)
from bevatron.parallel.graph_partition.wire import Wire


class TwoDimensional(Scheme):
    """The graph in Px x Py blocks.

    Parameters
    ----------
    block
        A_ij: rows j * padded + t of pieces (i, *), columns i * prefix + t of pieces (*, j).
    vertices
        Of the rank's own piece.
    everyone, row_group, column_group
        All ranks; ranks (i, *); ranks (*, j).
    padded
        Length of every piece with its padding.
    prefix
        Rows of each piece that any block refers to.
    chunks
        Parts that the channels are sent in.
    wire
        Type of features between ranks.
    """

    name = "two_dimensional"

    def __init__(
        self,
        block: Csr,
        vertices: Int64[Tensor, "T"],
        everyone: Group,
        row_group: Group,
        column_group: Group,
        *,
        padded: int,
        prefix: int,
        chunks: int = 1,
        wire: Wire | None = None,
    ) -> None:
        self.block, self.vertices, self.everyone = block, vertices, everyone
        self.row_group, self.column_group = row_group, column_group
        self.padded, self.prefix, self.chunks = padded, prefix, chunks
        self.wire = wire or Wire()

    def graph_attention(
        self,
        x: Float[Tensor, "T H C"],
        row_score: Float[Tensor, "T H"],
        col_score: Float[Tensor, "T H"],
        *,
        negative_slope: float,
        dropout: float,
        seed: int,
    ) -> Float[Tensor, "T H C"]:
        """Attend as GAT does; all ranks must call it."""
        sent = (pad_rows(rows, self.padded) for rows in (x, row_score, col_score))
        found: Tensor = _GraphAttention.apply(*sent, self, negative_slope, dropout, seed)
        return found[: len(self.vertices)]

    def dot_attention(
        self,
        x: Float[Tensor, "T H C"],
        scale: Float[Tensor, "_"],
        *,
        normalize: bool,
        softmax: bool,
    ) -> Float[Tensor, "T H C"]:
        """Attend by dot products or cosines; all ranks must call it."""
        rows = pad_rows(x, self.padded)
        found: Tensor = _DotAttention.apply(rows, scale, self, normalize, softmax)
        return found[: len(self.vertices)]


class _GraphAttention(torch.autograd.Function):
    """GAT's core over the own, padded pieces."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        row_score: Tensor,
        col_score: Tensor,
        scheme: TwoDimensional,
        negative_slope: float,
        dropout: float,
        seed: int,
    ) -> Tensor:
        heads, channels = x.shape[1:]
        parts = channel_chunks(channels, scheme.chunks)
        prefix, wire = scheme.prefix, scheme.wire
        tiles = []
        for number, part in enumerate(parts):
            with_first = [col_score[:prefix]] if number == 0 else []
            rows = wire.pack(x[:prefix, :, part], *with_first)
            tiles.append(scheme.column_group.all_gather(rows))
        row_tile = scheme.row_group.all_gather(row_score).wait()
        sums, saved, common = [], [], torch.empty(0)
        for number, part in enumerate(parts):
            width = part.stop - part.start
            features, scalars = wire.unpack(tiles[number].wait(), heads * width, x.dtype)
            if number == 0:
                col_tile = scalars.contiguous()
            tile = features.reshape(-1, heads, width)
            found = local.attention_statistics(
                scheme.block, tile, row_tile, col_tile, negative_slope, dropout, seed
            )
            if number == 0:
                own_largest = found.largest
                largest = scheme.row_group.all_reduce(own_largest.clone(), "max").wait()
                common = rescale(own_largest, largest)
                first = [found.total * common]
                own_positive = found.total_positive
            sums.append(
                wire.reduce_scatter(
                    scheme.row_group,
                    found.sums.mul_(common.unsqueeze(-1)),
                    *(first if number == 0 else []),
                )
            )
            saved += [tile, found.sums_positive]
        z = torch.empty_like(x)
        for number, part in enumerate(parts):
            width = part.stop - part.start
            rows = sums[number].wait()
            if number == 0:
                total = rows[:, heads * width :]
            z[:, :, part] = divide(rows[:, : heads * width].view(-1, heads, width), total)
        start = scheme.row_group.index * scheme.padded
        log_total = safe_log_total(largest[start : start + scheme.padded], total)
        ctx.save_for_backward(z, log_total, row_tile, col_tile, own_largest, own_positive, *saved)
        ctx.scheme, ctx.parts = scheme, parts
        ctx.options = (negative_slope, dropout, seed)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, log_total, row_tile, col_tile, own_largest, own_positive, *saved = ctx.saved_tensors
        (grad,) = grads
        scheme, wire = ctx.scheme, ctx.scheme.wire
        heads = z.shape[1]
        delta = (grad * z).sum(-1)
        tiles = []
        for number, part in enumerate(ctx.parts):
            with_first = [delta, log_total] if number == 0 else []
            rows = wire.pack(grad[:, :, part], *with_first)
            tiles.append(scheme.row_group.all_gather(rows))
        grad_row = grad_col = torch.empty(0)
        sums = []
        for number, part in enumerate(ctx.parts):
            width = part.stop - part.start
            features, scalars = wire.unpack(tiles[number].wait(), heads * width, z.dtype)
            tile = features.reshape(-1, heads, width)
            if number == 0:
                delta_tile, log_tile = (s.contiguous() for s in scalars.split(heads, 1))
                own = rescale(own_largest, log_tile)
                grad_row = -delta_tile * own_positive
            x_tile, positive = saved[2 * number : 2 * number + 2]
            grad_row = grad_row + torch.linalg.vecdot(tile, positive)
            grad_x, part_col = local.attention_column_gradients(
                scheme.block, x_tile, row_tile, col_tile, log_tile, tile, delta_tile, *ctx.options
            )
            # <X, Q> adds up over chunks of channels, delta's share must be there once.
            delta_tile = torch.zeros_like(delta_tile)
            grad_col = part_col if number == 0 else grad_col + part_col
            last = [grad_col] if number == len(ctx.parts) - 1 else []
            sums.append(wire.reduce_scatter(scheme.column_group, grad_x, *last))
        row_sum = scheme.row_group.reduce_scatter(grad_row.mul_(1 - ctx.options[0]).mul_(own))
        grad_x = torch.zeros_like(z)
        grad_score = z.new_zeros(z.shape[:2])
        for number, part in enumerate(ctx.parts):
            width = part.stop - part.start
            rows = sums[number].wait()
            grad_x[: scheme.prefix, :, part] = rows[:, : heads * width].view(-1, heads, width)
            if number == len(ctx.parts) - 1:
                grad_score[: scheme.prefix] = rows[:, heads * width :]
        return grad_x, row_sum.wait(), grad_score, None, None, None, None


class _DotAttention(torch.autograd.Function):
    """The core of VA and AGNN over the own, padded pieces."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        scheme: TwoDimensional,
        normalize: bool,
        softmax: bool,
    ) -> Tensor:
        wire, width, shape = scheme.wire, x[:1].numel(), x.shape[1:]
        tiles = [
            scheme.column_group.all_gather(wire.pack(x[: scheme.prefix])),
            scheme.row_group.all_gather(wire.pack(x)),
        ]
        x_col, x_row = (
            wire.unpack(tile.wait(), width, x.dtype)[0].unflatten(1, shape) for tile in tiles
        )
        found = local.dot_statistics(
            scheme.block, x_row, x_col, scale, normalize=normalize, softmax=softmax
        )
        log_total = None
        z: Tensor
        if found.largest is None or found.total is None:
            z = wire.reduce_scatter(scheme.row_group, found.sums).wait().unflatten(1, shape)
        else:
            largest = scheme.row_group.all_reduce(found.largest.clone(), "max").wait()
            common = rescale(found.largest, largest)
            sums = found.sums.mul_(common.unsqueeze(-1))
            rows = wire.reduce_scatter(scheme.row_group, sums, found.total * common).wait()
            total = rows[:, width:]
            z = divide(rows[:, :width].unflatten(1, shape), total)
            start = scheme.row_group.index * scheme.padded
            log_total = safe_log_total(largest[start : start + scheme.padded], total)
        ctx.save_for_backward(x, scale, x_row, x_col, z, log_total)
        ctx.scheme, ctx.normalize = scheme, normalize
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, x_row, x_col, z, log_total = ctx.saved_tensors
        (grad,), scheme = grads, ctx.scheme
        wire, width, shape = scheme.wire, x[:1].numel(), x.shape[1:]
        log_tile = delta_tile = None
        scalars = [] if log_total is None else [(grad * z).sum(-1), log_total]
        gathered = scheme.row_group.all_gather(wire.pack(grad, *scalars)).wait()
        tile, found = wire.unpack(gathered, width, x.dtype)
        if log_total is not None:
            delta_tile, log_tile = (part.contiguous() for part in found.split(shape[0], 1))
        by_row, by_col, by_sum = local.dot_gradients(
            scheme.block,
            *(x_row, x_col, scale, tile.unflatten(1, shape), log_tile, delta_tile),
            normalize=ctx.normalize,
        )
        rows = wire.reduce_scatter(scheme.row_group, by_row)
        if ctx.normalize:
            by_col = local.without_length(by_col, x_col)
        cols = wire.reduce_scatter(scheme.column_group, by_sum.add_(by_col * scale.unsqueeze(-1)))
        own = rows.wait().unflatten(1, shape)
        by_scale = scale_gradient(x, own, scale) if ctx.needs_input_grad[1] else None
        if ctx.normalize:
            own = local.without_length(own, x)
        by_x = own * scale.unsqueeze(-1)
        by_x[: scheme.prefix] += cols.wait().unflatten(1, shape)
        return by_x, by_scale, None, None, None
