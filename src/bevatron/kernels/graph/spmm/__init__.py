"""Product of a sparse matrix and features, over the semirings sum, mean, max and min."""

import math
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.graph.csr import Csr, no_argument
from bevatron.kernels.shared.checks import check_devices

__all__ = ["Reduce", "spmm"]

_operator = registry.operator("spmm", __name__)

Reduce = Literal["sum", "mean", "max", "min"]


def spmm(
    csr: Csr, x: Float[Tensor, "columns *features"], reduce: Reduce = "sum"
) -> Float[Tensor, "rows *features"]:
    r"""Aggregate the features of the columns stored in every row.

    ========  ==========================================  ================================
    sum       :math:`z_i = \sum_j a_{ij} x_j`             the matrix product
    mean      :math:`z_i = \sum_j a_{ij} x_j / \sum_j a`  the semiring of pairs (a x, a)
    max, min  :math:`z_i = \max_j (a_{ij} + x_j)`         tropical: 0 is an entry's identity
    ========  ==========================================  ================================

    A matrix without values has ones for sum and mean and zeros for max and min. Raises ValueError
    if ``x`` does not have a row for every column, an argument is no `Csr` or tensor, or there is no
    such semiring.

    Parameters
    ----------
    csr : values get a gradient if they require one
    x : [columns, ...], float64, float32 or 16-bit
    reduce : the semiring

    Returns
    -------
    Tensor
        Same type as ``x``; zero for a row without entries. The gradient of max and min goes to
        the first column (the lowest number) among equals.

    Examples
    --------
    >>> import torch
    >>> csr = Csr.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), (2, 2))
    >>> spmm(csr, torch.tensor([[2.0, 5.0], [4.0, 3.0]]), "max")
    tensor([[4., 5.],
            [0., 0.]])
    """
    try:
        if x.ndim == 0 or len(x) != csr.shape[1]:
            raise no_argument("spmm", csr, x=x) or ValueError(
                f"spmm: x has shape {tuple(x.shape)}, expected a row for each of {csr.shape[1]} "
                "columns"
            )
        check_devices("spmm", x=x, matrix=csr.col, values=csr.values)
    except AttributeError as error:
        raise no_argument("spmm", csr, x=x) or error from None
    if reduce not in get_args(Reduce):
        raise ValueError(f"spmm: reduce is '{reduce}', expected {', '.join(get_args(Reduce))}")
    flat = x.reshape(len(x), 1, math.prod(x.shape[1:]))
    result: Tensor = _operator.dispatch(x)(csr, flat, reduce)
    return result.reshape(csr.shape[0], *x.shape[1:])
