"""Attention over the rows of a pair or of an alignment, with a bias that the rows share."""

from typing import Literal, get_args

from jaxtyping import Bool, Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import as_one_type, check_axes, check_keep_mask, check_shapes

__all__ = ["Layout", "pair_attention"]

Layout = Literal["BSHND", "BSNHD"]
"""Order of the axes of queries, keys, values, gate and result."""

LARGEST_HEAD = 128

_operator = registry.operator("pair_attention", __name__, takes=support.up_to_float32)


def pair_attention(
    q: Float[Tensor, "B S _ _ D"],
    k: Float[Tensor, "B S _ _ D"],
    v: Float[Tensor, "B S _ _ D"],
    bias: Float[Tensor, "B _ H Nq Nk"] | None = None,
    mask: Bool[Tensor, "B S Nk"] | None = None,
    scale: float | None = None,
    gate: Float[Tensor, "B S _ _ D"] | None = None,
    layout: Layout = "BSHND",
) -> Float[Tensor, "B S _ _ D"]:
    r"""Attend within every row, with an additive bias that the rows share.

    For row s and head h

    .. math::

        o_{s,h,i} = \sigma(g_{s,h,i}) \odot \sum_j \operatorname{softmax}_j\Big(
        c\, q_{s,h,i} \cdot k_{s,h,j} + b_{h,i,j} \Big)\, v_{s,h,j}

    where the sums run over the keys that the mask keeps. It is algorithm 7 of AlphaFold2 (rows of
    the alignment), 8 (columns, without a bias), 13 and 14 (triangles, with the transposed pair for
    the ending node), and the attention of AlphaFold3's Pairformer and diffusion transformer (noisy
    copies as rows). Raises ValueError if a shape, a type or the layout does not fit, naming the
    argument; KernelError if Triton is requested and cannot run. The kernel takes head sizes of a
    multiple of 8 up to 128, in bfloat16, float16 or float32, and has first derivatives; the
    reference is differentiable to any order.

    Parameters
    ----------
    q, k, v
        [B, S, H, N, D], or [B, S, N, H, D] with ``layout="BSNHD"``; views of one fused projection
        or of a transposed pair are read in place, and only a view whose last axis is not contiguous
        is copied. The number of keys may differ from that of queries.
    bias
        [B, 1 or S, H, Nq, Nk] in either ``layout``: one for all rows or one per row; minus infinity
        drops a key. Its gradient has its type, which may differ from that of ``q``.
    mask
        [B, S, Nk], True = keep. A query whose keys are all dropped gets zero, and no gradient.
    scale : c; 1/sqrt(D) if not given
    gate : g before the sigmoid, of the shape of ``q``
    layout : order of the axes of q, k, v, gate and the result

    Returns
    -------
    Tensor
        Same shape and type as ``q``. The kernel's logits, softmax and sums are float32 for 16-bit
        types, those of the reference are of the type.

    Examples
    --------
    Triangle attention around the starting node, on a pair of 6 residues with 2 heads of 8:

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 6, 8)
    >>> bias, mask = torch.randn(1, 1, 2, 6, 6), torch.ones(1, 6, 6, dtype=torch.bool)
    >>> pair_attention(q, k, v, bias, mask).shape
    torch.Size([1, 6, 2, 6, 8])
    """
    _check(q, k, v, bias, mask, gate, layout)
    k, v = as_one_type("pair_attention", q=q, k=k, v=v)
    run = _operator.dispatch(q)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    result: Tensor = run(q, k, v, bias, mask, scale, gate, layout)
    return result


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    gate: Tensor | None,
    layout: str,
) -> None:
    if layout not in get_args(Layout):
        raise ValueError(f"pair_attention: layout is '{layout}', expected BSHND or BSNHD")
    try:
        if layout == "BSHND":
            (B, S, H, Nq, D), Nk = q.shape, k.shape[3]
            of_keys = (B, S, H, Nk, D)
        else:
            (B, S, Nq, H, D), Nk = q.shape, k.shape[2]
            of_keys = (B, S, Nk, H, D)
    except (IndexError, ValueError):
        check_axes("pair_attention", f"[{', '.join(layout)}]", q=q, k=k)
        raise
    rows = S if bias is not None and bias.dim() == 5 and bias.shape[1] == S else 1
    wanted = {
        "k": (k, of_keys),
        "v": (v, of_keys),
        "gate": (gate, tuple(q.shape)),
        "bias": (bias, (B, rows, H, Nq, Nk)),
        "mask": (mask, (B, S, Nk)),
    }
    check_shapes("pair_attention", wanted, q=q, k=k)
    check_keep_mask("pair_attention", mask)
