"""The transition of AlphaFold3's diffusion module: adaptive norm, gated unit, gated output."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_axes, check_shapes

__all__ = ["conditioned_transition"]

_operator = registry.operator("conditioned_transition", __name__, takes=support.up_to_float32)


def conditioned_transition(
    x: Float[Tensor, "*rows C"],
    s: Float[Tensor, "*rows D"],
    norm_weight: Float[Tensor, "D"],
    scale_weight: Float[Tensor, "C D"],
    scale_bias: Float[Tensor, "C"],
    shift_weight: Float[Tensor, "C D"],
    gate_weight: Float[Tensor, "H C"],
    up_weight: Float[Tensor, "H C"],
    down_weight: Float[Tensor, "C H"],
    out_weight: Float[Tensor, "C D"],
    out_bias: Float[Tensor, "C"],
    *,
    eps: float = 1e-5,
) -> Float[Tensor, "*rows C"]:
    r"""Apply adaptive LayerNorm, a SwiGLU transition and an output gate, both conditioned on s.

    .. math::

        \bar s &= w \odot \operatorname{LayerNorm}(s) \\
        n &= \sigma(W_s \bar s + b_s) \odot \operatorname{LayerNorm}(x) + W_t \bar s \\
        y &= \sigma(W_o s + b_o) \odot W_d \big( \operatorname{silu}(W_g n) \odot W_u n \big)

    AlphaFold3, algorithms 25 and 26; neither LayerNorm has a bias, and that of x has no weight. The
    backward pass saves the inputs, the statistics of both norms (four float32 numbers per row) and
    the result, which must not be modified in place until then. It saves no intermediate rows, which
    would take most of the diffusion module's memory. Raises ValueError if a shape does not match,
    naming the argument; KernelError if Triton is requested and cannot run. The kernel supports
    bfloat16, float16 and float32 and has first derivatives; the reference is differentiable to any
    order.

    Parameters
    ----------
    x : [..., C], activations
    s : [..., D], the condition of every row
    norm_weight : [D], w
    scale_weight, scale_bias, shift_weight : [C, D], [C] and [C, D]: W_s, b_s and W_t
    gate_weight, up_weight, down_weight
        [H, C], [H, C] and [C, H]: W_g, W_u and W_d; H = 2 C in AlphaFold3.
    out_weight, out_bias : [C, D] and [C]: W_o and b_o, which AlphaFold3 starts at -2
    eps : epsilon of both norms

    Returns
    -------
    Tensor
        [..., C], of the type of ``x``; add it to ``x`` for the residual. Weights of another type
        are rounded to it for the matmuls; their gradients are summed in float32 in a fixed order
        and have the type of the weights.

    Examples
    --------
    >>> import torch
    >>> draw = torch.randn
    >>> conditioned_transition(
    ...     draw(5, 8), draw(5, 6), draw(6), draw(8, 6), draw(8), draw(8, 6),
    ...     draw(16, 8), draw(16, 8), draw(8, 16), draw(8, 6), draw(8),
    ... ).shape
    torch.Size([5, 8])
    """
    try:
        C, D, H = x.shape[-1], s.shape[-1], up_weight.shape[0]
    except IndexError:
        check_axes("conditioned_transition", "[..., C]", x=x, s=s)
        check_axes("conditioned_transition", "[H, C]", up_weight=up_weight)
        raise
    wanted = {
        "s": (s, (*x.shape[:-1], D)),
        "norm_weight": (norm_weight, (D,)),
        "scale_weight": (scale_weight, (C, D)),
        "scale_bias": (scale_bias, (C,)),
        "shift_weight": (shift_weight, (C, D)),
        "gate_weight": (gate_weight, (H, C)),
        "up_weight": (up_weight, (H, C)),
        "down_weight": (down_weight, (C, H)),
        "out_weight": (out_weight, (C, D)),
        "out_bias": (out_bias, (C,)),
    }
    check_shapes("conditioned_transition", wanted, x=x)
    weights = [tensor for name, (tensor, _) in wanted.items() if name != "s"]
    result: Tensor = _operator.dispatch(x)(x, s, *weights, eps)
    return result
