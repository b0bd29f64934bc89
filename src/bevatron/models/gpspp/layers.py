"""The block of GPS++: message passing and biased attention in parallel, then an FFN.

First linear layers are split by input. The matmul with an atom's features runs once per atom and
is gathered by its bonds, that with a molecule's features once per molecule. Since every bond is
stored in both directions, the sum over senders into an atom equals the sum over receivers out of
it, and the two blocks of weights that act on it are added. The weights are those of the plain
layers.

Tensors that several operators read (atoms, messages, the bias) are `Shared`; see there.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from bevatron.kernels import (
    bond_norm_gelu,
    layer_norm,
    linear,
    neighbour_sums,
    norm_gelu,
    residual_norm,
    scaled_residual,
)
from bevatron.kernels.molecule.norm_gelu import Activation
from bevatron.models.gpspp.config import GPSPlusPlusConfig
from bevatron.models.gpspp.graphs import Drops, Graphs
from bevatron.models.gpspp.shared import Shared, attention_of, linear_of, neighbour_sums_of, sums_of

EPS = 1e-3
"""Epsilon of all layer norms: the default of Keras, as in the published models."""


def dense(width_in: int, width_out: int, *, bias: bool = True) -> nn.Linear:
    """Build a linear layer with Keras' initialisation: Glorot uniform weights, no bias."""
    layer = nn.Linear(width_in, width_out, bias=bias)
    nn.init.xavier_uniform_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def uniform_dense(width_in: int, width_out: int, radius: float) -> nn.Linear:
    """Build a linear layer with weights and bias from (-radius, radius)."""
    layer = nn.Linear(width_in, width_out)
    nn.init.uniform_(layer.weight, -radius, radius)
    nn.init.uniform_(layer.bias, -radius, radius)
    return layer


class MLP(nn.Module):
    """Two linear layers with norm and activation between them: ``W2 act(LN(W1 x))``.

    The norm precedes the activation, as in the official code; the report (arXiv 2212.02229,
    eq. 13-14) prints the reverse.

    Parameters
    ----------
    width_in, hidden, width_out : features
    activation : ``gelu`` (tanh form) or ``relu``
    input_norm : normalise the input first
    norm : normalise the hidden features
    """

    def __init__(
        self,
        width_in: int,
        hidden: int,
        width_out: int,
        activation: Activation = "gelu",
        *,
        input_norm: bool = False,
        norm: bool = True,
    ) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.input_norm = nn.LayerNorm(width_in, EPS) if input_norm else None
        self.first = dense(width_in, hidden)
        self.norm = nn.LayerNorm(hidden, EPS) if norm else None
        self.second = dense(hidden, width_out)

    def forward(self, x: Float[Tensor, "M C"]) -> Float[Tensor, "M O"]:
        """Map rows."""
        if self.input_norm is not None:
            x = layer_norm(x, self.input_norm.weight, self.input_norm.bias, eps=EPS)
        return self.after_first(linear(x, self.first.weight))

    def after_first(
        self, x: Tensor, rows: Tensor | None = None, graphs: Graphs | None = None
    ) -> Tensor:
        """Continue from the output of the first layer without its bias.

        Parameters
        ----------
        x : a row per atom, if ``rows`` are given
        rows : output of the first layer for the features of each molecule
        graphs : goes with ``rows``
        """
        norm = self.norm
        hidden = norm_gelu(
            x,
            None if norm is None else norm.weight,
            None if norm is None else norm.bias,
            linear_bias=self.first.bias,
            rows=rows,
            index=None if graphs is None or rows is None else graphs.graph,
            ptr=None if graphs is None or rows is None else graphs.graph_ptr,
            eps=EPS,
            activation=self.activation,
        )
        return linear(hidden, self.second.weight, self.second.bias)


class EdgeUpdate(MLP):
    """``MLP_edge([x_receiver | x_sender | e | g])`` for every directed edge."""

    def __init__(self, config: GPSPlusPlusConfig) -> None:
        node, edge = config.node_width, config.edge_width
        self.widths = [node, node, edge, *([config.global_width] if config.globals_ else [])]
        super().__init__(sum(self.widths), config.expansion * edge, edge)

    def forward(  # type: ignore[override]
        self, x: Shared, e: Tensor, g: Tensor | None, graphs: Graphs
    ) -> Tensor:
        """Compute the messages: W2 GELU(LN(W_r x_r + W_s x_s + W_e e + W_g g + b)) + b2."""
        receiver, sender, edge, *rest = self.first.weight.split(self.widths, 1)
        assert self.norm is not None
        hidden = bond_norm_gelu(
            linear(e, edge),
            linear_of(x, torch.cat([receiver, sender])),
            graphs.bonds,
            self.norm.weight,
            self.norm.bias,
            linear_bias=self.first.bias,
            graph_rows=linear(g, rest[0]) if g is not None else None,
            graph=graphs.graph if g is not None else None,
            ptr=graphs.graph_ptr if g is not None else None,
            eps=EPS,
        )
        return linear(hidden, self.second.weight, self.second.bias)


