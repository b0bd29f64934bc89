"""The outer product mean: the update of the pair by the alignment."""

from jaxtyping import Bool, Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_axes, check_shapes

__all__ = ["layer_of_products", "outer_product_mean"]

_operator = registry.operator("outer_product_mean", __name__, takes=support.up_to_float32)
_layer = registry.operator("layer_of_products", __name__, takes=support.up_to_float32)


def outer_product_mean(
    m: Float[Tensor, "*batch S N C"],
    mask: Float[Tensor, "*batch S N"] | Bool[Tensor, "*batch S N"],
    norm_weight: Float[Tensor, "C"],
    norm_bias: Float[Tensor, "C"],
    a_weight: Float[Tensor, "H C"],
    b_weight: Float[Tensor, "H C"],
    out_weight: Float[Tensor, "Z H*H"],
    a_bias: Float[Tensor, "H"] | None = None,
    b_bias: Float[Tensor, "H"] | None = None,
    out_bias: Float[Tensor, "Z"] | None = None,
    *,
    eps: float = 1e-5,
    mask_eps: float = 1e-3,
) -> Float[Tensor, "*batch N N Z"]:
    r"""Average the outer products of two projections of an alignment over its rows.

    .. math::

        a &= m_s \odot (W_a n + b_a), \qquad b = m_s \odot (W_b n + b_b), \qquad
        n = \operatorname{LayerNorm}(m) \\
        y_{ij} &= \frac{W_o \operatorname{flatten}\big(\sum_s a_{si} \otimes b_{sj}\big) + b_o}
        {\epsilon_m + \sum_s m_{si} m_{sj}}

    AlphaFold2, algorithm 10; AlphaFold3, algorithm 9. The division comes after the last layer and
    its bias, as in the published code. The backward pass saves the input, two float32 numbers per
    row and the N^2 H^2 outer products if they take at most 1280 MiB; larger ones exist only for a
    few lines of the pair at a time, and the backward pass recomputes them. Raises ValueError if a
    shape does not match, naming the argument; KernelError if Triton is requested and cannot run.
    The kernel supports bfloat16, float16 and float32 and has first derivatives; the reference is
    differentiable to any order.

    Parameters
    ----------
    m : [..., S, N, C]: S rows of an alignment of N residues
    mask : [..., S, N], 1 or True for residues that exist; no gradient is computed for it
    norm_weight, norm_bias : [C]: ``layer_norm`` of published state dicts
    a_weight, b_weight, a_bias, b_bias : [H, C] and [H]: ``linear_1`` and ``linear_2``
    out_weight, out_bias : [Z, H H] and [Z]: ``linear_out``; the channels of b vary fastest
    eps, mask_eps : epsilon of the norm, and of the division by the number of rows

    Returns
    -------
    Tensor
        [..., N, N, Z], of the type of ``m``; add it to the pair. Weights of another type are
        rounded to that of ``m``; their gradients are summed in float32 in a fixed order.

    Examples
    --------
    >>> import torch
    >>> m, a, b, out = torch.randn(7, 5, 8), *torch.randn(2, 3, 8), torch.randn(4, 9)
    >>> outer_product_mean(m, torch.ones(7, 5), torch.ones(8), torch.zeros(8), a, b, out).shape
    torch.Size([5, 5, 4])
    """
    try:
        *batch, S, N, C = m.shape
        H, Z = a_weight.shape[0], out_weight.shape[0]
    except (IndexError, ValueError):
        check_axes("outer_product_mean", "[..., S, N, C]", m=m)
        weights = {"a_weight": a_weight, "out_weight": out_weight}
        check_axes("outer_product_mean", "[channels, channels]", **weights)
        raise
    wanted = {
        "mask": (mask, (*batch, S, N)),
        "norm_weight": (norm_weight, (C,)),
        "norm_bias": (norm_bias, (C,)),
        "a_weight": (a_weight, (H, C)),
        "b_weight": (b_weight, (H, C)),
        "out_weight": (out_weight, (Z, H * H)),
        "a_bias": (a_bias, (H,)),
        "b_bias": (b_bias, (H,)),
        "out_bias": (out_bias, (Z,)),
    }
    check_shapes("outer_product_mean", wanted, m=m, a_weight=a_weight)
    run = _operator.dispatch(m)
    result: Tensor = run(m, *(tensor for tensor, _ in wanted.values()), eps, mask_eps)
    return result


def layer_of_products(
    a: Float[Tensor, "*batch S R H"],
    b: Float[Tensor, "*batch S N H"],
    count: Float[Tensor, "*batch R N"],
    out_weight: Float[Tensor, "Z H*H"],
    out_bias: Float[Tensor, "Z"] | None = None,
) -> Float[Tensor, "*batch R N Z"]:
    r"""Apply the last step of `outer_product_mean` to projections, of R residues with all N.

    .. math::

        y_{ij} = \Big(W_o \operatorname{flatten}\big(\sum_s a_{si} \otimes b_{sj}\big) + b_o\Big)
        / n_{ij}

    Raises ValueError if a shape does not match; KernelError as `outer_product_mean` does.

    Parameters
    ----------
    a, b : masked projections of S rows of an alignment
    count : n, for which no gradient is computed
    out_weight, out_bias : see `outer_product_mean`
    """
    try:
        (*batch, S, R, H), N = a.shape, b.shape[-2]
    except (IndexError, ValueError):
        check_axes("layer_of_products", "[..., S, N, H]", a=a, b=b)
        check_axes("layer_of_products", "[Z, H * H]", out_weight=out_weight)
        raise
    wanted = {"b": (b, (*batch, S, N, H)), "count": (count, (*batch, R, N))}
    wanted |= {"out_weight": (out_weight, (len(out_weight), H * H))}
    check_shapes("layer_of_products", wanted, a=a)
    result: Tensor = _layer.dispatch(a)(a, b, count, out_weight, out_bias)
    return result
