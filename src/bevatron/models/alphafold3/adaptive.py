"""Norm and transition scaled and gated by a condition s (AlphaFold3, algorithms 25 and 26).

Legend: C channels of the rows, D of their condition, H hidden channels.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from bevatron.kernels import (
    add_norm,
    conditioned_transition,
    layer_norm,
    layer_norm_linear,
    linear,
    swiglu,
)
from bevatron.kernels.shared.chunked_linear import concatenated
from bevatron.kernels.shared.standing_weights import once
from bevatron.models.common.folding import LayerNorm, Linear

GATE_BIAS = -2.0
"""Initial bias of output gates: a new block hardly changes its input."""


class Condition(NamedTuple):
    """Precomputed values of a layer's condition.

    Attributes
    ----------
    norms : scale and shift, side by side, of each of its `AdaptiveNorm`
    gate : gate of its update
    """

    norms: tuple[Float[Tensor, "*condition _"], ...]
    gate: Float[Tensor, "*condition C"]

    def at(self, place: int) -> "Condition":
        """Return one of the rows along the axis of copies; the axis stays."""
        norms = tuple(norm.narrow(-3, place, 1) for norm in self.norms)
        return Condition(norms, self.gate.narrow(-3, place, 1))


def conditions_of(s: Float[Tensor, "*condition D"], layers: Sequence[nn.Module]) -> list[Condition]:
    """Compute the conditions of many layers without gradients, reading s twice in total.

    A norm's weight is folded into the layers behind it, so norms differ only in the matmul.

    Parameters
    ----------
    layers : each has ``norms`` and an ``output_gate``, all of the same widths
    """
    norms = [cast("tuple[AdaptiveNorm, ...]", layer.norms) for layer in layers]
    gates = [cast("Linear", layer.output_gate) for layer in layers]
    every = [norm for some in norms for norm in some]
    made_of = [weight for norm in every for weight in norm.parameters()]
    dtype = s.dtype
    weight = once(lambda: _joint_weight(every).to(dtype), *made_of, to=dtype)
    bias = once(lambda: _joint_bias(every).to(dtype), *made_of, to=dtype)
    parts = iter(layer_norm_linear(s, None, None, weight, bias).chunk(len(every), -1))
    made_of = [weight for gate in gates for weight in gate.parameters()]
    weight = once(lambda: torch.cat([g.weight for g in gates]).to(dtype), *made_of, to=dtype)
    bias = once(lambda: torch.cat([g.bias for g in gates]).to(dtype), *made_of, to=dtype)
    opened = linear(s.reshape(-1, s.shape[-1]), weight, bias).sigmoid_()
    by_layer = opened.view(*s.shape[:-1], -1).chunk(len(gates), -1)
    return [
        Condition(tuple(next(parts) for _ in some), gate)
        for some, gate in zip(norms, by_layer, strict=True)
    ]


def _joint_weight(norms: "Sequence[AdaptiveNorm]") -> Float[Tensor, "_ D"]:
    """Join scales and shifts of conditions that are normalised but not scaled, norm by norm."""
    layers = torch.cat([layer.weight for n in norms for layer in (n.scale, n.shift)])
    return folded(layers, [norm.condition_norm.weight for norm in norms])


def _joint_bias(norms: "Sequence[AdaptiveNorm]") -> Float[Tensor, "_"]:
    scales = torch.stack([norm.scale.bias for norm in norms])
    return F.pad(scales, (0, scales.shape[-1])).flatten()


def folded(
    layers: Float[Tensor, "_ C"], norms: Sequence[Float[Tensor, "C"]]
) -> Float[Tensor, "_ C"]:
    """Fold each norm's weight into its share of the rows of ``layers``, the joint layers behind."""
    weights = torch.stack([*norms])[:, None]
    return (layers.view(len(norms), -1, layers.shape[-1]) * weights).flatten(0, 1)


def output_gate(condition_width: int, width: int) -> Linear:
    """Build the linear layer whose sigmoid gates an update: weights 0, bias `GATE_BIAS`."""
    layer = Linear(condition_width, width, init="final")
    nn.init.constant_(layer.bias, GATE_BIAS)
    return layer


