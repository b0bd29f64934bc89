"""Hyper-parameters of node classifiers made of graph layers, frozen and checked."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from tyro.conf import Suppress

from bevatron.errors import ConfigError
from bevatron.models.common.hyper_parameters import from_preset

Kind = Literal[
    "gat", "gatv2", "agnn", "agnn_paper", "va", "va_scaled", "va_softmax", "gcn", "sgc", "gin"
]
LabelKind = Literal["classes", "yes_no"]


@dataclass(frozen=True)
class GraphAttentionConfig:
    """Everything that defines a node classifier apart from its weights.

    Attributes
    ----------
    inputs, outputs
        Width of the node features and number of logits: classes, or yes-or-no labels. Filled from
        the data; see `with_data`.
    labels
        ``classes``: one of several per node, softmax. ``yes_no``: any of several, each with its
        own sigmoid; a single one is binary classification.
    layer
        The layer: ``gat``, ``gatv2``, ``agnn`` (softmax and beta, 2018), ``agnn_paper`` (SC 2023),
        ``va``, ``va_scaled``, ``va_softmax``, ``gcn``, ``sgc``, ``gin``.
    num_layers
        Number of layers (of ``sgc``: hops).
    stack
        ``plain``: each layer's result is the next one's input; the last gives the logits (agnn,
        which has no weights: a linear map before and one after). ``residual``: a linear map, then
        x + MLP(layer(norm(x))) repeated, a norm and a linear map, as in heterophilous-graphs
        (Platonov et al., arXiv 2302.11640).
    hidden
        Width between layers; for gat and gatv2 in a plain stack, of one head.
    heads
        Heads of the hidden layers, concatenated.
    out_heads
        Heads of a plain stack's last layer, averaged.
    residual
        Add the input of each hidden layer of a plain stack, through a matrix where widths differ.
    norm
        Norm of the hidden features: ``none``, ``layer`` or ``batch``.
    activation
        Activation between layers.
    dropout
        Dropout rate of features.
    attention_dropout
        Dropout rate of edges; gat and gatv2.
    value_dropout
        Dropout rate of the projected features that attention sums, but not of those in the scores;
        gat.
    head_masks
        Each head draws its own mask of a layer's inputs, as in the code of gat's authors;
        otherwise all heads of a layer share one. Plain stacks of gat.
    head_glorot
        Initialise each head as a layer of its own, as in that code; gat.
    slope
        Negative slope of the leaky ReLU in scores.
    mlp_factor
        Hidden width of a residual stack's MLP over ``hidden``; 0 = no MLP.
    self_loops
        Add an edge from each node to itself where there is none.
    first_beta
        ``fixed``: agnn's first beta stays 0, as on Cora.

    Raises
    ------
    ConfigError
        If a value is out of its range.

    Examples
    --------
    >>> GraphAttentionConfig.preset("gat-pubmed").out_heads
    8
    """

    inputs: Suppress[int] = 0
    outputs: Suppress[int] = 0
    labels: Suppress[LabelKind] = "classes"
    layer: Kind = "gat"
    num_layers: int = 2
    stack: Literal["plain", "residual"] = "plain"
    hidden: int = 8
    heads: int = 8
    out_heads: int = 1
    residual: bool = False
    norm: Literal["none", "layer", "batch"] = "none"
    activation: Literal["relu", "elu", "gelu", "tanh"] = "elu"
    dropout: float = 0.6
    attention_dropout: float = 0.6
    value_dropout: float = 0.0
    head_masks: bool = False
    head_glorot: bool = False
    slope: float = 0.2
    mlp_factor: float = 1.0
    self_loops: bool = True
    first_beta: Literal["learned", "fixed"] = "learned"

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "heads", "out_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("dropout", "attention_dropout", "value_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name}: expected 0 <= p < 1, got {getattr(self, name)}")
        if self.value_dropout and self.layer != "gat":
            raise ConfigError(f"value_dropout: is of gat, the layer is {self.layer}; leave it out")
        for name in ("head_masks", "head_glorot"):
            if getattr(self, name) and (self.layer != "gat" or self.stack != "plain"):
                raise ConfigError(f"{name}: is of plain stacks of gat; leave it out")
        if not 0.0 <= self.slope <= 1.0:
            raise ConfigError(f"slope: expected 0 to 1, got {self.slope}")
        if self.mlp_factor < 0:
            raise ConfigError(f"mlp_factor: expected at least 0, got {self.mlp_factor}")
        multi_head = self.layer in {"gat", "gatv2"}
        if self.stack == "residual" and multi_head and self.hidden % self.heads:
            raise ConfigError(
                f"hidden: {self.hidden} cannot be shared by heads: {self.heads} in a residual "
                "stack; make it a multiple"
            )
        if self.stack == "residual" and self.layer == "sgc":
            raise ConfigError("stack: sgc is one linear map, it has no residual stack; use gcn")

    def with_data(self, *, inputs: int, outputs: int, labels: LabelKind = "classes") -> Self:
        """Return a copy with the entries that depend on the data."""
        return dataclasses.replace(self, inputs=inputs, outputs=outputs, labels=labels)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return the configuration of a published recipe, see `PRESETS`, with changes.

        Raises ConfigError if there is no such preset, or no such entry.
        """
        return from_preset(cls, PRESETS, name, changes)


_AGNN: dict[str, Any] = {
    "layer": "agnn",
    "hidden": 16,
    "activation": "relu",
    "dropout": 0.5,
    "heads": 1,
}
_RESIDUAL: dict[str, Any] = {
    "stack": "residual",
    "num_layers": 5,
    "hidden": 512,
    "heads": 8,
    "norm": "layer",
    "activation": "gelu",
    "dropout": 0.2,
    "attention_dropout": 0.0,
}
_GAT: dict[str, Any] = {"value_dropout": 0.6}
PRESETS: dict[str, dict[str, Any]] = {
    "gat-cora": _GAT,
    "gat-citeseer": _GAT,
    "gat-pubmed": {**_GAT, "out_heads": 8, "head_masks": True, "head_glorot": True},
    "agnn-cora": {**_AGNN, "num_layers": 2, "first_beta": "fixed"},
    "agnn-citeseer": {**_AGNN, "num_layers": 3},
    "agnn-pubmed": {**_AGNN, "num_layers": 4},
    "gat-heterophilous": _RESIDUAL,
    "gcn-heterophilous": {**_RESIDUAL, "layer": "gcn", "heads": 1},
}
"""Published recipes: GAT (ICLR 2018), AGNN (2018), heterophilous-graphs (2023).

Those of GAT drop what the authors' code drops, on all graphs: 0.6 of the inputs, of the normalised
coefficients and of the projected features that are summed. In that code each head draws its own
mask of the inputs and is initialised as a layer of its own. Here only PubMed does so, where it
improves validation slightly; on the other graphs all heads of a layer share one mask.
"""
