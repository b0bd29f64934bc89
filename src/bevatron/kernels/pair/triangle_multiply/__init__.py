"""The triangle multiplications of AlphaFold2 and 3: outgoing and incoming edges."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.pair.triangle_multiply.contraction import Contraction
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_axes, check_shapes

__all__ = ["Contraction", "triangle_multiply"]


def _for_hopper(device: torch.device, dtype: torch.dtype) -> str | None:
    from bevatron.kernels.pair.triangle_multiply.triton_launch import HOPPER_WIDTH, is_hopper

    if dtype.itemsize != 2 or not is_hopper(device):
        return None
    return f"kernels for Hopper take long pairs of {HOPPER_WIDTH} channels"


_operator = registry.operator(
    "triangle_multiply", __name__, takes=support.up_to_float32, special=_for_hopper
)


def triangle_multiply(
    z: Float[Tensor, "*batch R N C"],
    mask: Float[Tensor, "*batch R N"] | Bool[Tensor, "*batch R N"] | None,
    norm_in_weight: Float[Tensor, "C"],
    norm_in_bias: Float[Tensor, "C"],
    a_weight: Float[Tensor, "H C"],
    a_gate_weight: Float[Tensor, "H C"],
    b_weight: Float[Tensor, "H C"],
    b_gate_weight: Float[Tensor, "H C"],
    norm_out_weight: Float[Tensor, "H"],
    norm_out_bias: Float[Tensor, "H"],
    out_weight: Float[Tensor, "C H"],
    out_gate_weight: Float[Tensor, "C C"],
    a_bias: Float[Tensor, "H"] | None = None,
    a_gate_bias: Float[Tensor, "H"] | None = None,
    b_bias: Float[Tensor, "H"] | None = None,
    b_gate_bias: Float[Tensor, "H"] | None = None,
    out_bias: Float[Tensor, "C"] | None = None,
    out_gate_bias: Float[Tensor, "C"] | None = None,
    *,
    outgoing: bool = True,
    eps: float = 1e-5,
    drop: Float[Tensor, "*batch N C"] | None = None,
    residual: bool = False,
    contraction: Contraction | None = None,
) -> Float[Tensor, "*batch R N C"]:
    r"""Update every edge of the pair from the other two edges of its triangles.

    .. math::

        n &= \operatorname{LayerNorm}(z), \qquad
        a = m \odot \sigma(W_{ag} n) \odot W_a n, \qquad
        b = m \odot \sigma(W_{bg} n) \odot W_b n \\
        x_{ij} &= \sum_k a_{ik} \odot b_{jk} \;\text{(outgoing)}, \qquad
        x_{ij} = \sum_k a_{ki} \odot b_{kj} \;\text{(incoming)} \\
        y &= \sigma(W_g n) \odot W_o \operatorname{LayerNorm}(x)

    and a bias in every linear layer that has one. AlphaFold2, algorithms 11 and 12 (with
    biases); AlphaFold3, algorithms 12 and 13 (without). The backward pass saves z, n, a, b, x and
    four float32 numbers per edge; n, a and b of a pair of 1 GiB or more it computes again. Raises
    ValueError if a shape does not match, naming the argument; KernelError if Triton is requested
    and cannot run. The kernel takes bfloat16, float16 and float32, up to 256 channels, and has
    first derivatives; the reference is differentiable to any order.

    Parameters
    ----------
    z
        [..., N, N, C], the pair; its channels must be contiguous, its other axes may have any
        strides (a transposed pair is read in place).
    mask : [..., N, N], 1 or True for edges that exist; no gradient is computed for it
    norm_in_weight, norm_in_bias : [C]: ``layer_norm_in`` of OpenFold's and Protenix's state dicts
    a_weight, a_gate_weight, b_weight, b_gate_weight
        [H, C]: ``linear_a_p``, ``linear_a_g``, ``linear_b_p``, ``linear_b_g``.
    norm_out_weight, norm_out_bias : [H]: ``layer_norm_out``
    out_weight, out_gate_weight : [C, H] and [C, C]: ``linear_z`` and ``linear_g``
    a_bias, a_gate_bias, b_bias, b_gate_bias, out_bias, out_gate_bias : biases of the linear layers
    outgoing : whether outgoing edges are multiplied, or incoming ones
    eps : added to the variances of both norms
    drop : [..., N, C], a dropout mask for y that rows share, 0 or ``1 / (1 - rate)``
    residual : whether z is added to the update, in the same kernels in both passes
    contraction : computes x if z is R rows of a pair whose other rows are on other devices

    Returns
    -------
    Tensor
        [..., N, N, C], of the type of ``z``: y, times ``drop``, plus z if ``residual``. Weights of
        another type are rounded to that of ``z`` for the matmuls; their gradients are summed in
        float32 in a fixed order and have the type of the weights.

    Examples
    --------
    >>> import torch
    >>> draw, one, zero = torch.randn, torch.ones(8), torch.zeros(8)
    >>> w = [draw(8, 8) for _ in range(6)]
    >>> triangle_multiply(
    ...     draw(5, 5, 8), torch.ones(5, 5), one, zero, *w[:4], one, zero, *w[4:], outgoing=False
    ... ).shape
    torch.Size([5, 5, 8])
    """
    if not isinstance(outgoing, bool):
        raise ValueError(  # noqa: TRY004  as every argument that does not fit
            f"triangle_multiply: outgoing is {outgoing!r}, expected True or False"
        )
    try:
        *batch, R, N, C = z.shape
        H = a_weight.shape[0]
    except (IndexError, ValueError):
        check_axes("triangle_multiply", "[..., N, N, C]", z=z)
        check_axes("triangle_multiply", "[H, C]", a_weight=a_weight)
        raise
    wanted = {
        "z": (z, (*batch, N if contraction is None else R, N, C)),
        "mask": (mask, (*batch, R, N)),
        "drop": (drop, (*batch, N, C)),
        "norm_in_weight": (norm_in_weight, (C,)),
        "norm_in_bias": (norm_in_bias, (C,)),
        "a_weight": (a_weight, (H, C)),
        "a_gate_weight": (a_gate_weight, (H, C)),
        "b_weight": (b_weight, (H, C)),
        "b_gate_weight": (b_gate_weight, (H, C)),
        "norm_out_weight": (norm_out_weight, (H,)),
        "norm_out_bias": (norm_out_bias, (H,)),
        "out_weight": (out_weight, (C, H)),
        "out_gate_weight": (out_gate_weight, (C, C)),
        "a_bias": (a_bias, (H,)),
        "a_gate_bias": (a_gate_bias, (H,)),
        "b_bias": (b_bias, (H,)),
        "b_gate_bias": (b_gate_bias, (H,)),
        "out_bias": (out_bias, (C,)),
        "out_gate_bias": (out_gate_bias, (C,)),
    }
    check_shapes("triangle_multiply", wanted, z=z, a_weight=a_weight)
    run = _operator.dispatch(z)
    tensors = (tensor for tensor, _ in wanted.values())
    result: Tensor = run(*tensors, outgoing, eps, residual, contraction)
    return result
