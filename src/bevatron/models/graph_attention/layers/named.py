"""Layers with their own kernels, each also a formula with which tests compare it."""

from collections.abc import Mapping
from typing import Literal, TypedDict, Unpack

import torch
from torch import nn

from bevatron.errors import ConfigError
from bevatron.models.graph_attention.formula.expression import Expression
from bevatron.models.graph_attention.formula.layer import Layer
from bevatron.models.graph_attention.formula.planner import Order
from bevatron.models.graph_attention.graph_layer import Activation, Combine, GraphLayer
from bevatron.models.graph_attention.matrix import Attends


class LayerOptions(TypedDict, total=False):
    """Arguments common to all layers.

    Attributes
    ----------
    heads, combine
        Heads with weights of their own, 1 by default, and whether they are concatenated (the
        default) or averaged.
    bias : add a learned vector after the aggregation
    inner_bias : add a learned vector to X itself, before the aggregation
    activation : applied to the result
    input_dropout
        Probability that an element of H is dropped while training, drawn for each head separately.
    own_glorot : initialise each head as a layer of its own
    """

    heads: int
    combine: Combine
    bias: bool
    inner_bias: bool
    activation: Activation | None
    input_dropout: float
    own_glorot: bool


class NamedLayer(GraphLayer):
    """A layer that calls its kernel directly; `formula` and `explain` are of the same layer.

    Parameters
    ----------
    inputs, outputs, phi : see `GraphLayer`
    learned, initial
        Shapes of the parameters of each head's scores, and initial values of learned scalars, by
        name.
    options : see `LayerOptions`
    """

    order: Order | Literal["auto"] = "auto"
    """Order of the formula: Phi or the aggregation first."""

    value_dropout = 0.0

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        learned: Mapping[str, tuple[int, ...]] | None = None,
        initial: Mapping[str, float] | None = None,
        phi: nn.Module | Literal["linear"] | None = "linear",
        **options: Unpack[LayerOptions],
    ) -> None:
        heads = options.get("heads", 1)
        shapes = {name: (heads, *shape) for name, shape in (learned or {}).items()}
        super().__init__(inputs, outputs, learned=shapes, initial=initial, phi=phi, **options)

    @property
    def psi(self) -> Expression:
        """The matrix of edge weights as a formula."""
        raise NotImplementedError

    def attends(self, *, weighted: bool = False) -> Attends:
        """Return the layer's requirement on a partition, with or without edge values."""
        return self.formula().attends(weighted=weighted)

    def formula(self) -> Layer:
        """Return the layer as a planned formula with the same parameters."""
        # On the meta device, so that nothing is drawn from the random number generator.
        with torch.device("meta"):
            layer = Layer(
                *(self.inputs, self.outputs),
                psi=self.psi,
                phi=None if self.weight is None else "linear",
                activation=self.activation,
                heads=self.heads,
                combine=self.combine,
                bias=self.bias is not None,
                inner_bias=self.inner_bias is not None,
                order=self.order,
                value_dropout=self.value_dropout,
                input_dropout=self.input_dropout,
                own_glorot=self.own_glorot,
            )
        layer.weight, layer.bias, layer.inner_bias = self.weight, self.bias, self.inner_bias
        layer.learned = self.learned
        return layer.train(self.training)

    def explain(self, *, weighted: bool = False) -> str:
        """Explain how the layer is computed on graphs with or without edge values, and why."""
        return self.formula().explain(weighted=weighted)

    def extra_repr(self) -> str:
        """Describe the layer when it is printed."""
        return f"{self.inputs} -> {self.heads} x {self.outputs}, psi={self.psi}"


def check_attention(slope: float, dropout: float) -> None:
    """Check the arguments of additive scores; ConfigError if a number is out of range."""
    if not 0.0 <= slope <= 1.0:
        raise ConfigError(f"slope: expected 0 to 1, got {slope}")
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(f"attention_dropout: expected 0 <= p < 1, got {dropout}")
