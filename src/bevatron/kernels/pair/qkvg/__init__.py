"""Queries, keys, values and gate of an attention layer in one matmul."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_axes, check_shapes

__all__ = ["qkvg"]

_operator = registry.operator("qkvg", __name__, takes=support.up_to_float32)


def qkvg(
    x: Float[Tensor, "*rows C"],
    q_weight: Float[Tensor, "Q C"],
    k_weight: Float[Tensor, "K C"],
    v_weight: Float[Tensor, "V C"],
    gate_weight: Float[Tensor, "G C"],
    gate_bias: Float[Tensor, "G"] | None = None,
    q_bias: Float[Tensor, "Q"] | None = None,
    norm: tuple[Float[Tensor, "C"] | None, Float[Tensor, "C"] | None] | None = None,
    bias_weight: Float[Tensor, "heads C"] | None = None,
    *,
    head_width: int | None = None,
    eps: float = 1e-5,
) -> tuple[Float[Tensor, "..."], ...]:
    r"""Project rows to queries, keys, values and gate.

    .. math:: (q, k, v, g) = (W_q n + b_q, W_k n, W_v n, W_g n + b_g), \qquad
        n = \operatorname{LayerNorm}(x) \text{ or } x

    A module keeps the four layers of published state dicts (``linear_q``, ``linear_k``,
    ``linear_v``, ``linear_g``); their weights are concatenated in each call, a copy of a few
    hundred kilobytes. The four results are views of one tensor, which `pair_attention` reads in
    place. The backward pass saves x, the joint weight and, with a norm, two float32 numbers per
    row. Raises ValueError if a shape does not match, naming the argument; KernelError if Triton
    is requested and cannot run. The kernel supports bfloat16, float16 and float32 and has first
    derivatives; the reference is differentiable to any order.

    Parameters
    ----------
    x : [..., C]
    q_weight, k_weight, v_weight, gate_weight
        [Q, C], [K, C], [V, C] and [G, C], in the layout of `torch.nn.Linear`.
    gate_bias, q_bias : [G] (AlphaFold2) and [Q] (AlphaFold3's single attention)
    norm : weight and bias (each may be None) of a LayerNorm in front; None for no norm at all
    bias_weight : [heads, C], a fifth layer, of the bias of triangle attention; it needs the norm
    head_width : D, which divides Q, K, V and G, for results by heads
    eps : added to the variance of the norm

    Returns
    -------
    tuple
        q, k, v and the gate before its sigmoid, of the type of ``x``: [..., Q] and so on, or
        [..., Q / D, D] with ``head_width``. With ``bias_weight`` also the bias, [..., heads], and x
        itself, for the residual: used instead of ``x``, its gradient is added by the kernel that
        computes the others.

    Examples
    --------
    >>> import torch
    >>> x, w = torch.randn(5, 8), torch.randn(4, 16, 8)
    >>> q, k, v, gate = qkvg(x, *w, torch.ones(16), norm=(torch.ones(8), torch.zeros(8)))
    >>> q.shape
    torch.Size([5, 16])
    """
    weights = {"q_weight": q_weight, "k_weight": k_weight, "v_weight": v_weight}
    weights["gate_weight"] = gate_weight
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...]]]
    norm_weight, norm_bias = (None, None) if norm is None else norm
    try:
        C, Q, G = x.shape[-1], q_weight.shape[0], gate_weight.shape[0]
        heads = 1 if bias_weight is None else bias_weight.shape[0] or 1
        wanted = {name: (weight, (weight.shape[0], C)) for name, weight in weights.items()}
    except IndexError:
        check_axes("qkvg", "[..., C]", x=x)
        check_axes("qkvg", "[channels, C]", **weights, bias_weight=bias_weight)
        raise
    wanted |= {
        "gate_bias": (gate_bias, (G,)),
        "q_bias": (q_bias, (Q,)),
        "norm weight": (norm_weight, (C,)),
        "norm bias": (norm_bias, (C,)),
        "bias_weight": (bias_weight, (heads, C)),
    }
    check_shapes("qkvg", wanted, x=x)
    if head_width is not None:
        for name, weight in weights.items():
            if head_width < 1 or weight.shape[0] % head_width:
                raise ValueError(
                    f"qkvg: {name} has shape {tuple(weight.shape)}, whose first axis is not a "
                    f"multiple of head_width {head_width}"
                )
    if bias_weight is not None and norm is None:
        raise ValueError("qkvg: bias_weight is a layer of normalised rows, but no norm is given")
    run = _operator.dispatch(x)
    given = (q_weight, k_weight, v_weight, gate_weight, gate_bias, q_bias, norm is not None)
    found: tuple[Tensor, ...] = run(x, *given, norm_weight, norm_bias, bias_weight, eps, head_width)
    return found
