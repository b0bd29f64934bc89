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
from bevatron.kernels.csr.wide import wide
from bevatron.kernels.dot_attention import partial as dot_partial
from bevatron.kernels.graph_attention import partial
from bevatron.parallel.graph_partition.dot_blocks import block_scores, col_gradients, row_gradients
from bevatron.parallel.graph_partition.groups import Group, Pending
from bevatron.parallel.graph_partition.scheme import (
    Scheme,
    channel_chunks,
    divide,
    pad_rows,
    rescale,
    safe_log_total,
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
    regather
        Gather the features of a column block again in the backward pass instead of keeping them:
        n k / Py (1 - 1/Px) more words for n k / Py less memory in every layer (gat).
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
        regather: bool = False,
    ) -> None:
        self.block, self.vertices, self.everyone = block, vertices, everyone
        self.row_group, self.column_group = row_group, column_group
        self.padded, self.prefix, self.chunks = padded, prefix, chunks
        self.wire, self.regather = wire or Wire(), regather

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
        found: Tensor = _GraphAttention.apply(*sent, self, (negative_slope, dropout), seed)
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
        options: tuple[float, float],
        seed: int,
    ) -> Tensor:
        heads, channels = x.shape[1:]
        parts, prefix, wire = channel_chunks(channels, scheme.chunks), scheme.prefix, scheme.wire
        tiles: list[Pending | None] = []
        for number, part in enumerate(parts):
            with_first = [col_score[:prefix]] if number == 0 else []
            rows = wire.pack(x[:prefix, :, part], *with_first)
            tiles.append(scheme.column_group.all_gather(rows))
        row_tile = scheme.row_group.all_gather(wide(row_score)).wait()
        col_tile = largest = common = torch.empty(0)
        messages, saved, features = [], [], []
        for number, part in enumerate(parts):
            width = part.stop - part.start
            tile = tiles[number]
            assert tile is not None
            flat, scalars = wire.unpack(tile.wait(), heads * width, x.dtype)
            features.append(flat.unflatten(1, (heads, width)).contiguous())
            if number == 0:
                col_tile = scalars.contiguous()
            sums = partial.forward(
                scheme.block, features[-1], row_tile, col_tile, *options, seed=seed
            )
            if number == 0:
                largest = scheme.row_group.all_reduce(sums.largest.clone(), "max").wait()
                common = rescale(sums.largest, largest)
            with_first = [sums.total * common] if number == 0 else []
            rescaled = sums.z.mul_(common.unsqueeze(-1))
            messages.append(wire.reduce_scatter(scheme.row_group, rescaled, *with_first))
            saved += [sums.largest, sums.positive, sums.z_positive]
            if scheme.regather:
                tiles[number], features[-1] = None, x[:0]
        z, total = _put_together(messages, parts, x)
        start = scheme.row_group.index * scheme.padded
        log_total = safe_log_total(largest[start : start + scheme.padded], total)
        features = [x] if scheme.regather else features
        ctx.save_for_backward(z, log_total, row_tile, col_tile, *features, *saved)
        ctx.scheme, ctx.parts, ctx.options, ctx.seed = scheme, parts, options, seed
        ctx.types = row_score.dtype, col_score.dtype
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), scheme, wire = grads, ctx.scheme, ctx.scheme.wire
        z, log_total, row_tile, col_tile, *saved = ctx.saved_tensors
        kept = 1 if scheme.regather else len(ctx.parts)
        features, saved = saved[:kept], saved[kept:]
        heads, prefix = z.shape[1], scheme.prefix
        delta = (wide(grad) * wide(z)).sum(-1)
        tiles = []
        for number, part in enumerate(ctx.parts):
            with_first = [delta, log_total] if number == 0 else []
            rows = wire.pack(grad[:, :, part], *with_first)
            tiles.append(scheme.row_group.all_gather(rows))
        again = []
        if scheme.regather:
            sent = (wire.pack(features[0][:prefix, :, part]) for part in ctx.parts)
            again = [scheme.column_group.all_gather(rows) for rows in sent]
        by_row = by_col = delta_tile = log_tile = torch.empty(0)
        messages = []
        for number, part in enumerate(ctx.parts):
            width = part.stop - part.start
            flat, scalars = wire.unpack(tiles[number].wait(), heads * width, grad.dtype)
            tile = flat.unflatten(1, (heads, width)).contiguous()
            if number == 0:
                delta_tile, log_tile = (s.contiguous() for s in scalars.split(heads, 1))
            else:
                # <G, z> and <X, Q> add up over the channels; delta's share must be there once.
                delta_tile = torch.zeros_like(delta_tile)
            if scheme.regather:
                flat = wire.unpack(again[number].wait(), heads * width, z.dtype)[0]
                x_tile = flat.unflatten(1, (heads, width)).contiguous()
            else:
                x_tile = features[number]
            by_x, share = partial.backward(
                *(scheme.block, x_tile, row_tile, col_tile),
                *(tile, log_tile, delta_tile, *ctx.options),
                seed=ctx.seed,
            )
            by_col = share if number == 0 else by_col + share
            with_last = [by_col] if number == len(ctx.parts) - 1 else []
            messages.append(wire.reduce_scatter(scheme.column_group, by_x, *with_last))
            sums = partial.Sums(*_without_sums(*saved[3 * number : 3 * number + 3]))
            share = partial.row_gradient(sums, tile, log_tile, delta_tile, ctx.options[0])
            by_row = share if number == 0 else by_row + share
        row_message = scheme.row_group.reduce_scatter(by_row)
        by_x, by_score = torch.zeros_like(z), torch.zeros_like(log_total)
        found, score = _put_together(messages, ctx.parts, by_x[:prefix], divided=False)
        by_x[:prefix], by_score[:prefix] = found, score
        row_type, col_type = ctx.types
        return by_x, row_message.wait().to(row_type), by_score.to(col_type), None, None, None


