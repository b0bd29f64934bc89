"""Node classification with stacks of graph layers.

A batch's graph is converted to a `Csr` once (and cached with the graph); features may be dense or
sparse. Plain stacks are those of the GAT and AGNN papers, residual stacks those of
heterophilous-graphs. The number of graphs in a batch does not matter: several are the diagonal
blocks of one, so learning may be transductive or inductive.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevatron.data.samples import Graph, GraphBatch
from bevatron.data.samples.graphs import SparseRows
from bevatron.errors import ConfigError, DataError
from bevatron.kernels.graph.csr import Csr
from bevatron.models.graph_attention.config import GraphAttentionConfig
from bevatron.models.graph_attention.graph_layer import (
    Activation,
    Features,
    GraphLayer,
    dense_features,
    not_compiled,
    sparse_product,
    stored_values,
)
from bevatron.models.graph_attention.layers import Sgc, agnn, agnn_paper, gat, gatv2, gcn, gin, va
from bevatron.models.graph_attention.matrix import Attends, Matrix

ACTIVATIONS: Mapping[str, Activation] = {
    "relu": torch.relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
}


class NodeClassifier(nn.Module):
    """Logits for every node of a batch.

    Raises ConfigError if ``inputs`` or ``outputs`` are not set.

    Parameters
    ----------
    config : complete, widths of the data included
    dtype : floating-point type of the weights

    Examples
    --------
    >>> config = GraphAttentionConfig().with_data(inputs=12, outputs=3)
    >>> sum(p.numel() for p in NodeClassifier(config).parameters())
    1161
    """

    def __init__(self, config: GraphAttentionConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if config.inputs < 1 or config.outputs < 1:
            raise ConfigError(
                f"inputs: {config.inputs}, outputs: {config.outputs}: set them with with_data(...)"
            )
        self.config = config
        stack = ResidualStack if config.stack == "residual" else _plain_stack(config)
        self.stack = stack(config)
        self.to(dtype or torch.get_default_dtype())

    def forward(self, batch: GraphBatch) -> dict[str, Tensor]:
        """Compute ``logits``, [N, outputs], at least float32."""
        if batch.graph.num_features != self.config.inputs:
            raise DataError(
                f"the graph has {batch.graph.num_features} features per node, the model was made "
                f"for {self.config.inputs}"
            )
        csr = graph_matrix(batch.graph, self_loops=self.config.self_loops)
        features = graph_features(batch.graph)
        logits = self.stack(csr, features)
        return {"logits": logits.to(torch.promote_types(logits.dtype, torch.float32))}

    def attends(self, *, weighted: bool = False) -> Attends:
        """Return the layers' requirement on a partition, with or without edge values."""
        layers = [m for m in self.modules() if isinstance(m, GraphLayer)]
        found = {layer.attends(weighted=weighted) for layer in layers}
        return next(needs for needs in ("rows", "dot", "gat") if needs in found)

    def explain(self, *, weighted: bool = False) -> str:
        """Explain for every layer how it is computed, and why."""
        found = [(n, m) for n, m in self.named_modules() if isinstance(m, GraphLayer)]
        return "\n\n".join(f"{name}\n{m.explain(weighted=weighted)}" for name, m in found)


@not_compiled
def graph_matrix(graph: Graph, *, self_loops: bool) -> Matrix:
    """Return a graph's matrix, row = receiver, built on first use.

    For a part of a partitioned graph this is its `DistributedGraph`; self loops were decided when
    it was partitioned.

    Parameters
    ----------
    graph : edges without duplicates
    self_loops : add (i, i), with value 1, for every node that has no such edge
    """

    def build(graph: Graph) -> Matrix:
        sender, receiver = graph.edges.unbind(0)
        values = graph.edge_values
        if self_loops:
            has_loop = torch.zeros(graph.num_nodes, dtype=torch.bool, device=sender.device)
            has_loop[sender[sender == receiver].long()] = True
            loops = (~has_loop).nonzero()[:, 0].to(sender.dtype)
            sender, receiver = torch.cat([sender, loops]), torch.cat([receiver, loops])
            if values is not None:
                values = torch.cat([values, values.new_ones(len(loops))])
        return Csr.from_coo(receiver, sender, (graph.num_nodes, graph.num_nodes), values)

    return graph.derived(("csr", self_loops), build)


