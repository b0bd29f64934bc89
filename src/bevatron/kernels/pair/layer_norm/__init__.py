"""Layer normalisation: plain, affine, or with a scale and shift per row."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_shapes

__all__ = ["layer_norm"]

_operator = registry.operator("layer_norm", __name__, takes=support.up_to_float32)


def layer_norm(
    x: Float[Tensor, "*rows C"],
    weight: Float[Tensor, "C"] | None = None,
    bias: Float[Tensor, "C"] | None = None,
    scale: Float[Tensor, "..."] | None = None,
    shift: Float[Tensor, "..."] | None = None,
    *,
    eps: float = 1e-5,
    sigmoid: bool = False,
) -> Float[Tensor, "*rows C"]:
    r"""Normalise every row to mean 0 and variance 1, then scale and shift it.

    .. math::

        y = s \odot \Big( w \odot \frac{x - \operatorname{mean}(x)}
        {\sqrt{\operatorname{var}(x) + \epsilon}} + b \Big) + t

    with the mean and the (biased) variance over the last axis, a weight w and bias b that all
    rows share, and a scale s and shift t per row. Ba et al., arXiv 1607.06450; with
    ``sigmoid=True``, no weight and no bias it is the adaptive norm of AlphaFold3, algorithm 26,
    after its two projections. Raises ValueError if a shape does not match, naming the argument;
    KernelError if Triton is requested and cannot run. The kernel supports bfloat16, float16 and
    float32, up to 8192 channels, and has first derivatives; the reference is differentiable to
    any order.

    Parameters
    ----------
    x
        [..., C], in any strides: a transposed pair or a slice of a wider tensor is read in
        place. The result is contiguous.
    weight, bias : [C], of any type; their gradients are summed in float32 in a fixed order
    scale, shift : same shape as ``x``, or one that broadcasts to it
    eps : added to the variance
    sigmoid : whether a sigmoid is applied to ``scale``

    Returns
    -------
    Tensor
        Same shape and type as ``x``. Mean, variance and all arithmetic are float32 for 16-bit
        types, and the result is rounded once.

    Examples
    --------
    >>> import torch
    >>> layer_norm(torch.tensor([[1.0, 3.0, 5.0, 7.0]]), eps=0.0)
    tensor([[-1.3416, -0.4472,  0.4472,  1.3416]])
    """
    shape = x.shape
    if not shape or shape[-1] == 0:
        raise ValueError(f"layer_norm: x has shape {tuple(shape)}, expected [..., C] with C > 0")
    scale = None if scale is None else _like("scale", scale, x)
    shift = None if shift is None else _like("shift", shift, x)
    wanted = {
        "weight": (weight, (shape[-1],)),
        "bias": (bias, (shape[-1],)),
        "scale": (scale, shape),
        "shift": (shift, shape),
    }
    check_shapes("layer_norm", wanted, x=x)
    run = _operator.dispatch(x)
    result: Tensor = run(x, weight, bias, scale, shift, eps, sigmoid)
    return result


def _like(name: str, tensor: Tensor, x: Tensor) -> Tensor:
    if tensor.shape == x.shape:
        return tensor
    try:
        return tensor.expand(x.shape)
    except RuntimeError:
        raise ValueError(
            f"layer_norm: {name} has shape {tuple(tensor.shape)}, which does not broadcast to x "
            f"{tuple(x.shape)}"
        ) from None
