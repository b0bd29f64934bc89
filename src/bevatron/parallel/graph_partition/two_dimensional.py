r"""Attention over a Px x Py grid: one all-gather and one reduce-scatter per layer and direction.

Rank (i, j) stores block A_ij and owns piece (i, j) of the vertices (see `grid`). Forward, GAT:

1. X and r of column block j are gathered over ranks (*, j); l of row block i over ranks (i, *).
2. The block is summed with its own softmax (largest logit m, sums relative to it).
3. Ranks (i, *) find their largest m, rescale the sums Z and s to it and reduce-scatter them: each
   rank gets its own piece and divides.

Backward: G, delta and L are gathered over ranks (i, *); the gradients of x and r are
reduce-scattered over ranks (*, j), that of l, u = (1 - alpha)(<G, Z+> - delta p+), over ranks
(i, *). The sums over entries with positive logit, Z+ and p+, belong to this block and never move.

Volume, in words a rank sends and with k = heads x channels: 2 [n k / Py (1 - 1/Px) + n k / Px
(1 - 1/Py)] and a few scalars per head. The features are cut into chunks of channels: chunk c + 1 is
in flight while chunk c is computed, and the sums of c leave while the next is computed.
"""

from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.dot_attention import partial as dot_partial
from bevatron.kernels.graph.graph_attention import partial
from bevatron.kernels.shared.dtypes import wide
from bevatron.parallel.graph_partition.dot_blocks import block_scores, col_gradients, row_gradients
from bevatron.parallel.graph_partition.scheme import (
    BlockScheme,
    channel_chunks,
    divide,
    rescale,
    safe_log_total,
)
from bevatron.parallel.graph_partition.wire import Wire
from bevatron.parallel.groups import Group, Pending


class TwoDimensional(BlockScheme):
    """The graph in Px x Py blocks.

    Parameters
    ----------
    block : A_ij: rows j * padded + t of pieces (i, *), columns i * prefix + t of pieces (*, j)
    vertices : vertices of the rank's own piece
    everyone, row_group, column_group : all ranks; ranks (i, *); ranks (*, j)
    padded : length of every piece with its padding
    prefix : rows of each piece that any block refers to
    chunks : number of chunks the channels are sent in
    wire : type of features between ranks
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
        self.functions = _GraphAttention, _DotAttention
        self.block, self.vertices, self.everyone = block, vertices, everyone
        self.row_group, self.column_group = row_group, column_group
        self.padded, self.prefix, self.chunks = padded, prefix, chunks
        self.wire, self.regather = wire or Wire(), regather


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
        learns: bool,
    ) -> Tensor:
        parts, prefix, wire = channel_chunks(x.shape[2], scheme.chunks), scheme.prefix, scheme.wire
        rows, cols = scheme.row_group, scheme.column_group
        scores = [cols.all_gather(wide(col_score[:prefix])), rows.all_gather(wide(row_score))]
        tiles = [wire.all_gather(cols, x[:prefix, :, part]) for part in parts]
        col_tile, row_tile = (score.wait() for score in scores)
        largest = common = torch.empty(0)
        messages, features, saved = [], [], []
        for number in range(len(parts)):
            features.append(tiles[number].wait())
            sums = partial.forward(
                *(scheme.block, features[-1], row_tile, col_tile, *options),
                seed=seed,
                backward=learns,
            )
            if number == 0:
                largest = rows.all_reduce(sums.largest.clone(), "max").wait()
                common = rescale(sums.largest, largest)
                total_message = rows.reduce_scatter(sums.total * common)
            z = sums.z.mul_(common.unsqueeze(-1)) if rows.size > 1 else sums.z
            messages.append(wire.reduce_scatter(rows, z))
            saved += [sums.largest, sums.positive, sums.z_positive]
            if scheme.regather:
                tiles[number] = Pending(x)
                features.clear()
        total = total_message.wait()
        z = _put_together(messages, parts, x, total)
        start = rows.index * scheme.padded
        log_total = safe_log_total(largest[start : start + scheme.padded], total)
        features = [x] if scheme.regather else features
        ctx.save_for_backward(z, log_total, row_tile, col_tile, *features, *saved)
        ctx.scheme, ctx.parts, ctx.options, ctx.seed = scheme, parts, options, seed
        ctx.types = row_score.dtype, col_score.dtype
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), scheme, wire, parts = grads, ctx.scheme, ctx.scheme.wire, ctx.parts
        z, log_total, row_tile, col_tile, *saved = ctx.saved_tensors
        kept = 1 if scheme.regather else len(parts)
        features, saved = saved[:kept], saved[kept:]
        rows, cols, prefix = scheme.row_group, scheme.column_group, scheme.prefix
        delta = (wide(grad) * wide(z)).sum(-1)
        scalars = rows.all_gather(torch.cat([delta, log_total], 1))
        tiles = [wire.all_gather(rows, grad[:, :, part]) for part in parts]
        again = [Pending(tile) for tile in features]
        if scheme.regather:
            again = [wire.all_gather(cols, features[0][:prefix, :, part]) for part in parts]
        delta_tile, log_tile = (s.contiguous() for s in scalars.wait().chunk(2, 1))
        by_row = by_col = torch.empty(0)
        messages = []
        for number in range(len(parts)):
            tile = tiles[number].wait()
            by_x, share = partial.backward(
                *(scheme.block, again[number].wait(), row_tile, col_tile),
                *(tile, log_tile, delta_tile, *ctx.options),
                seed=ctx.seed,
            )
            messages.append(wire.reduce_scatter(cols, by_x))
            by_col = share if number == 0 else by_col + share
            sums = partial.Sums(*_without_sums(*saved[3 * number : 3 * number + 3]))
            share = partial.row_gradient(sums, tile, log_tile, delta_tile, ctx.options[0])
            by_row = share if number == 0 else by_row + share
            # <G, z> and <X, Q> sum over the channels; delta's term must enter once.
            delta_tile = torch.zeros_like(delta_tile)
        scores = [cols.reduce_scatter(by_col), rows.reduce_scatter(by_row)]
        by_x, by_score = torch.zeros_like(z), torch.zeros_like(log_total)
        by_x[:prefix] = _put_together(messages, parts, by_x[:prefix])
        by_score[:prefix] = scores[0].wait()
        row_type, col_type = ctx.types
        by_row = scores[1].wait().to(row_type)
        return by_x, by_row, by_score.to(col_type), None, None, None, None


def _put_together(
    messages: list[Pending], parts: list[slice], like: Tensor, total: Tensor | None = None
) -> Tensor:
    """Wait for all chunks of channels, divided by the rows' totals if these are given."""
    chunks = (message.wait() for message in messages)
    if total is not None:
        chunks = (divide(chunk, total) for chunk in chunks)
    if len(parts) == 1:
        return next(chunks).to(like.dtype)
    found = torch.empty_like(like)
    for chunk, part in zip(chunks, parts, strict=True):
        found[:, :, part] = chunk
    return found


