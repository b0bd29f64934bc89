"""Attention with one query per column: the extra alignment's columns in AlphaFold2."""

from jaxtyping import Bool, Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_axes, check_shapes

__all__ = ["global_attention"]

_operator = registry.operator("global_attention", __name__, takes=support.up_to_float32)


def global_attention(
    m: Float[Tensor, "*batch S N C"],
    mask: Float[Tensor, "*batch S N"] | Bool[Tensor, "*batch S N"],
    norm_weight: Float[Tensor, "C"],
    norm_bias: Float[Tensor, "C"],
    q_weight: Float[Tensor, "HD C"],
    k_weight: Float[Tensor, "D C"],
    v_weight: Float[Tensor, "D C"],
    gate_weight: Float[Tensor, "HD C"],
    gate_bias: Float[Tensor, "HD"],
    out_weight: Float[Tensor, "Z HD"],
    out_bias: Float[Tensor, "Z"],
    *,
    eps: float = 1e-5,
    mask_eps: float = 1e-10,
) -> Float[Tensor, "*batch S N Z"]:
    r"""Attend within every column of an alignment, with the mean row as the only query.

    .. math::

        n &= \operatorname{LayerNorm}(m), \qquad
        q_j = \frac{1}{\sqrt D} W_q \frac{\sum_s m_{sj} n_{sj}}{\epsilon_m + \sum_s m_{sj}} \\
        o_j^h &= \sum_s \operatorname{softmax}_s(q_j^h \cdot W_k n_{sj})\, W_v n_{sj}, \qquad
        y_{sj} = W_o \big( \sigma(W_g n_{sj} + b_g) \odot o_j \big) + b_o

    with the softmax over the rows that the mask keeps; keys and values have one head.
    AlphaFold2, algorithm 19. In a column without any row o is zero (and the gradients through
    it). Raises ValueError if a shape does not match, naming the argument; KernelError if Triton
    is requested and cannot run. The kernel supports bfloat16, float16 and float32, heads D of
    multiples of 8 up to 128, and has first derivatives; the reference is differentiable to any
    order.

    Parameters
    ----------
    m : [..., S, N, C]: S rows of an alignment of N residues
    mask : [..., S, N], 1 or True for residues that exist; no gradient is computed for it
    norm_weight, norm_bias : [C]: ``layer_norm_m`` of OpenFold's state dicts
    q_weight, gate_weight, gate_bias : [H D, C] and [H D]: ``linear_q`` and ``linear_g``
    k_weight, v_weight : [D, C]: ``linear_k`` and ``linear_v``
    out_weight, out_bias : [Z, H D] and [Z]: ``linear_o``
    eps, mask_eps : epsilon of the norm, and of the division by the number of rows

    Returns
    -------
    Tensor
        [..., S, N, Z], of the type of ``m``; add it to ``m`` for the residual.

    Examples
    --------
    Two heads of 8:

    >>> import torch
    >>> q, gate = torch.randn(2, 16, 4)
    >>> k, v = torch.randn(2, 8, 4)
    >>> global_attention(
    ...     torch.randn(7, 5, 4), torch.ones(7, 5), torch.ones(4), torch.zeros(4), q, k, v,
    ...     gate, torch.ones(16), torch.randn(4, 16), torch.zeros(4),
    ... ).shape
    torch.Size([7, 5, 4])
    """
    try:
        *batch, S, N, C = m.shape
        HD, D, Z = q_weight.shape[0], k_weight.shape[0], out_weight.shape[0]
    except (IndexError, ValueError):
        check_axes("global_attention", "[..., S, N, C]", m=m)
        weights = {"q_weight": q_weight, "k_weight": k_weight, "out_weight": out_weight}
        check_axes("global_attention", "[channels, channels]", **weights)
        raise
    wanted = {
        "mask": (mask, (*batch, S, N)),
        "norm_weight": (norm_weight, (C,)),
        "norm_bias": (norm_bias, (C,)),
        "q_weight": (q_weight, (HD // D * D if D else 0, C)),
        "k_weight": (k_weight, (D, C)),
        "v_weight": (v_weight, (D, C)),
        "gate_weight": (gate_weight, (HD, C)),
        "gate_bias": (gate_bias, (HD,)),
        "out_weight": (out_weight, (Z, HD)),
        "out_bias": (out_bias, (Z,)),
    }
    check_shapes("global_attention", wanted, m=m, k_weight=k_weight)
    run = _operator.dispatch(m)
    result: Tensor = run(m, *(tensor for tensor, _ in wanted.values()), eps, mask_eps)
    return result
