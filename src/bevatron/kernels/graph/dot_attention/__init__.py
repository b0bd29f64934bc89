"""Dot-product attention over the entries of a sparse matrix: VA, AGNN, transformers."""

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.graph.csr import Csr, no_argument
from bevatron.kernels.graph.dot_attention import partial
from bevatron.kernels.shared.checks import (
    check_axes,
    check_devices,
    check_float64,
    check_shapes,
)
from bevatron.kernels.shared.dtypes import wide

__all__ = ["dot_attention", "inverse_norm", "partial"]

_operator = registry.operator("dot_attention", __name__)

SMALLEST_NORM = 1e-12
"""Smallest length by which a vector is divided."""


def dot_attention(
    csr: Csr,
    x: Float[Tensor, "columns H C"],
    *,
    query: Float[Tensor, "rows H C"] | None = None,
    value: Float[Tensor, "columns H D"] | None = None,
    normalize: bool = False,
    softmax: bool = False,
    scale: float | Tensor = 1.0,
) -> Float[Tensor, "rows H _"]:
    r"""Attend by the dot product of row and column: score and sum in one pass over entries.

    For row i, head h and the columns j stored in row i

    .. math::

        z_{ih} = \sum_j a_{ij}\, f_j\big(\beta\, \langle u_{ih}, w_{jh}\rangle\big)\, v_{jh}

    with u = q and w = x, or both normalised to unit length (cosine), f the softmax over j or the
    identity, and the matrix's values a. Four models are

    ==================================  ============================================
    VA (Besta et al., equation 11)      ``dot_attention(csr, x)``
    VA with softmax (transformer)       ``softmax=True, scale=1 / sqrt(C)``
    AGNN as in the paper's artifact     ``normalize=True``
    AGNN (Thekumparampil et al., 2018)  ``normalize=True, softmax=True, scale=beta``
    ==================================  ============================================

    Multiply by the weight matrix afterwards: one load then serves both the score and the sum.
    Raises ValueError if a shape does not match, naming the argument.

    Parameters
    ----------
    csr : values multiply the attention after the softmax; they get a gradient if they require one
    x : keys, and values unless ``value`` is given; float64, float32 or 16-bit
    query
        q; ``x`` itself if not given, for a square matrix. For a block of a larger matrix it holds
        the rows' vectors and ``x`` the columns'.
    value : v, with its own number of channels; ``x`` if not given, which saves a load per entry
    normalize : whether q and x are divided by their lengths in the score (a zero vector by 1e-12)
    softmax : whether the scores of each row go through a softmax
    scale : beta; a tensor with one element or one for each head gets a gradient

    Returns
    -------
    Tensor
        Same type as ``x``; zero for a row without entries.

    Examples
    --------
    >>> csr = Csr.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), (2, 2))
    >>> x = torch.tensor([[[2.0]], [[4.0]]])
    >>> dot_attention(csr, x).flatten()  # 2 * 2 * 2 + 2 * 4 * 4
    tensor([40.,  0.])
    >>> dot_attention(csr, x, normalize=True).flatten()
    tensor([6., 0.])
    """
    _check(csr, x, query, value)
    run = _operator.dispatch(x)
    row_scale, col_scale = _scales(x, query, normalize, scale)
    if row_scale is not None:
        row_scale = row_scale.expand(csr.shape[0], x.shape[1])
    result: Tensor = run(
        *(csr, x if query is None else query, x, x if value is None else value),
        *(row_scale, col_scale, softmax),
    )
    return result


def inverse_norm(x: Float[Tensor, "N H C"]) -> Float[Tensor, "N H"]:
    """Compute 1 / max(length, 1e-12) of every vector; a capped length has zero gradient.

    Examples
    --------
    >>> inverse_norm(torch.tensor([[[3.0, 4.0]]]))
    tensor([[0.2000]])
    """
    square = wide(x).square().sum(-1)
    tiny = square <= SMALLEST_NORM**2
    # The inner `where` keeps the derivative of the root finite in lanes that the outer one drops.
    inverse = torch.where(tiny, 1.0, square).rsqrt()
    return torch.where(tiny, 1.0 / SMALLEST_NORM, inverse)


def _scales(
    x: Tensor, query: Tensor | None, normalize: bool, scale: float | Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the factors of the scores per row and per column."""
    col_scale = row_scale = None
    if normalize:
        col_scale = inverse_norm(x)
        row_scale = col_scale if query is None else inverse_norm(query)
    if isinstance(scale, Tensor):
        if scale.numel() not in {1, x.shape[1]}:
            raise ValueError(
                f"dot_attention: scale has {scale.numel()} elements, expected one or one for each "
                f"of the {x.shape[1]} heads"
            )
        check_devices("dot_attention", x=x, scale=scale)
        beta = wide(scale).reshape(1, -1)
    elif scale == 1.0:
        return row_scale, col_scale
    else:
        beta = torch.full((1, 1), scale, dtype=wide(x).dtype, device=x.device)
    return (beta if row_scale is None else row_scale * beta), col_scale


def _check(csr: Csr, x: Tensor, query: Tensor | None, value: Tensor | None) -> None:
    try:
        if x.dim() != 3 or len(x) != csr.shape[1]:
            raise no_argument("dot_attention", csr, x=x) or ValueError(
                f"dot_attention: x has shape {tuple(x.shape)}, expected [columns, heads, channels] "
                f"with {csr.shape[1]} columns"
            )
        check_devices("dot_attention", x=x, matrix=csr.col, values=csr.values)
    except AttributeError as error:
        raise no_argument("dot_attention", csr, x=x) or error from None
    if query is None and csr.shape[0] != csr.shape[1]:
        raise ValueError(
            f"dot_attention: a matrix of shape {csr.shape} is not square and needs a query"
        )
    columns, heads, channels = x.shape
    try:
        width = 0 if value is None else value.shape[2]
    except (AttributeError, IndexError):
        check_axes("dot_attention", "[columns, heads, channels]", value=value)
        raise
    wanted = {
        "query": (query, (csr.shape[0], heads, channels)),
        "value": (value, (columns, heads, width)),
    }
    check_shapes("dot_attention", wanted, x=x)
    check_float64("dot_attention", x=x, query=query, value=value)
