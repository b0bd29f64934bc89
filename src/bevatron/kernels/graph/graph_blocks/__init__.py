"""The building blocks of attention on graphs, each differentiable, on a `Csr`.

Besta et al., SC 2023, section 5. Dense matrices are [n, K] or, per head, [n, H, K]; edge values are
[nnz] or [nnz, H], in CSR order. No block ever holds an n x n matrix, or more than a chunk of an
edges x features one. `bevatron.kernels.graph.spmm` multiplies a sparse by a dense matrix.
"""

from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.graph.csr import Csr, no_argument
from bevatron.kernels.graph.graph_blocks import products
from bevatron.kernels.graph.graph_blocks.pieces import piece_elements
from bevatron.kernels.graph.graph_blocks.sampled import Formula, Leaf, sampled
from bevatron.kernels.shared.checks import (
    FLOATING_TYPES,
    check_alike,
    check_axes,
    check_devices,
    not_floating_point,
)

__all__ = [
    "Formula",
    "Leaf",
    "column_sum",
    "graph_softmax",
    "mspmm",
    "piece_elements",
    "replicate",
    "row_sum",
    "sampled",
    "sddmm",
    "spmmm",
    "weighted_sum",
]

Axis = Literal["row", "column"]

for _name in (
    *("sddmm", "weighted_sum", "row_sum", "column_sum"),
    *("replicate_rows", "replicate_columns", "graph_softmax"),
):
    registry.operator(_name, __name__, triton=None)


def sddmm(
    csr: Csr, x: Float[Tensor, "n *#heads K"], y: Float[Tensor, "m *#heads K"]
) -> Float[Tensor, "nnz *heads_out"]:
    r"""Sample the dense product x y^T where the matrix has entries.

    .. math:: s_{ij} = a_{ij} \langle x_i, y_j \rangle

    Parameters
    ----------
    csr : n x m; its values multiply the products
    x, y : features of rows and columns; 16-bit types are multiplied and accumulated in float32

    Returns
    -------
    Tensor
        In the order of the rows, float32 or float64.

    Examples
    --------
    >>> import torch
    >>> from bevatron.kernels.graph.csr import Csr
    >>> csr = Csr.from_coo(torch.tensor([0, 1]), torch.tensor([1, 1]), (2, 2))
    >>> sddmm(csr, torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([3., 4.])
    """
    _check_rows("sddmm", csr, "row", x=x)
    _check_rows("sddmm", csr, "column", y=y)
    if x.shape[-1:] != y.shape[-1:]:
        raise ValueError(f"sddmm: x {tuple(x.shape)} and y {tuple(y.shape)} differ in channels")
    plain = x.ndim == 2
    sampled_products: Tensor = registry.dispatch("sddmm", x)(csr, _headed(x), _headed(y))
    if csr.values is not None:
        sampled_products = sampled_products * csr.values[:, None]
    return sampled_products[:, 0] if plain else sampled_products


def weighted_sum(
    csr: Csr, values: Float[Tensor, "nnz *#heads"] | None, x: Float[Tensor, "m *#heads K"]
) -> Float[Tensor, "n *heads_out K"]:
    r"""Multiply a sparse with a dense matrix, one sparse matrix per head on one structure.

    .. math:: z_{ih} = \sum_j s_{ijh} x_{jh}

    Parameters
    ----------
    csr : the structure; its own values are ignored
    values : values of the entries; None: all ones
    x : features of the columns
    """
    _check_rows("weighted_sum", csr, "column", x=x)
    if values is not None:
        _check_rows("weighted_sum", csr, None, values=values)
    held = values[:, None] if values is not None and values.ndim == 1 else values
    result = products.weighted_sum(csr, held, _headed(x))
    return result[:, 0] if x.ndim == 2 and result.shape[1] == 1 else result


def spmmm(csr: Csr, x: Float[Tensor, "m K"], weight: Float[Tensor, "K J"]) -> Float[Tensor, "n J"]:
    r"""Multiply a sparse, a tall and a small matrix, S x W, the entries at the narrower width.

    (S x) W reads K numbers per entry, S (x W) reads J.
    """
    try:
        (m, K), (_, J) = x.shape, weight.shape
        shape = csr.shape
    except ValueError:
        check_axes("spmmm", "[rows, channels]", x=x, weight=weight)
        raise
    except AttributeError as error:
        raise no_argument("spmmm", csr, x=x, weight=weight) or error from None
    if m != shape[1] or len(weight) != K:
        raise no_argument("spmmm", csr) or ValueError(
            f"spmmm: x {tuple(x.shape)} and weight {tuple(weight.shape)} do not go with each other "
            f"and a matrix {shape}"
        )
    check_alike("spmmm", {"x": x, "weight": weight})
    if J < K:
        return weighted_sum(csr, csr.values, x @ weight)
    return weighted_sum(csr, csr.values, x) @ weight