class NodeUpdate(MLP):
    """``MLP_node([R | S | x | g])`` for every atom.

    R sums over the edges into the atom ``[message | x_sender]``, S over those out of it
    ``[message | x_receiver]``. Without edge features a message is ``[x_receiver | x_sender]``.
    """

    def __init__(self, config: GPSPlusPlusConfig) -> None:
        node = config.node_width
        message = [config.edge_width] if config.edges else [node, node]
        near = [node] if config.adjacent_aggregation else []
        self.sides = 2 if config.sender_aggregation else 1
        self.widths = [*(self.sides * (message + near)), node]
        self.widths += [config.global_width] if config.globals_ else []
        self.edges, self.adjacent = config.edges, config.adjacent_aggregation
        super().__init__(sum(self.widths), config.expansion * node, node)

    def forward(  # type: ignore[override]
        self,
        x: Shared,
        messages: Shared | None,
        g: Tensor | None,
        graphs: Graphs,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Compute the updates: W2 GELU(LN(W_R R + W_S S + W_x x + W_g g + b)) + b2."""
        parts = list(self.first.weight.split(self.widths, 1))
        rows = linear(g, parts.pop()) if g is not None else None
        own = parts.pop()
        if messages is None:
            hidden = self._from_nodes(x.value, parts, own, graphs)
        else:
            hidden = self._from_messages(x, messages, parts, own, graphs, scale)
        return self.after_first(hidden, rows, graphs)

    def _from_messages(
        self,
        x: Shared,
        messages: Shared,
        parts: list[Tensor],
        own: Tensor,
        graphs: Graphs,
        scale: Tensor | None,
    ) -> Tensor:
        """Compute W_R R + W_S S + W_x x, the sums and the atom being one row."""
        near = x if self.adjacent else None
        sums = neighbour_sums_of(
            messages, near, graphs.bonds, scale=scale, outgoing=self.sides == 2
        )
        if not self.adjacent:
            return linear(sums, torch.cat(parts, 1)) + linear(x.value, own)
        # The neighbours are the same in both directions of the bonds.
        of_neighbours = parts[1] + parts[3] if self.sides == 2 else parts[1]
        return linear(sums, torch.cat([*parts[0::2], of_neighbours, own], 1))

    def _from_nodes(self, x: Tensor, parts: list[Tensor], own: Tensor, graphs: Graphs) -> Tensor:
        """Without edge features, sum over neighbours or multiply the atom by its degree."""
        near = neighbour_sums(None, x, graphs.bonds)
        times = x * graphs.degree.to(x.dtype)[:, None]
        step = 3 if self.adjacent else 2
        repeated, others = parts[0], [*parts[1:step]]
        if self.sides == 2:
            # The neighbour of an outgoing edge is its receiver, which comes first.
            repeated = repeated + parts[step + 1]
            others += [parts[step], *parts[step + 2 :]]
        weight = torch.cat([repeated, torch.stack(others).sum(0), own], 1)
        return linear(torch.cat([times, near, x], 1), weight)


class GlobalUpdate(MLP):
    """``MLP_global([g | sum of node updates | sum of messages])`` for every molecule."""

    def __init__(self, config: GPSPlusPlusConfig) -> None:
        width = config.global_width
        edge = config.edge_width if config.edges else 0
        super().__init__(width + config.node_width + edge, config.expansion * width, width)

    def forward(  # type: ignore[override]
        self,
        g: Tensor,
        nodes: Shared,
        messages: Shared | None,
        graphs: Graphs,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Sum each molecule's updates, and its messages times their factors; return both too."""
        read = [g, sums_of(nodes, graphs.graph_ptr).to(g.dtype)]
        if messages is not None:
            read.append(sums_of(messages, graphs.edge_ptr, scale).to(g.dtype))
        return super().forward(torch.cat(read, 1))


class Stream(NamedTuple):
    """Features of edges or of molecules, a residual stream without norms.

    Attributes
    ----------
    wide : accumulated in float32 if matmuls are in 16 bits
    narrow : the same in the dtype of matmuls, which read it
    """

    wide: Tensor
    narrow: Tensor


class MessagePassing(nn.Module):
    """Edge, node and global updates of one block."""

    def __init__(self, config: GPSPlusPlusConfig, layer: int) -> None:
        super().__init__()
        self.edge = EdgeUpdate(config) if config.edges else None
        self.node = NodeUpdate(config)
        self.global_ = GlobalUpdate(config) if config.updates_globals(layer) else None

    def forward(
        self, x: Shared, e: Stream | None, g: Stream | None, graphs: Graphs, drops: Drops
    ) -> tuple[Tensor, Stream | None, Stream | None]:
        """Compute the update of nodes, ``e + Drop(messages)`` and ``g + Drop(update)``."""
        narrow_g = None if g is None else g.narrow
        messages = None
        if self.edge is not None and e is not None:
            messages = Shared(self.edge(x, e.narrow, narrow_g, graphs))
        nodes = Shared(self.node(x, messages, narrow_g, graphs, drops.edge))
        if self.global_ is not None and g is not None:
            update = self.global_(g.narrow, nodes, messages, graphs, drops.edge)
            g = Stream(*scaled_residual(g.wide, update, drops.global_))
        if e is not None and messages is not None:
            e = Stream(*scaled_residual(e.wide, messages.value, drops.edge))
        return nodes.value, e, g


class Attention(nn.Module):
    """Self-attention within molecules with a bias for every pair of atoms.

    Scores are divided by the root of the head size, as in the code (the report prints the node's).
    """

    def __init__(self, config: GPSPlusPlusConfig) -> None:
        super().__init__()
        width = config.node_width
        self.num_heads, self.scale = config.num_heads, config.scale
        self.rate = config.dropout.attention
        self.qkv = uniform_dense(width, 3 * width, width**-0.5)
        self.out = uniform_dense(width, width, width**-0.5)

    def forward(
        self, x: Shared, bias: Shared | None, graphs: Graphs, seed: Tensor | None
    ) -> Tensor:
        """Compute the update of the nodes: softmax(q k^T / sqrt(head) + B) v W."""
        found = attention_of(
            linear_of(x, self.qkv.weight, self.qkv.bias).unflatten(1, (3, self.num_heads, -1)),
            bias,
            graphs.graph_ptr,
            graphs.pair_ptr,
            self.scale,
            dropout=0.0 if seed is None else self.rate,
            seed=seed,
        )
        return linear(found.flatten(1), self.out.weight, self.out.bias)


class FeedForward(nn.Module):
    """``W2 Drop(GELU(W1 x))``."""

    def __init__(self, config: GPSPlusPlusConfig) -> None:
        super().__init__()
        width, self.rate = config.node_width, config.dropout.ffn
        self.first = uniform_dense(width, config.ffn_width, width**-0.5)
        self.second = uniform_dense(config.ffn_width, width, width**-0.5)

    def forward(self, x: Shared) -> Tensor:
        """Map rows."""
        hidden = linear_of(x, self.first.weight)
        hidden = norm_gelu(hidden, None, None, linear_bias=self.first.bias)
        hidden = F.dropout(hidden, self.rate, self.training)
        return linear(hidden, self.second.weight, self.second.bias)


class Block(nn.Module):
    """``m = LN(x + MPNN(x)) + LN(x + attention(x))``, then ``LN(m + FFN(m))``.

    The norm acts on the sum, as in the code; the report (eq. 9) prints it on the update alone.
    """

    def __init__(self, config: GPSPlusPlusConfig, layer: int) -> None:
        super().__init__()
        width = config.node_width
        self.mpnn = MessagePassing(config, layer) if config.mpnn else None
        self.mpnn_norm = nn.LayerNorm(width, EPS) if config.mpnn else None
        self.attention = Attention(config) if config.attention else None
        self.attention_norm = nn.LayerNorm(width, EPS) if config.attention else None
        self.ffn = FeedForward(config) if config.ffn else None
        self.ffn_norm = nn.LayerNorm(width, EPS) if config.ffn else None

    def forward(
        self,
        x: Tensor,
        e: Stream | None,
        g: Stream | None,
        bias: Tensor | None,
        graphs: Graphs,
        drops: Drops,
    ) -> tuple[Tensor, Stream | None, Stream | None, Tensor | None]:
        """Compute new nodes, edges and globals; return the bias for the next block."""
        nodes, pairs = Shared(x), None if bias is None else Shared(bias)
        updates: list[tuple[Tensor, nn.LayerNorm, Tensor | None]] = []
        if self.mpnn is not None and self.mpnn_norm is not None:
            update, e, g = self.mpnn(nodes, e, g, graphs, drops)
            updates.append((update, self.mpnn_norm, drops.node))
        if self.attention is not None and self.attention_norm is not None:
            update = self.attention(nodes, pairs, graphs, drops.seed)
            updates.append((update, self.attention_norm, drops.attention))
        merged = Shared(_added(nodes.value, updates))
        if self.ffn is not None and self.ffn_norm is not None:
            update = self.ffn(merged)
            merged.value = _added(merged.value, [(update, self.ffn_norm, drops.ffn)])
        return merged.value, e, g, None if pairs is None else pairs.value


def _added(x: Tensor, updates: list[tuple[Tensor, nn.LayerNorm, Tensor | None]]) -> Tensor:
    """Sum the norms of x plus each update."""
    return residual_norm(
        x,
        [update for update, _, _ in updates],
        [norm.weight for _, norm, _ in updates],
        [norm.bias for _, norm, _ in updates],
        scales=[scale for _, _, scale in updates],
        eps=EPS,
    )
