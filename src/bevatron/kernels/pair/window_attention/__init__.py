"""Attention of atoms to those around them, in windows that follow one another."""

from jaxtyping import Bool, Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import as_one_type, check_axes, check_keep_mask, check_shapes

__all__ = ["window_attention"]

_operator = registry.operator("window_attention", __name__, takes=support.up_to_float32)


def window_attention(
    q: Float[Tensor, "B M A H D"],
    k: Float[Tensor, "B M A H D"],
    v: Float[Tensor, "B M A H D"],
    gate: Float[Tensor, "B M A H D"],
    bias: Float[Tensor, "B W H Q K"],
    mask: Bool[Tensor, "B A"],
) -> Float[Tensor, "B M A H D"]:
    r"""Attend within windows: of Q atoms that follow one another to the K around them.

    Window w has the queries Qw to Qw + Q - 1 and K keys from Qw - (K - Q)/2 on, those that exist
    and that the mask keeps. For atom i of window w, j over these keys, copy m and head h

    .. math::

        o_{m,i,h} = \sigma(g_{m,i,h}) \odot \sum_j \operatorname{softmax}_j\Big(
        q_{m,i,h} \cdot k_{m,j,h} / \sqrt D + b_{w,h,i,j} \Big)\, v_{m,j,h}

    AlphaFold3, algorithms 7 and 24, with Q = 32 and K = 128. Copies share bias and mask. Raises
    ValueError if shapes or types do not fit; KernelError if Triton is requested and cannot run. The
    kernel takes a power of two for Q, a power of two times as many keys and heads of up to 128
    channels; it has first derivatives.

    Parameters
    ----------
    q, k, v, gate
        Of one type; the gate before its sigmoid. Parts of a joint projection are read in place.
    bias
        One matrix for every window, W = A / Q rounded up; minus infinity drops a key. Its gradient
        is summed over copies and has its type.
    mask
        True = keep. A query whose keys are all dropped gets zero, and no gradient.

    Returns
    -------
    Tensor
        Same shape and type as ``q``. The kernel's logits, softmax and sums are float32 for 16-bit
        types, those of the reference are of the type.

    Examples
    --------
    Two copies of 70 atoms:

    >>> import torch
    >>> q, k, v, gate = torch.randn(4, 1, 2, 70, 4, 8)
    >>> bias, mask = torch.randn(1, 3, 4, 32, 128), torch.ones(1, 70, dtype=torch.bool)
    >>> window_attention(q, k, v, gate, bias, mask).shape
    torch.Size([1, 2, 70, 4, 8])
    """
    try:
        B, _, A, H, _ = q.shape
        _, _, _, queries, keys = bias.shape
    except ValueError:
        check_axes("window_attention", "[B, M, A, H, D]", q=q)
        check_axes("window_attention", "[B, W, H, Q, K]", bias=bias)
        raise
    if queries < 1 or keys < queries or (keys - queries) % 2:
        raise ValueError(
            f"window_attention: bias {tuple(bias.shape)} has windows of {queries} queries and "
            f"{keys} keys; give an even number of keys more than queries"
        )
    shape = tuple(q.shape)
    wanted = {
        **{name: (tensor, shape) for name, tensor in (("k", k), ("v", v), ("gate", gate))},
        "bias": (bias, (B, -(-A // queries), H, queries, keys)),
        "mask": (mask, (B, A)),
    }
    check_shapes("window_attention", wanted, q=q)
    others = as_one_type("window_attention", q=q, k=k, v=v, gate=gate)
    check_keep_mask("window_attention", mask)
    result: Tensor = _operator.dispatch(q)(q, *others, bias, mask)
    return result
