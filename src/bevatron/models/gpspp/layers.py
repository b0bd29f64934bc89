"""The block of GPS++: message passing and biased attention in parallel, then an FFN.

First linear layers are split by input. The matmul with an atom's features is computed once per
atom and gathered by its bonds, that with a molecule's once per molecule. Since every bond is
stored in both directions, the sum over senders into an atom equals the sum over receivers out of
it, and the two blocks of weights that act on it are added up. The weights are those of the plain
layers.

Inputs of several operators (atoms, messages, the bias) are returned by each for the next
(``_with_input``): their gradient comes back along the same path, and each accumulates its own.
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
from bevatron.kernels.molecule.linear import linear_with_input
from bevatron.kernels.molecule.molecule_attention import molecule_attention_with_bias
from bevatron.kernels.molecule.neighbour_sums import neighbour_sums_with_inputs
from bevatron.kernels.molecule.norm_gelu import Activation
from bevatron.kernels.molecule.segment_sum import segment_sum_with_input
from bevatron.models.gpspp.config import GPSPlusPlusConfig
from bevatron.models.gpspp.graphs import Drops, Graphs

EPS = 1e-3
"""Of all layer norms: the default of Keras, with which the published models were trained."""


def dense(width_in: int, width_out: int, *, bias: bool = True) -> nn.Linear:
    """Build a linear layer as Keras initialises it: Glorot's uniform weights, no bias."""
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

    The norm comes before the activation, as in the official code; the report (arXiv 2212.02229,
    eq. 13-14) prints it behind.

    Parameters
    ----------
    width_in, hidden, width_out
        Features.
    activation
        ``gelu`` (tanh form) or ``relu``.
    input_norm
        Normalise the input first.
    norm
        Normalise the hidden features.
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
        x
            A row per atom, if ``rows`` are given.
        rows
            Output of the first layer for the features of each molecule.
        graphs
            Goes with ``rows``.
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
        self, x: Tensor, e: Tensor, g: Tensor | None, graphs: Graphs
    ) -> tuple[Tensor, Tensor]:
        """Compute the messages, and pass the atoms on."""
        receiver, sender, edge, *rest = self.first.weight.split(self.widths, 1)
        assert self.norm is not None
        of_atoms, x = linear_with_input(x, torch.cat([receiver, sender]))
        hidden = bond_norm_gelu(
            linear(e, edge),
            of_atoms,
            graphs.bonds,
            self.norm.weight,
            self.norm.bias,
            linear_bias=self.first.bias,
            graph_rows=linear(g, rest[0]) if g is not None else None,
            graph=graphs.graph if g is not None else None,
            ptr=graphs.graph_ptr if g is not None else None,
            eps=EPS,
        )
        return linear(hidden, self.second.weight, self.second.bias), x


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
        x: Tensor,
        messages: Tensor | None,
        g: Tensor | None,
        graphs: Graphs,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the updates of atoms; pass atoms and messages on."""
        parts = list(self.first.weight.split(self.widths, 1))
        rows = linear(g, parts.pop()) if g is not None else None
        own = parts.pop()
        if messages is None:
            hidden = self._from_nodes(x, parts, own, graphs)
        else:
            hidden, x, messages = self._from_messages(x, messages, parts, own, graphs, scale)
        return self.after_first(hidden, rows, graphs), x, messages

    def _from_messages(
        self,
        x: Tensor,
        messages: Tensor,
        parts: list[Tensor],
        own: Tensor,
        graphs: Graphs,
        scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        step = 2 if self.adjacent else 1
        weights = parts[0::step]
        sums, handed_on, near_x = neighbour_sums_with_inputs(
            messages,
            x if self.adjacent else None,
            graphs.bonds,
            scale=scale,
            outgoing=self.sides == 2,
            own=self.adjacent,
        )
        if not self.adjacent:
            return linear(sums, torch.cat(weights, 1)) + linear(x, own), x, handed_on
        # The neighbours are the same whichever way the bonds are walked.
        near = parts[1] + parts[3] if self.sides == 2 else parts[1]
        assert near_x is not None
        return linear(sums, torch.cat([*weights, near, own], 1)), near_x, handed_on

    def _from_nodes(self, x: Tensor, parts: list[Tensor], own: Tensor, graphs: Graphs) -> Tensor:
        """Without edge features a sum over bonds is of neighbours, or the atom times its degree."""
        near = neighbour_sums(None, x, graphs.bonds)
        times = x * graphs.degree.to(x.dtype)[:, None]
        step = 3 if self.adjacent else 2
        repeated, others = parts[0], [*parts[1:step]]
        if self.sides == 2:
            # Of an outgoing edge the receiver, which comes first, is the neighbour.
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
        nodes: Tensor,
        messages: Tensor | None,
        graphs: Graphs,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sum up each molecule's updates, and its messages times their factors; pass both on."""
        of_nodes, nodes = segment_sum_with_input(nodes, graphs.graph_ptr)
        read = [g, of_nodes.to(g.dtype)]
        if messages is not None:
            of_edges, messages = segment_sum_with_input(messages, graphs.edge_ptr, scale)
            read.append(of_edges.to(g.dtype))
        return super().forward(torch.cat(read, 1)), nodes, messages


