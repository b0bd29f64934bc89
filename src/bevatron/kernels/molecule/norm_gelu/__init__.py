"""LayerNorm and activation between the two layers of an MLP, in one pass."""

from typing import Literal, get_args

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared.checks import check_segment_rows, check_vectors

__all__ = ["Activation", "norm_gelu"]

Activation = Literal["gelu", "relu"]
"""``gelu`` is the tanh form."""

_operator = registry.operator("norm_gelu", __name__)


def norm_gelu(
    x: Float[Tensor, "M C"],
    weight: Float[Tensor, " C"] | None,
    bias: Float[Tensor, " C"] | None,
    *,
    linear_bias: Float[Tensor, " C"] | None = None,
    rows: Float[Tensor, "G C"] | None = None,
    index: Int[Tensor, " M"] | None = None,
    ptr: Int[Tensor, " _"] | None = None,
    eps: float = 1e-3,
    activation: Activation = "gelu",
) -> Float[Tensor, "M C"]:
    r"""Normalise every row and apply the activation.

    .. math::

        y_m = \phi\Big( w \odot \operatorname{norm}\big(x_m + c + t_{g(m)}\big) + b \Big), \qquad
        \operatorname{norm}(z) = \frac{z - \operatorname{mean}(z)}
        {\sqrt{\operatorname{var}(z) + \epsilon}}

    with c the bias of the preceding linear layer and t one row per segment: the contribution of a
    molecule's global features to that layer, computed once per molecule instead of once per atom.
    Raises ValueError if a shape does not match, naming the argument.

    Parameters
    ----------
    x : output of a linear layer, without its bias if ``linear_bias`` is given
    weight, bias
        w and b. Without both there is no normalisation: y = phi(x + c + t).
    linear_bias : c
    rows, index, ptr
        t, [G, C]; the segment of each row of ``x``, [M], ascending; and the offsets of the
        segments, [G + 1]. All three or none.
    eps : added to the variance; Keras and GPS++ use 1e-3
    activation : ``gelu`` in the tanh form, or ``relu``

    Returns
    -------
    Tensor
        Same shape and type as ``x``; computed in float32 for 16-bit types and rounded once.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[1.0, 3.0, 5.0, 7.0]])
    >>> norm_gelu(x, torch.ones(4), torch.zeros(4), eps=0.0, activation="relu")
    tensor([[0.0000, 0.0000, 0.4472, 1.3416]])
    """
    check_vectors("norm_gelu", x, weight=weight, bias=bias, linear_bias=linear_bias)
    if (weight is None) != (bias is None):
        raise ValueError("norm_gelu: weight and bias are given together or not at all")
    check_segment_rows("norm_gelu", x, rows, index, ptr)
    if activation not in get_args(Activation):
        raise ValueError(f"norm_gelu: activation is '{activation}', expected gelu or relu")
    run = _operator.dispatch(x)
    result: Tensor = run(x, weight, bias, linear_bias, rows, index, ptr, eps, activation)
    return result