def _put_together(
    messages: list[Pending], parts: list[slice], like: Tensor, *, divided: bool = True
) -> tuple[Tensor, Tensor]:
    """Wait for all chunks of channels and the scalars that came with one of them."""
    found, heads, scalars = torch.empty_like(like), like.shape[1], torch.empty(0)
    for message, part in zip(messages, parts, strict=True):
        rows, width = message.wait(), heads * (part.stop - part.start)
        if rows.shape[1] > width:
            scalars = rows[:, width:].contiguous()
        chunk = rows[:, :width].unflatten(1, (heads, -1))
        found[:, :, part] = divide(chunk, scalars) if divided else chunk
    return found, scalars


def _without_sums(largest: Tensor, positive: Tensor, z_positive: Tensor) -> tuple[Tensor, ...]:
    """Return what is left of a block's sums: those for the gradient of the row's score."""
    return largest, positive, positive, z_positive, z_positive


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
        scores = block_scores(x_row, x_col, scale, normalize=normalize, softmax=softmax)
        found = dot_partial.forward(scheme.block, scores)
        log_total = None
        z: Tensor
        if found.largest is None or found.total is None:
            z = wire.reduce_scatter(scheme.row_group, found.z).wait().unflatten(1, shape)
        else:
            largest = scheme.row_group.all_reduce(found.largest.clone(), "max").wait()
            common = rescale(found.largest, largest)
            sums = found.z.mul_(common.unsqueeze(-1))
            rows = wire.reduce_scatter(scheme.row_group, sums, found.total * common).wait()
            total = rows[:, width:]
            z = divide(rows[:, :width].unflatten(1, shape), total)
            start = scheme.row_group.index * scheme.padded
            log_total = safe_log_total(largest[start : start + scheme.padded], total)
        z = z.to(x.dtype)
        ctx.save_for_backward(scale, x_row, x_col, z, log_total)
        ctx.scheme, ctx.options = scheme, {"normalize": normalize, "softmax": softmax}
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale, x_row, x_col, z, log_total = ctx.saved_tensors
        (grad,), scheme = grads, ctx.scheme
        wire, width, shape = scheme.wire, z[:1].numel(), z.shape[1:]
        log_tile = delta_tile = None
        scalars = []
        if log_total is not None:
            scalars = [(wide(grad) * wide(z)).sum(-1), log_total]
        gathered = scheme.row_group.all_gather(wire.pack(grad, *scalars)).wait()
        tile, found = wire.unpack(gathered, width, grad.dtype)
        if log_total is not None:
            delta_tile, log_tile = (part.contiguous() for part in found.split(shape[0], 1))
        scores = block_scores(x_row, x_col, scale, **ctx.options)
        known = (tile.unflatten(1, shape).contiguous(), log_tile, delta_tile)
        by_row, by_scale = row_gradients(scheme.block, scores, scale, *known)
        # On its way while the columns are computed.
        rows = wire.reduce_scatter(scheme.row_group, by_row)
        by_col = col_gradients(scheme.block, scores, *known)
        cols = wire.reduce_scatter(scheme.column_group, by_col)
        by_x = rows.wait().unflatten(1, shape).clone()
        by_x[: scheme.prefix] += cols.wait().unflatten(1, shape)
        return by_x.to(z.dtype), by_scale, None, None, None
