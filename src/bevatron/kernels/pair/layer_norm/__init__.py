"""Layer normalisation: plain, affine, or with a scale and shift per row; also of a sum."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import as_one_type, check_shapes

__all__ = ["add_norm", "layer_norm"]

_operator = registry.operator("layer_norm", __name__, takes=support.up_to_float32)
_of_sum = registry.operator(
    "add_norm",
    __name__,
    reference="reference:add_norm",
    triton="triton:add_norm",
    takes=support.up_to_float32,
)


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
    scale = None if scale is None else _like("layer_norm", "scale", scale, x)
    shift = None if shift is None else _like("layer_norm", "shift", shift, x)
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


def add_norm(
    x: Float[Tensor, "*rows C"],
    update: Float[Tensor, "*rows C"],
    gate: Float[Tensor, "..."],
    scale: Float[Tensor, "..."],
    shift: Float[Tensor, "..."],
    *,
    eps: float = 1e-5,
) -> tuple[Float[Tensor, "*rows C"], Float[Tensor, "*rows C"]]:
    r"""Add a gated update and apply an adaptive norm to the sum, in one kernel.

    .. math::

        z = x + g \odot u, \qquad y = \sigma(s) \odot \frac{z - \operatorname{mean}(z)}
        {\sqrt{\operatorname{var}(z) + \epsilon}} + t

    AlphaFold3, algorithms 23 and 26: a layer's update, and the norm in front of the next layer.
    Raises ValueError if shapes or types do not fit, naming the argument; KernelError if Triton is
    requested and cannot run. The kernel has the types and widths of `layer_norm`, and first
    derivatives.

    Parameters
    ----------
    x, update : [..., C], of one type, in any strides
    gate, scale, shift
        Same shape and type as ``x``, or one that broadcasts to it; the scale before its sigmoid.
    eps : added to the variance

    Returns
    -------
    z and y of the type of ``x``, contiguous; y is the norm of z as it is rounded.

    Examples
    --------
    >>> import torch
    >>> x, open, shut = torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 2)
    >>> add_norm(x, torch.tensor([[4.0, 8.0]]), open, shut, shut, eps=0.0)
    (tensor([[4., 8.]]), tensor([[-0.5000,  0.5000]]))
    """
    if not x.shape or x.shape[-1] == 0:
        raise ValueError(f"add_norm: x has shape {tuple(x.shape)}, expected [..., C] with C > 0")
    check_shapes("add_norm", {"update": (update, x.shape)}, x=x)
    named = {"gate": gate, "scale": scale, "shift": shift}
    wide = {name: _like("add_norm", name, tensor, x) for name, tensor in named.items()}
    others = as_one_type("add_norm", x=x, update=update, **wide)
    total, y = _of_sum.dispatch(x)(x, *others, eps)
    return total, y


def _like(operator: str, name: str, tensor: Tensor, x: Tensor) -> Tensor:
    if tensor.shape == x.shape:
        return tensor
    try:
        return tensor.expand(x.shape)
    except RuntimeError:
        raise ValueError(
            f"{operator}: {name} has shape {tuple(tensor.shape)}, which does not broadcast to x "
            f"{tuple(x.shape)}"
        ) from None
