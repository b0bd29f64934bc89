"""The transition in plain PyTorch: the specification."""

import torch.nn.functional as F
from torch import Tensor

from bevatron.kernels.pair.layer_norm.reference import layer_norm
from bevatron.kernels.pair.swiglu.reference import swiglu


def transition(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    eps: float,
    residual: bool,
) -> Tensor:
    """Compute ``down(silu(gate(n)) * up(n))`` or ``down(relu(up(n)))`` of the normalised rows n.

    Plus the rows themselves if it is residual.
    """
    n = layer_norm(x, norm_weight, norm_bias, None, None, eps, False)
    value = _linear(n, up_weight, up_bias)
    hidden = value.relu()
    if gate_weight is not None:
        hidden = swiglu(_linear(n, gate_weight, None), value)
    y = _linear(hidden, down_weight, down_bias)
    return x + y if residual else y


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
