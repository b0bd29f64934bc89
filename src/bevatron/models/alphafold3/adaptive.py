"""Norm and transition that a condition s scales and gates (AlphaFold3, algorithms 25 and 26).

Legend: C channels of the rows, D of their condition, H hidden channels.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from bevatron.kernels import conditioned_transition, layer_norm, layer_norm_linear
from bevatron.kernels.shared.standing_weights import once
from bevatron.models.common.folding import LayerNorm, Linear

GATE_BIAS = -2.0
"""Initial bias of output gates: a new block hardly changes its input."""


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

    def forward(
        self, a: Float[Tensor, "*rows C"], s: Float[Tensor, "*condition D"]
    ) -> Float[Tensor, "*rows C"]:
        """Normalise rows; a condition that copies share may have an axis of size 1 for them."""
        layers, own = (self.scale.weight, self.shift.weight), self.scale.bias
        weight = once(lambda: torch.cat(layers), *layers)
        bias = once(lambda: F.pad(own, (0, len(own))), own, to="padded")
        both = layer_norm_linear(s, *self.condition_norm.parts, weight, bias)
        scale, shift = both.to(a.dtype).chunk(2, -1)
        return layer_norm(a, scale=scale, shift=shift, sigmoid=True)


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