@not_compiled
def graph_features(graph: Graph) -> Features:
    """Return a graph's features; sparse ones as a cached matrix in both orders."""
    if isinstance(graph.features, Tensor):
        return graph.features

    def build(graph: Graph) -> Csr:
        rows = cast("SparseRows", graph.features)
        return Csr.from_csr(rows.ptr, rows.columns, rows.shape, rows.values)

    return graph.derived("features", build)


class FeatureDropout(nn.Module):
    """Dropout of dense or sparse features; it affects only stored values of sparse ones."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, features: Tensor | Csr) -> Tensor | Csr:
        """Drop entries with probability p while training."""
        if not self.training or self.p == 0.0:
            return features
        if isinstance(features, Tensor):
            return F.dropout(features, self.p)
        return features.with_values(F.dropout(stored_values(features), self.p))


class FeatureLinear(nn.Linear):
    """A linear map of dense or sparse features."""

    def forward(self, features: Tensor | Csr) -> Tensor:  # noqa: D102  see torch.nn.Linear
        if isinstance(features, Tensor):
            return super().forward(features)
        product: Tensor = _sparse_product(features, self.weight.T.contiguous())
        return product if self.bias is None else product + self.bias


@not_compiled
def _sparse_product(features: Csr, matrix: Tensor) -> Tensor:
    return sparse_product(features, matrix)


class PlainStack(nn.Module):
    """A chain of layers with dropout before each; the last one computes the logits."""

    def __init__(self, config: GraphAttentionConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = FeatureDropout(config.dropout)
        self.heads_drop = config.head_masks
        multi_head = config.layer in {"gat", "gatv2"}
        width = config.inputs
        layers, skips, norms = [], [], []
        for number in range(config.num_layers):
            last = number == config.num_layers - 1
            outputs = config.outputs if last else config.hidden
            layers.append(_layer(config, width, outputs, last=last))
            after = outputs if last or not multi_head else outputs * config.heads
            skips.append(_skip(width, after) if config.residual and not last else None)
            norms.append(_norm("none" if last else config.norm, after))
            width = after
        self.layers, self.norms = nn.ModuleList(layers), nn.ModuleList(norms)
        self.skips = nn.ModuleList(nn.Identity() if s is None else s for s in skips)
        self._has_skip = [s is not None for s in skips]

    def forward(self, csr: Matrix, features: Features) -> Tensor:
        """Compute logits."""
        x = features
        for number, layer in enumerate(self.layers):
            dropped = x if self.heads_drop else self.dropout(x)
            result = layer(csr, dropped)
            if self._has_skip[number]:
                skipped = self.dropout(x) if self.heads_drop else dropped
                result = result + self.skips[number](dense_features(skipped))
            if number < len(self.layers) - 1:
                result = self.activation(self.norms[number](result))
            x = result
        return dense_features(x)


class PropagationStack(nn.Module):
    """AGNN's: a linear map, weightless propagation by attention, a linear map."""

    def __init__(self, config: GraphAttentionConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = FeatureDropout(config.dropout)
        self.embed = FeatureLinear(config.inputs, config.hidden)
        fixed = [config.first_beta == "fixed" and n == 0 for n in range(config.num_layers)]
        self.layers = nn.ModuleList(
            agnn(config.hidden, beta=0.0 if is_fixed else 1.0, trained=not is_fixed)
            for is_fixed in fixed
        )
        self.norms = nn.ModuleList(_norm(config.norm, config.hidden) for _ in self.layers)
        self.residual = config.residual
        self.read_out = nn.Linear(config.hidden, config.outputs)
        for linear in (self.embed, self.read_out):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, csr: Matrix, features: Features) -> Tensor:
        """Compute logits."""
        x = self.activation(self.embed(self.dropout(features)))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            result = norm(layer(csr, x))
            x = x + result if self.residual else result
        return cast("Tensor", self.read_out(self.dropout(x)))