def mspmm(x: Float[Tensor, "n K"], csr: Csr, y: Float[Tensor, "m J"]) -> Float[Tensor, "K J"]:
    r"""Multiply a wide, a sparse and a tall matrix, x^T S y, the entries at the narrower width.

    The gradient of a layer's weights, H^T (S^T G), is such a product.
    """
    try:
        (n, K), (m, J) = x.shape, y.shape
        shape = csr.shape
    except ValueError:
        check_axes("mspmm", "[rows, channels]", x=x, y=y)
        raise
    except AttributeError as error:
        raise no_argument("mspmm", csr, x=x, y=y) or error from None
    if (n, m) != shape:
        raise no_argument("mspmm", csr) or ValueError(
            f"mspmm: x {tuple(x.shape)} and y {tuple(y.shape)} do not go with a matrix {shape}"
        )
    check_alike("mspmm", {"x": x, "y": y})
    if K < J:
        flipped = csr.transpose()
        return weighted_sum(flipped, flipped.values, x).mT @ y
    return x.mT @ weighted_sum(csr, csr.values, y)


def row_sum(csr: Csr, values: Float[Tensor, "nnz *heads"]) -> Float[Tensor, "n *heads"]:
    """Sum the values on the entries of every row; an empty row gives 0."""
    return _edgewise("row_sum", csr, values=values)


def column_sum(csr: Csr, values: Float[Tensor, "nnz *heads"]) -> Float[Tensor, "m *heads"]:
    """Sum the values on the entries of every column."""
    return _edgewise("column_sum", csr, values=values)


def graph_softmax(csr: Csr, scores: Float[Tensor, "nnz *heads"]) -> Float[Tensor, "nnz *heads"]:
    r"""Softmax over the entries of every row.

    .. math:: p_{ij} = e^{s_{ij}} / \sum_{j' \in N(i)} e^{s_{ij'}}

    Scores may be of any size: the row maximum is subtracted first.
    """
    return _edgewise("graph_softmax", csr, scores=scores)


def replicate(
    csr: Csr, vector: Float[Tensor, "vertices *heads"], axis: Axis = "row"
) -> Float[Tensor, "nnz *heads"]:
    """Give every entry the value of its row (u 1^T) or of its column (1 v^T).

    Raises ValueError if there is no such axis, or not one value for each row or column.
    """
    if axis not in get_args(Axis):
        raise ValueError(f"replicate: axis is '{axis}', expected {' or '.join(get_args(Axis))}")
    name = "replicate_rows" if axis == "row" else "replicate_columns"
    _check_rows("replicate", csr, axis, vector=vector)
    plain = vector.ndim == 1
    held = vector[:, None] if plain else vector
    result: Tensor = registry.dispatch(name, vector)(csr, held)
    return result[:, 0] if plain else result


def _edgewise(name: str, csr: Csr, **of_edges: Tensor) -> Tensor:
    _check_rows(name, csr, None, **of_edges)
    (values,) = of_edges.values()
    plain = values.ndim == 1
    held = values[:, None] if plain else values
    result: Tensor = registry.dispatch(name, values)(csr, held)
    return result[:, 0] if plain else result


def _headed(x: Tensor) -> Tensor:
    return x[:, None] if x.ndim == 2 else x


def _check_rows(operator: str, csr: Csr, axis: Axis | None, **given: Tensor) -> None:
    """Refuse a tensor without a row for each of what it belongs to, or not where the matrix is."""
    try:
        expected = csr.nnz if axis is None else csr.shape[axis == "column"]
        for name, tensor in given.items():
            if tensor.dtype not in FLOATING_TYPES:
                raise not_floating_point(operator, name, tensor)
            rows = len(tensor) if tensor.dim() else 0
            if rows != expected or not tensor.dim():
                raise no_argument(operator, csr, **given) or ValueError(
                    f"{operator}: {name} has {rows} rows, expected {expected} to go with the matrix"
                )
        check_devices(operator, **given, matrix=csr.col)
    except AttributeError as error:
        raise no_argument(operator, csr, **given) or error from None