class Stream(NamedTuple):
    """Features of edges or of molecules, a residual stream that no norm bounds.

    Attributes
    ----------
    wide
        Accumulated in float32 if matmuls are in 16 bits.
    narrow
        The same in the dtype of matmuls, which read it.
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
        self, x: Tensor, e: Stream | None, g: Stream | None, graphs: Graphs, drops: Drops
    ) -> tuple[Tensor, Tensor, Stream | None, Stream | None]:
        """Compute the update of nodes, and the new edges and globals; pass the nodes on."""
        narrow_g = None if g is None else g.narrow
        messages = None
        if self.edge is not None and e is not None:
            messages, x = self.edge(x, e.narrow, narrow_g, graphs)
        nodes, x, messages = self.node(x, messages, narrow_g, graphs, drops.edge)
        if self.global_ is not None and g is not None:
            update, nodes, messages = self.global_(g.narrow, nodes, messages, graphs, drops.edge)
            g = Stream(*scaled_residual(g.wide, update, drops.global_))
        if e is not None and messages is not None:
            e = Stream(*scaled_residual(e.wide, messages, drops.edge))
        return nodes, x, e, g


class Attention(nn.Module):
    """Self-attention within molecules with a bias for every pair of atoms.

    Scores are divided by the root of a head's size, as in the code (the report prints that of the
    node's).
    """

    def __init__(self, config: GPSPlusPlusConfig) -> None:
        super().__init__()
        width = config.node_width
        self.num_heads, self.scale = config.num_heads, config.scale
        self.rate = config.dropout.attention
        self.qkv = uniform_dense(width, 3 * width, width**-0.5)
        self.out = uniform_dense(width, width, width**-0.5)

    def forward(
        self, x: Tensor, bias: Tensor | None, graphs: Graphs, seed: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the update of the nodes; pass nodes and bias on."""
        qkv, x = linear_with_input(x, self.qkv.weight, self.qkv.bias)
        found, bias = molecule_attention_with_bias(
            qkv.unflatten(1, (3, self.num_heads, -1)),
            None,
            None,
            bias,
            graphs.graph_ptr,
            graphs.pair_ptr,
            self.scale,
            dropout=0.0 if seed is None else self.rate,
            seed=seed,
        )
        return linear(found.flatten(1), self.out.weight, self.out.bias), x, bias


class FeedForward(nn.Module):
    """``W2 Drop(GELU(W1 x))``."""

    def __init__(self, config: GPSPlusPlusConfig) -> None:
        super().__init__()
        width, self.rate = config.node_width, config.dropout.ffn
        self.first = uniform_dense(width, config.ffn_width, width**-0.5)
        self.second = uniform_dense(config.ffn_width, width, width**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map rows, and pass them on."""
        hidden, x = linear_with_input(x, self.first.weight)
        hidden = norm_gelu(hidden, None, None, linear_bias=self.first.bias)
        hidden = F.dropout(hidden, self.rate, self.training)
        return linear(hidden, self.second.weight, self.second.bias), x


class Block(nn.Module):
    """``m = LN(x + MPNN(x)) + LN(x + attention(x))``, then ``LN(m + FFN(m))``.

    The norm is of the sum, as in the code; the report (eq. 9) prints it of the update alone.
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
        """Compute new nodes, edges and globals; pass the bias on."""
        updates: list[tuple[Tensor, nn.LayerNorm, Tensor | None]] = []
        if self.mpnn is not None and self.mpnn_norm is not None:
            update, x, e, g = self.mpnn(x, e, g, graphs, drops)
            updates.append((update, self.mpnn_norm, drops.node))
        if self.attention is not None and self.attention_norm is not None:
            update, x, bias = self.attention(x, bias, graphs, drops.seed)
            updates.append((update, self.attention_norm, drops.attention))
        nodes = _added(x, updates)
        if self.ffn is not None and self.ffn_norm is not None:
            update, nodes = self.ffn(nodes)
            nodes = _added(nodes, [(update, self.ffn_norm, drops.ffn)])
        return nodes, e, g, bias


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
