"""Linear map between equivariant features: one weight matrix per degree."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_alike, check_axes

__all__ = ["equivariant_linear"]

_operator = registry.operator("equivariant_linear", __name__, takes=support.float32_or_float64)


def equivariant_linear(
    x: Float[Tensor, "N D_in"],
    weights: Sequence[Float[Tensor, "_ _"]],
    blocks: Sequence[int] | None = None,
    scale: float = 1.0,
) -> Float[Tensor, "N D_out"]:
    r"""Mix the channels of each degree, with the same weights for every component.

    .. math::

        y_{n,l,m,j} = \frac{s}{\sqrt{K_l}} \sum_{k=1}^{K_l} x_{n,l,m,k} \, W^l_{k,j}

    e3nn's ``Linear`` in the layout ``ir_mul``, in which the channels of a component are contiguous.
    Raises ValueError if a shape does not fit the others, or the types differ.

    Parameters
    ----------
    x
        Features of degree 0, 1, ..., of one or several blocks each, as `channelwise_tensor_product`
        returns them for ``layout="ir_mul"``.
    weights : one matrix [K_l, J_l] per degree; K_l is the number of channels of all its blocks
    blocks : number of blocks of each degree, equally wide; 1 by default
    scale : s

    Returns
    -------
    Tensor
        One block per degree, in the same layout.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    >>> equivariant_linear(x, [torch.tensor([[2.0]]), torch.tensor([[-1.0]])])
    tensor([[ 2., -2., -3., -4.]])
    """
    blocks = [1] * len(weights) if blocks is None else list(blocks)
    try:
        rows = [rows for rows, _ in (weight.shape for weight in weights)]
    except ValueError:
        for weight in weights:
            check_axes("equivariant_linear", "[channels, channels]", weights=weight)
        raise
    widths = [(2 * degree + 1) * number for degree, number in enumerate(rows)]
    if x.ndim != 2 or x.shape[1] != sum(widths) or len(blocks) != len(weights):
        raise ValueError(
            f"equivariant_linear: features {tuple(x.shape)} in {blocks} blocks do not go with "
            f"weights {[tuple(weight.shape) for weight in weights]} of degrees 0, 1, ..."
        )
    if any(width % number for width, number in zip(rows, blocks, strict=True)):
        raise ValueError(f"equivariant_linear: {rows} channels cannot be in {blocks} equal blocks")
    check_alike("equivariant_linear", {"x": x, "weights": weights})
    run = _operator.dispatch(x)
    result: Tensor = run(x, list(weights), blocks, scale)
    return result
