"""The transition blocks of AlphaFold2 and 3: LayerNorm and a two-layer MLP."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_axes, check_shapes

__all__ = ["transition"]

_operator = registry.operator("transition", __name__, takes=support.up_to_float32)


def transition(
    x: Float[Tensor, "*rows C"],
    norm_weight: Float[Tensor, "C"] | None,
    norm_bias: Float[Tensor, "C"] | None,
    up_weight: Float[Tensor, "H C"],
    down_weight: Float[Tensor, "_ H"],
    gate_weight: Float[Tensor, "H C"] | None = None,
    up_bias: Float[Tensor, "H"] | None = None,
    down_bias: Float[Tensor, "_"] | None = None,
    *,
    eps: float = 1e-5,
    residual: bool = False,
) -> Float[Tensor, "*rows _"]:
    r"""Apply LayerNorm and a two-layer MLP, with SwiGLU or ReLU, to every row.

    .. math::

        n = \operatorname{LayerNorm}(x), \qquad
        y = W_d\, h + b_d, \qquad
        h = \begin{cases}
        \operatorname{silu}(W_g n) \odot (W_u n + b_u) & \text{with a gate (AlphaFold3, 11)} \\
        \operatorname{relu}(W_u n + b_u) & \text{without (AlphaFold2, 9 and 15)}
        \end{cases}

    The backward pass needs the input and two float32 numbers per row. Hidden rows, 2 or 4 times as
    wide, are saved only where cuBLAS multiplies fewer than 1,024 of them. Raises ValueError if a
    shape does not match, naming the argument; KernelError if Triton is requested and cannot run.
    The kernel supports bfloat16, float16 and float32 and has first derivatives; the reference is
    differentiable to any order.

    Parameters
    ----------
    x : [..., C]
    norm_weight, norm_bias : [C], of the LayerNorm
    up_weight, gate_weight : [H, C], in the layout of `torch.nn.Linear`
    down_weight : [C_out, H]
    up_bias, down_bias : [H] and [C_out]
    eps : added to the variance of the LayerNorm
    residual : whether x is added to the result, in the same kernels where these are fused

    Returns
    -------
    Tensor
        [..., C_out], of the type of ``x``: y, plus x if ``residual``. Weights of another type are
        rounded to that of ``x`` for the matmuls; their gradients are summed in float32 in a fixed
        order and have the type of the weights.

    Examples
    --------
    >>> import torch
    >>> x, up, down = torch.randn(5, 5, 8), torch.randn(32, 8), torch.randn(8, 32)
    >>> transition(x, torch.ones(8), torch.zeros(8), up, down, gate_weight=torch.randn(32, 8)).shape
    torch.Size([5, 5, 8])
    """
    try:
        C, H, out = x.shape[-1], up_weight.shape[0], down_weight.shape[0]
    except IndexError:
        check_axes("transition", "[..., C]", x=x)
        check_axes(
            "transition", "[channels, channels]", up_weight=up_weight, down_weight=down_weight
        )
        raise
    out = C if residual else out
    wanted = {
        "norm_weight": (norm_weight, (C,)),
        "norm_bias": (norm_bias, (C,)),
        "up_weight": (up_weight, (H, C)),
        "down_weight": (down_weight, (out, H)),
        "gate_weight": (gate_weight, (H, C)),
        "up_bias": (up_bias, (H,)),
        "down_bias": (down_bias, (out,)),
    }
    check_shapes("transition", wanted, x=x, up_weight=up_weight)
    run = _operator.dispatch(x)
    tensors = (tensor for tensor, _ in wanted.values())
    result: Tensor = run(x, *tensors, eps, residual)
    return result