class SgcStack(nn.Module):
    """One linear map of features that are propagated over several hops."""

    def __init__(self, config: GraphAttentionConfig) -> None:
        super().__init__()
        self.dropout = FeatureDropout(config.dropout)
        self.layer = Sgc(config.inputs, config.outputs, hops=config.num_layers)

    def forward(self, csr: Matrix, features: Features) -> Tensor:
        """Compute logits."""
        return cast("Tensor", self.layer(csr, self.dropout(features)))


class ResidualStack(nn.Module):
    """A linear map, blocks x + MLP(layer(norm(x))), a norm and a linear map."""

    def __init__(self, config: GraphAttentionConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = FeatureDropout(config.dropout)
        self.embed = FeatureLinear(config.inputs, config.hidden)
        self.blocks = nn.ModuleList(ResidualBlock(config) for _ in range(config.num_layers))
        self.norm = _norm(config.norm, config.hidden)
        self.read_out = nn.Linear(config.hidden, config.outputs)

    def forward(self, csr: Matrix, features: Features) -> Tensor:
        """Compute logits."""
        x = self.activation(self.dropout(self.embed(features)))
        for block in self.blocks:
            x = block(csr, x)
        return cast("Tensor", self.read_out(self.norm(x)))


class ResidualBlock(nn.Module):
    """x + MLP(layer(norm(x)))."""

    def __init__(self, config: GraphAttentionConfig) -> None:
        super().__init__()
        width = config.hidden
        self.norm = _norm(config.norm, width)
        heads = config.heads if config.layer in {"gat", "gatv2"} else 1
        self.layer = _layer(config, width, width // heads, last=False)
        inner = round(width * config.mlp_factor)
        self.mlp = nn.Identity() if inner == 0 else nn.Sequential(
            nn.Linear(width, inner), nn.Dropout(config.dropout), nn.GELU(),
            nn.Linear(inner, width), nn.Dropout(config.dropout),
        )  # fmt: skip

    def forward(self, csr: Matrix, x: Tensor) -> Tensor:
        """Compute the block's result, [N, hidden]."""
        return cast("Tensor", x + self.mlp(self.layer(csr, self.norm(x))))


def _plain_stack(config: GraphAttentionConfig) -> type[nn.Module]:
    return {"agnn": PropagationStack, "sgc": SgcStack}.get(config.layer, PlainStack)


def _layer(config: GraphAttentionConfig, inputs: int, outputs: int, *, last: bool) -> GraphLayer:
    """Build a layer of the configured kind."""
    if config.layer in {"gat", "gatv2"}:
        options: dict[str, Any] = {
            "heads": config.out_heads if last else config.heads,
            "combine": "mean" if last else "concat",
            "slope": config.slope,
            "attention_dropout": config.attention_dropout,
        }
        if config.layer == "gatv2":
            return gatv2(inputs, outputs, **options)
        if config.head_masks:
            options["input_dropout"] = config.dropout
        return gat(
            *(inputs, outputs),
            value_dropout=config.value_dropout,
            own_glorot=config.head_glorot,
            **options,
        )
    if config.layer == "agnn":
        return agnn(inputs)
    if config.layer == "agnn_paper":
        return agnn_paper(inputs, outputs, bias=True)
    if config.layer == "gcn":
        return gcn(inputs, outputs)
    if config.layer == "gin":
        mlp = nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))
        return gin(mlp, inputs, outputs, trained=True)
    forms = {"va": "plain", "va_scaled": "scaled", "va_softmax": "softmax"}
    return va(inputs, outputs, form=forms[config.layer], bias=True)  # type: ignore[arg-type]


def _skip(inputs: int, outputs: int) -> nn.Module:
    return nn.Identity() if inputs == outputs else nn.Linear(inputs, outputs, bias=False)


def _norm(kind: str, width: int) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    return nn.LayerNorm(width) if kind == "layer" else nn.BatchNorm1d(width)