class AdaptiveNorm(nn.Module):
    r"""LayerNorm whose scale and shift are functions of a condition.

    .. math:: y = \sigma(W_s \bar s + b_s) \odot \operatorname{LayerNorm}(a) + W_t \bar s,
        \qquad \bar s = w \odot \operatorname{LayerNorm}(s)

    AlphaFold3, algorithm 26; the norm of a has neither weight nor bias, that of s no bias.

    Parameters
    ----------
    width, condition_width : C and D
    """

    def __init__(self, width: int, condition_width: int) -> None:
        super().__init__()
        self.condition_norm = LayerNorm(condition_width, bias=False)
        self.scale = Linear(condition_width, width, init="final")
        self.shift = Linear(condition_width, width, bias=False, init="final")

    def adapted(self, s: Float[Tensor, "*condition D"]) -> Float[Tensor, "*condition _"]:
        """Return scale and shift, side by side."""
        layers = (self.scale.weight, self.shift.weight)
        weight = once(lambda: torch.cat(layers), *layers)
        bias = once(lambda: _joint_bias([self]), self.scale.bias, to="padded")
        return layer_norm_linear(s, *self.condition_norm.parts, weight, bias)

    def forward(
        self, a: Float[Tensor, "*rows C"], s: Float[Tensor, "*condition D"]
    ) -> Float[Tensor, "*rows C"]:
        """Normalise rows; a condition that copies share may have a copy axis of size 1."""
        return self.given(a, self.adapted(s))

    def given(
        self, a: Float[Tensor, "*rows C"], adapted: Float[Tensor, "*condition _"]
    ) -> Float[Tensor, "*rows C"]:
        """Normalise rows with the result of `adapted`."""
        scale, shift = adapted.to(a.dtype).chunk(2, -1)
        return layer_norm(a, scale=scale, shift=shift, sigmoid=True)

    def after(
        self,
        a: Float[Tensor, "*rows C"],
        gate: Float[Tensor, "*condition C"],
        update: Float[Tensor, "*rows C"],
        adapted: Float[Tensor, "*condition _"],
    ) -> tuple[Float[Tensor, "*rows C"], Float[Tensor, "*rows C"]]:
        """Add a gated update to the rows; return the sum, and it normalised as `given` does."""
        scale, shift = adapted.to(a.dtype).chunk(2, -1)
        return add_norm(a, update, gate, scale, shift)


class ConditionedTransition(nn.Module):
    r"""Adaptive norm, gated unit and an output gate, both conditioned: algorithm 25.

    .. math:: y = \sigma(W_o s + b_o) \odot W_d (\operatorname{silu}(W_g n) \odot W_u n),
        \qquad n = \operatorname{AdaptiveNorm}(a, s)

    Parameters
    ----------
    width, condition_width : C and D
    factor : H / C
    """

    def __init__(self, width: int, condition_width: int, factor: int = 2) -> None:
        super().__init__()
        self.norm = AdaptiveNorm(width, condition_width)
        self.gate = Linear(width, factor * width, bias=False, init="he")
        self.up = Linear(width, factor * width, bias=False, init="he")
        self.down = Linear(factor * width, width, bias=False)
        self.output_gate = output_gate(condition_width, width)

    @property
    def norms(self) -> tuple[AdaptiveNorm, ...]:
        """Result of `conditions_of`."""
        return (self.norm,)

    def forward(
        self, a: Float[Tensor, "*rows C"], s: Float[Tensor, "*condition D"]
    ) -> Float[Tensor, "*rows C"]:
        """Return the update, to be added to a."""
        return conditioned_transition(
            a,
            s.expand(*a.shape[:-1], s.shape[-1]),
            self.norm.condition_norm.weight,
            self.norm.scale.weight,
            self.norm.scale.bias,
            self.norm.shift.weight,
            self.gate.weight,
            self.up.weight,
            self.down.weight,
            self.output_gate.weight,
            self.output_gate.bias,
        )

    def ungated(self, n: Float[Tensor, "*rows C"]) -> Float[Tensor, "*rows C"]:
        """Return the values that the gate multiplies, of normalised rows."""
        update: Tensor = self.down(swiglu(joined(n, self.gate.weight, self.up.weight)))
        return update


def joined(
    x: Float[Tensor, "*rows C"], *weights: Tensor, bias: Tensor | None = None
) -> Float[Tensor, "*rows _"]:
    """Apply several layers to the same rows in one matmul; the first may have a bias."""
    dtype = x.dtype
    weight = once(lambda: concatenated(weights, dtype), *weights, to=dtype)
    if bias is None:
        return F.linear(x, weight)
    missing = len(weight) - len(bias)
    padded = once(lambda: F.pad(bias.to(dtype), (0, missing)), bias, to=(dtype, missing))
    return F.linear(x, weight, padded)
