"""A layer with a kernel of its own, which is also a formula that its tests compare it with."""

from typing import Literal

import torch

from bevatron.errors import ConfigError
from bevatron.models.graph_attention.formula.expression import Expression
from bevatron.models.graph_attention.formula.layer import Layer
from bevatron.models.graph_attention.formula.planner import Order
from bevatron.models.graph_attention.graph_layer import GraphLayer


class NamedLayer(GraphLayer):
    """A layer that calls its kernel directly; `formula` and `explain` are of the same layer."""

    order: Order | Literal["auto"] = "auto"
    """What the formula computes first, Phi or the aggregation."""

    value_dropout = 0.0

    @property
    def psi(self) -> Expression:
        """The matrix of edge weights as a formula."""
        raise NotImplementedError

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
    """Check what kernels of additive scores take.

    Raises
    ------
    ConfigError
        If a number is out of its range.
    """
    if not 0.0 <= slope <= 1.0:
        raise ConfigError(f"slope: expected 0 to 1, got {slope}")
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(f"attention_dropout: expected 0 <= p < 1, got {dropout}")
