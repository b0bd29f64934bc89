"""Every rank holds the whole structure and computes some of the features of all vertices.

An all-to-all turns rows of vertices into columns of features, every rank attends over all edges
with its features (or its heads), and another all-to-all turns the result back: 4 n k / p (1 - 1/p)
words per layer, forward and backward, with perfect balance. Every rank needs the scores of all
edges, which are gathered. The loss is a sum over features, hence so are the gradients of the
scores, and nothing else is exchanged. NeutronTP (arXiv 2412.20379) does this for graphs.

This does not support dot-product attention, whose scores need all features of an edge.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.graph_attention import graph_attention
from bevatron.parallel.graph_partition.one_group import gather_rows, send_rows
from bevatron.parallel.graph_partition.scheme import Scheme, pad_rows
from bevatron.parallel.graph_partition.wire import Wire
from bevatron.parallel.groups import Group


class FeatureParallel(Scheme):
    """The structure on every rank, the features cut over the ranks.

    Parameters
    ----------
    block : the whole matrix; rows are the padded pieces one after another, columns their prefixes
    vertices : vertices of the rank's own piece
    padded : length of every piece with its padding
    prefix : rows of each piece that any edge refers to: only these are sent
    wire : type of features between ranks
    """

    name = "feature_parallel"

    def __init__(
        self,
        block: Csr,
        vertices: Int64[Tensor, "T"],
        everyone: Group,
        *,
        padded: int,
        prefix: int,
        wire: Wire | None = None,
    ) -> None:
        self.block, self.vertices, self.everyone = block, vertices, everyone
        self.padded, self.prefix, self.wire = padded, prefix, wire or Wire()

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
        """Attend as GAT does; all ranks must call it.

        Heads are distributed over the ranks if their number is divisible; otherwise, or with
        dropout, each rank gets some channels of every head.
        """
        parts, heads = self.everyone.size, x.shape[1]
        by_heads = heads % parts == 0 and dropout == 0
        if by_heads:
            row = self._turn(row_score[:, :, None], self.padded)[:, :, 0]
            col = self._turn(col_score[:, :, None], self.prefix)[:, :, 0]
            found = graph_attention(
                self.block, self._turn(x, self.prefix), row, col, negative_slope
            )
            return self._turn_back(found)
        row = gather_rows(pad_rows(row_score, self.padded), self.everyone)
        col = gather_rows(pad_rows(col_score, self.padded)[: self.prefix], self.everyone)
        missing = -x.shape[2] % parts
        wide = torch.nn.functional.pad(x, (0, missing)).transpose(1, 2)
        mine = self._turn(wide, self.prefix).transpose(1, 2).contiguous()
        found = graph_attention(self.block, mine, row, col, negative_slope, dropout, seed=seed)
        back = self._turn_back(found.transpose(1, 2)).transpose(1, 2)
        return back[:, :, : x.shape[2]]

    def _turn(self, rows: Tensor, count: int) -> Tensor:
        """Exchange the first ``count`` of [T, p * s, c] for [p * count, s, c], this rank's s."""
        parts = self.everyone.size
        pieces = pad_rows(rows, self.padded)[:count].unflatten(1, (parts, -1)).transpose(0, 1)
        sent = self._narrow(pieces.flatten(0, 1).contiguous())
        counts = [count] * parts
        return send_rows(sent, self.everyone, counts, counts).to(rows.dtype)

    def _turn_back(self, slices: Tensor) -> Tensor:
        """Undo `_turn`."""
        parts = self.everyone.size
        counts = [self.padded] * parts
        sent = self._narrow(slices.contiguous())
        rows = send_rows(sent, self.everyone, counts, counts)
        rows = rows.to(slices.dtype).unflatten(0, (parts, self.padded)).transpose(0, 1)
        own: Tensor = rows.flatten(1, 2)[: len(self.vertices)]
        return own

    def _narrow(self, rows: Tensor) -> Tensor:
        """Round features to the wire type; scores are never rounded."""
        return rows if rows[0, 0].numel() == 1 else self.wire.narrow(rows)
