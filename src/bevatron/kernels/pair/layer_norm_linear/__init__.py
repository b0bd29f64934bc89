"""LayerNorm followed by a linear layer, without keeping the normalised rows."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_axes, check_shapes

__all__ = ["layer_norm_linear"]

_operator = registry.operator("layer_norm_linear", __name__, takes=support.up_to_float32)


def layer_norm_linear(
    x: Float[Tensor, "*rows C"],
    norm_weight: Float[Tensor, "C"] | None,
    norm_bias: Float[Tensor, "C"] | None,
    weight: Float[Tensor, "K C"],
    bias: Float[Tensor, "K"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Tensor, "*rows K"]:
    r"""Normalise every row and apply a linear layer.

    .. math:: y = W \operatorname{LayerNorm}(x) + b

    The projections in front of attention and triangle multiplication, and their pair biases.
    The backward pass saves the input and two float32 numbers per row. Raises ValueError if a
    shape does not match, naming the argument; KernelError if Triton is requested and cannot
    run. The kernel supports bfloat16, float16 and float32 and has first derivatives; the
    reference is differentiable to any order.

    Parameters
    ----------
    x : [..., C]
    norm_weight, norm_bias : [C], of the LayerNorm
    weight, bias
        [K, C] and [K], in the layout of `torch.nn.Linear`. Layers on the same rows are
        fused by concatenating their weights.
    eps : added to the variance of the LayerNorm

    Returns
    -------
    Tensor
        [..., K], of the type of ``x``. Weights of another type are rounded to it for the matmul;
        their gradients are summed in float32 in a fixed order and have the type of the weights.

    Examples
    --------
    >>> import torch
    >>> layer_norm_linear(torch.randn(5, 8), torch.ones(8), None, torch.randn(3, 8)).shape
    torch.Size([5, 3])
    """
    try:
        C, K = x.shape[-1], weight.shape[0]
    except IndexError:
        check_axes("layer_norm_linear", "[..., C]", x=x)
        check_axes("layer_norm_linear", "[K, C]", weight=weight)
        raise
    wanted = {
        "norm_weight": (norm_weight, (C,)),
        "norm_bias": (norm_bias, (C,)),
        "weight": (weight, (K, C)),
        "bias": (bias, (K,)),
    }
    check_shapes("layer_norm_linear", wanted, x=x)
    run = _operator.dispatch(x)
    result: Tensor = run(x, norm_weight, norm_bias, weight, bias, eps)
    return result