def _without_sums(largest: Tensor, positive: Tensor, z_positive: Tensor) -> tuple[Tensor, ...]:
    """Return the remaining sums of a block: those for the gradient of the row's score."""
    return largest, positive, positive, z_positive, z_positive


class _DotAttention(torch.autograd.Function):
    """The core of VA and AGNN over the own, padded pieces."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, scheme: TwoDimensional, normalize: bool, softmax: bool
    ) -> Tensor:
        wire, rows, cols = scheme.wire, scheme.row_group, scheme.column_group
        tiles = [wire.all_gather(cols, x[: scheme.prefix]), wire.all_gather(rows, x)]
        x_col, x_row = (tile.wait() for tile in tiles)
        scores = block_scores(x_row, x_col, scale, normalize=normalize, softmax=softmax)
        found = dot_partial.forward(scheme.block, scores)
        log_total = None
        if found.largest is None or found.total is None:
            z = wire.reduce_scatter(rows, found.z).wait()
        else:
            largest = rows.all_reduce(found.largest.clone(), "max").wait()
            common = rescale(found.largest, largest)
            message = wire.reduce_scatter(rows, found.z.mul_(common.unsqueeze(-1)))
            total = rows.reduce_scatter(found.total * common).wait()
            z = divide(message.wait(), total)
            start = rows.index * scheme.padded
            log_total = safe_log_total(largest[start : start + scheme.padded], total)
        z = z.to(x.dtype)
        ctx.save_for_backward(scale, x_row, x_col, z, log_total)
        ctx.scheme, ctx.options = scheme, {"normalize": normalize, "softmax": softmax}
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale, x_row, x_col, z, log_total = ctx.saved_tensors
        (grad,), scheme, wire = grads, ctx.scheme, ctx.scheme.wire
        message = wire.all_gather(scheme.row_group, grad)
        log_tile = delta_tile = None
        if log_total is not None:
            delta = (wide(grad) * wide(z)).sum(-1)
            scalars = scheme.row_group.all_gather(torch.cat([delta, log_total], 1)).wait()
            delta_tile, log_tile = (part.contiguous() for part in scalars.chunk(2, 1))
        scores = block_scores(x_row, x_col, scale, **ctx.options)
        known = (message.wait(), log_tile, delta_tile)
        by_row, by_scale = row_gradients(scheme.block, scores, scale, *known)
        # In flight while the columns are computed.
        rows = wire.reduce_scatter(scheme.row_group, by_row)
        by_col = col_gradients(scheme.block, scores, *known)
        cols = wire.reduce_scatter(scheme.column_group, by_col)
        by_x = rows.wait().clone()
        by_x[: scheme.prefix] += cols.wait()
        return by_x.to(z.dtype), by_scale, None, None, None
