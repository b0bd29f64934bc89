"""The heads of a model: properties, reconstructed features, directions of noise."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bevatron.data.samples import MoleculeBatch
from bevatron.kernels import linear, segment_sum
from bevatron.models.gpspp.config import GPSPlusPlusConfig
from bevatron.models.gpspp.corruption import Inputs
from bevatron.models.gpspp.encoders import padded, pair_rows
from bevatron.models.gpspp.graphs import Graphs
from bevatron.models.gpspp.layers import MLP, dense, uniform_dense


class Decoder(nn.Module):
    """Properties of a molecule from the sum over its atoms, in at least float32.

    16 bits could not distinguish labels a hundredth of a standard deviation apart.
    """

    def __init__(self, config: GPSPlusPlusConfig) -> None:
        super().__init__()
        self.targets = config.targets
        self.reads_globals = config.decoder == "nodes_and_global"
        width = config.node_width + config.global_width * self.reads_globals
        outputs = sum(target.width for target in config.targets)
        self.mlp = MLP(width, config.decoder_width or config.node_width, outputs)
        for name in ("mean", "std"):
            numbers = [getattr(t, name) for t in config.targets for _ in range(t.width)]
            values = torch.tensor(numbers, dtype=torch.float64)
            self.register_buffer(name, values, persistent=False)
        self.mean: Tensor
        self.std: Tensor

    def forward(self, nodes: Tensor, globals_: Tensor | None, graphs: Graphs) -> dict[str, Tensor]:
        """Compute ``graph_embedding``, ``raw`` and ``prediction``; see `GPSPlusPlus.forward`."""
        wide = self.mlp.first.weight.dtype
        with torch.autocast(nodes.device.type, enabled=False):
            pooled = segment_sum(nodes.to(wide), graphs.graph_ptr)
            if self.reads_globals and globals_ is not None:
                pooled = torch.cat([pooled, globals_.to(wide)], 1)
            raw = self.mlp(pooled)
        return {"graph_embedding": pooled, "raw": raw, "prediction": self.in_units(raw)}

    def in_units(self, raw: Float[Tensor, "G W"]) -> Float[Tensor, "G T"]:
        """Convert the network's outputs to values in units, probabilities and classes."""
        columns, start = [], 0
        scaled = raw * self.std.to(raw) + self.mean.to(raw)
        for target in self.targets:
            own = slice(start, start + target.width)
            if target.kind == "regression":
                columns.append(scaled[:, start])
            elif target.kind == "binary":
                columns.append(raw[:, start].sigmoid())
            else:
                columns.append(raw[:, own].argmax(1).to(raw.dtype))
            start += target.width
        return torch.stack(columns, 1)


class NoiseHeads(nn.Module):
    """Reconstruct the features of atoms and bonds from their last states (noisy nodes, edges)."""

    def __init__(self, config: GPSPlusPlusConfig) -> None:
        super().__init__()
        features = config.features
        sizes = sum(features.atom_sizes), sum(features.bond_sizes)
        self.nodes = dense(config.node_width, sizes[0]) if config.noisy_nodes else None
        self.edges = dense(config.edge_width, sizes[1]) if config.noisy_edges else None

    def forward(self, nodes: Tensor, edges: Tensor | None) -> dict[str, Tensor]:
        """Compute the logits, all features of a row concatenated."""
        logits: dict[str, Tensor] = {}
        if self.nodes is not None:
            logits["node_logits"] = _logits(nodes, self.nodes)
        if self.edges is not None and edges is not None:
            logits["edge_logits"] = _logits(edges, self.edges)
        return logits


def _logits(x: Tensor, layer: nn.Linear) -> Tensor:
    return linear(x, padded(layer.weight), padded(layer.bias))[:, : layer.out_features]


class DenoisingHead(nn.Module):
    r"""Point from noisy positions along the noise: one more attention, over directions.

    .. math::

        u_i^c = w_c \cdot \operatorname{concat}_h \sum_j A_{ijh} \Delta_{ij}^c v_{jh} + b_c, \qquad
        \Delta_{ij} = \frac{r_j - r_i}{|r_j - r_i| + 10^{-5}}

    for each axis c (arXiv 2302.02947, eq. 62-64, in the form of Transformer-M). Computed in
    float32 at least, pair by pair; the value's product with w comes first, so that a pair needs
    three numbers per head.
    """

    def __init__(self, config: GPSPlusPlusConfig) -> None:
        super().__init__()
        width = config.node_width
        self.num_heads, self.scale, self.rate = config.num_heads, config.scale, 0.1
        self.qkv = uniform_dense(width, 3 * width, width**-0.5)
        self.axes = uniform_dense(width, 3, width**-0.5)

    def forward(
        self,
        nodes: Float[Tensor, "N C"],
        bias: Float[Tensor, "P H"] | None,
        batch: MoleculeBatch,
        inputs: Inputs,
        graphs: Graphs,
    ) -> Float[Tensor, "N 3"]:
        """Compute a vector for every atom."""
        wide = self.qkv.weight.dtype
        with torch.autocast(nodes.device.type, enabled=False):
            first, second, _ = batch.pairs()
            qkv = self.qkv(nodes.to(wide)).unflatten(1, (3, self.num_heads, -1))
            q, k, v = qkv.unbind(1)
            scores = (q[first] * k[second]).sum(-1) * self.scale
            if bias is not None:
                scores = scores + bias.to(wide)
            weights = self._softmax(scores, first, graphs)
            weights = nn.functional.dropout(weights, self.rate, self.training)
            axes = self.axes.weight.view(3, self.num_heads, -1)
            values = torch.einsum("nhd,chd->nhc", v, axes)
            steps = (inputs.positions[second] - inputs.positions[first]).to(wide)
            steps = steps / (torch.linalg.vector_norm(steps, dim=-1, keepdim=True) + 1e-5)
            moved = torch.einsum("ph,phc->pc", weights, values[second]) * steps
            return segment_sum(moved, pair_rows(graphs)) + self.axes.bias

    def _softmax(self, scores: Tensor, first: Tensor, graphs: Graphs) -> Tensor:
        """Normalise over the pairs of each atom."""
        index = first[:, None].expand_as(scores)
        top = scores.new_full((len(graphs.graph), scores.shape[1]), -torch.inf)
        top = top.scatter_reduce(0, index, scores.detach(), "amax")
        weights = torch.exp(scores - top[first])
        sums = segment_sum(weights, pair_rows(graphs)).clamp(min=1e-30)
        return weights / sums[first]
