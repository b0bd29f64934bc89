"""Indices of a batch's atoms, bonds and pairs, and the dropout masks of a step."""

from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bevatron.data.samples import MoleculeBatch
from bevatron.kernels import Bonds
from bevatron.models.gpspp.config import GPSPlusPlusConfig


@dataclass(frozen=True)
class Graphs:
    """Indices of the atoms, bonds and pairs of a batch.

    Attributes
    ----------
    bonds : see `bevatron.kernels.molecule.bonds`
    graph, edge_graph : the molecule of each atom and directed edge
    graph_ptr, edge_ptr, pair_ptr : offsets of the atoms, edges and pairs of each molecule
    degree : bonds of each atom
    """

    bonds: Bonds
    graph: Int[Tensor, " N"]
    edge_graph: Int[Tensor, " E"]
    graph_ptr: Int[Tensor, " _"]
    edge_ptr: Int[Tensor, " _"]
    pair_ptr: Int[Tensor, " _"]
    degree: Int[Tensor, " N"]

    @classmethod
    def of(cls, batch: MoleculeBatch) -> Self:
        """Read the indices of a batch."""
        senders, receivers = batch.edges.unbind()
        return cls(
            Bonds(senders, receivers, batch.incoming, batch.incoming_ptr),
            batch.graph,
            batch.edge_graph,
            batch.graph_ptr,
            # Edges are grouped by molecule, as atoms are.
            batch.incoming_ptr[batch.graph_ptr],
            batch.pair_ptr,
            batch.degree,
        )


@dataclass(frozen=True)
class Drops:
    """Dropout masks of one block: a factor per row, 0 or 1 / (1 - rate); None = no dropout.

    Attributes
    ----------
    node, edge, global_ : dropout of the updates of message passing
    attention, ffn : dropout of their updates, [N], one value per molecule
    seed : seed of the dropout of attention probabilities
    """

    node: Float[Tensor, " N"] | None = None
    edge: Float[Tensor, " E"] | None = None
    global_: Float[Tensor, " G"] | None = None
    attention: Float[Tensor, " N"] | None = None
    ffn: Float[Tensor, " N"] | None = None
    seed: Int[Tensor, ""] | None = None


@torch.no_grad()
def draw_drops(config: GPSPlusPlusConfig, graphs: Graphs) -> list[Drops]:
    """Draw the dropout masks of all blocks for one step, in a few kernel launches."""
    layers, device = config.num_layers, graphs.graph.device
    rates, sizes = config.dropout, (len(graphs.graph), graphs.bonds.num_edges)
    num_graphs = len(graphs.graph_ptr) - 1

    def rows(count: int, rate: float) -> list[Tensor | None]:
        if rate == 0.0:
            return [None] * layers
        kept = torch.rand(layers, count, device=device) >= rate
        return list((kept / (1.0 - rate)).unbind())

    node, edge = rows(sizes[0], rates.node), rows(sizes[1], rates.edge)
    global_ = rows(num_graphs, rates.global_)
    whole: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * layers
    if rates.graph > 0.0 and num_graphs:
        draws = torch.rand(layers, 2, num_graphs, device=device)[:, :, graphs.graph]
        rate = torch.arange(layers, device=device) * config.graph_dropout(1)
        kept = (draws >= rate[:, None, None]) / (1.0 - rate)[:, None, None]
        whole[1:] = [(one[0], one[1]) for one in kept[1:]]
    seeds: list[Tensor | None] = [None] * layers
    if rates.attention > 0.0:
        seeds = list(torch.randint(0, 2**62, (layers,), device=device).unbind())
    return [
        Drops(node[i], edge[i], global_[i], *whole[i], seeds[i])  # by layer
        for i in range(layers)
    ]
