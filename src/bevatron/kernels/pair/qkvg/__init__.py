"""Queries, keys, values and gate of an attention layer in one matmul."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_shapes

__all__ = ["qkvg"]

WEIGHTS = ("q_weight", "k_weight", "v_weight", "gate_weight")

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
    C = x.shape[-1]
    norm_weight, norm_bias = (None, None) if norm is None else norm
    wanted = {
        "q_weight": (q_weight, (q_weight.shape[0], C)),
        "k_weight": (k_weight, (k_weight.shape[0], C)),
        "v_weight": (v_weight, (v_weight.shape[0], C)),
        "gate_weight": (gate_weight, (gate_weight.shape[0], C)),
        "gate_bias": (gate_bias, (gate_weight.shape[0],)),
        "q_bias": (q_bias, (q_weight.shape[0],)),
        "norm weight": (norm_weight, (C,)),
        "norm bias": (norm_bias, (C,)),
        "bias_weight": (bias_weight, (0 if bias_weight is None else bias_weight.shape[0], C)),
    }
    check_shapes("qkvg", wanted, f"x {tuple(x.shape)}")
    for name in WEIGHTS:
        _, (channels, _) = wanted[name]
        if head_width is not None and (head_width < 1 or channels % head_width):
            raise ValueError(
                f"qkvg: {name} has shape {(channels, C)}, whose first axis is not a multiple of "
                f"head_width {head_width}"
            )
    if bias_weight is not None and norm is None:
        raise ValueError("qkvg: bias_weight is a layer of normalised rows, but no norm is given")
    run = _operator.dispatch(x)
    given = (q_weight, k_weight, v_weight, gate_weight, gate_bias, q_bias, norm is not None)
    found: tuple[Tensor, ...] = run(x, *given, norm_weight, norm_bias, bias_weight, eps, head_width)
    return found
