"""The local formulation: every rank owns rows and fetches the features that its rows refer to.

One all-to-all fetches the rows of [X | r] of all vertices that the rank's rows refer to (the halo),
and its gradient returns them: at most n k d / p words received for degree d, and never more than
all rows, n k (1 - 1/p). That is little for meshes and road maps in a good order, and everything for
graphs without locality. Since rows are whole, any formula runs: GATv2, GCN, GIN, a user's own.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.dot_attention import dot_attention
from bevatron.kernels.graph.graph_attention import graph_attention
from bevatron.parallel.graph_partition.one_group import send_rows
from bevatron.parallel.graph_partition.scheme import Scheme
from bevatron.parallel.groups import Group


class Rows(Scheme):
    """Rows of the matrix on each rank, features of others fetched.

    Parameters
    ----------
    block : own rows; columns are the places in the halo
    vertices : vertices of this rank's rows
    wanted : positions of own vertices that are sent to each rank, concatenated by rank
    send, receive : number of rows sent to and received from each rank
    """

    name = "rows"

    def __init__(
        self,
        block: Csr,
        vertices: Int64[Tensor, "T"],
        everyone: Group,
        *,
        wanted: Int64[Tensor, "W"],
        send: Sequence[int],
        receive: Sequence[int],
    ) -> None:
        self.block, self.vertices, self.everyone = block, vertices, everyone
        self.wanted, self.send, self.receive = wanted, send, receive

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
        heads, channels = x.shape[1:]
        halo = self.fetch(torch.cat([x.flatten(1), col_score], 1))
        tile = halo[:, : heads * channels].unflatten(1, (heads, channels)).contiguous()
        col = halo[:, heads * channels :].contiguous()
        return graph_attention(self.block, tile, row_score, col, negative_slope, dropout, seed=seed)

    def dot_attention(
        self,
        x: Float[Tensor, "T H C"],
        scale: Float[Tensor, "_"],
        *,
        normalize: bool,
        softmax: bool,
    ) -> Float[Tensor, "T H C"]:
        """Attend by dot products or cosines; all ranks must call it."""
        return dot_attention(
            self.block, self.fetch(x), query=x, normalize=normalize, softmax=softmax, scale=scale
        )

    def fetch(self, rows: Shaped[Tensor, "T *rest"]) -> Shaped[Tensor, "halo *rest"]:
        """Fetch the halo's rows; all ranks must call it."""
        return send_rows(rows[self.wanted], self.everyone, self.send, self.receive)

    def add_up(self, halo: Shaped[Tensor, "halo *rest"]) -> Shaped[Tensor, "T *rest"]:
        """Send rows of the halo back to their vertices and sum them, the adjoint of `fetch`."""
        rows = send_rows(halo, self.everyone, self.receive, self.send)
        total = rows.new_zeros((len(self.vertices), *rows.shape[1:]))
        return total.index_add(0, self.wanted, rows)
