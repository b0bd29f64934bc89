"""Channelwise tensor product with gather and sum: the messages of an equivariant network."""

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.equivariant.channelwise_tensor_product.paths import (
    Path,
    PathTable,
    path_table,
)
from bevatron.kernels.equivariant.edge_order import EdgeOrder, check_edge_product
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_alike
from bevatron.maths.irreps import Irreps, Layout, as_layout

__all__ = ["EdgeOrder", "Path", "PathTable", "channelwise_tensor_product", "path_table", "paths"]

_operator = registry.operator(
    "channelwise_tensor_product", __name__, takes=support.float32_or_float64
)


def paths(
    irreps_in: Irreps | str, irreps_harmonics: Irreps | str, irreps_out: Irreps | str
) -> PathTable:
    """Return the paths, the irreps of the result and the number of weights; see `path_table`."""
    return path_table(
        Irreps.parse(irreps_in), Irreps.parse(irreps_harmonics), Irreps.parse(irreps_out)
    )


def channelwise_tensor_product(
    x: Float[Tensor, "N D_in"],
    harmonics: Float[Tensor, "E S"],
    weights: Float[Tensor, "E W"],
    edges: Int[Tensor, "2 E"] | EdgeOrder,
    irreps_in: Irreps | str,
    irreps_harmonics: Irreps | str,
    irreps_out: Irreps | str,
    layout: Layout = "mul_ir",
) -> Float[Tensor, "N D_mid"]:
    r"""Couple each sender's features with its edge's harmonics and sum over edges into receivers.

    For every path p = (l1, l2 -> l3), channel k and component m3

    .. math::

        y_{n,p,k,m_3} = \sqrt{2 l_3 + 1} \sum_{e:\, s \to n} w_{e,p,k}
        \sum_{m_1 m_2} C^{l_1 l_2 l_3}_{m_1 m_2 m_3}\, x_{s,k,m_1}\, Y_{e,m_2}

    with the coefficients of `bevatron.maths.so3.wigner_3j`. This is e3nn's `TensorProduct` with
    'uvu' instructions, external weights and its default normalisation, followed by a sum over
    receivers. Raises ConfigError if the irreps cannot be read, the harmonics hold several copies of
    a degree, or there is no such layout; ValueError if a shape does not match the irreps, or the
    types differ.

    Parameters
    ----------
    x : node features, the blocks of ``irreps_in`` concatenated
    harmonics : those of each edge, in the order of ``irreps_harmonics``
    weights : those of each edge, path-major: all channels of the first path, then of the second
    edges
        Row 0 senders, row 1 receivers, in any order; or an `EdgeOrder`, which Triton otherwise
        computes itself.
    irreps_in, irreps_harmonics, irreps_out
        Irreps of ``x``, of ``harmonics`` (one copy of each) and the results. `paths` lists the
        paths in their order; degrees and parities not in ``irreps_out`` are left out.
    layout
        Memory layout of a block of ``x`` and of the result: e3nn's ``mul_ir``, in which the 2l+1
        components of a channel are contiguous; or ``ir_mul``, in which the channels of a component
        are, which is faster.

    Returns
    -------
    Tensor
        The blocks of `paths(...).irreps_mid`, one per path. Zero for a node without edges.

    Examples
    --------
    >>> import torch
    >>> x, Y = torch.ones(2, 8), torch.ones(1, 4)
    >>> w, edges = torch.ones(1, 16), torch.tensor([[0], [1]])
    >>> channelwise_tensor_product(x, Y, w, edges, "8x0e", "0e+1o", "0e+1o").shape
    torch.Size([2, 32])
    """
    irreps_in, irreps_harmonics = Irreps.parse(irreps_in), Irreps.parse(irreps_harmonics)
    table = path_table(irreps_in, irreps_harmonics, Irreps.parse(irreps_out))
    num_edges = check_edge_product(
        "channelwise_tensor_product", x, harmonics, edges, irreps_in, irreps_harmonics
    )
    if tuple(weights.shape) != (num_edges, table.num_weights):
        raise ValueError(
            f"channelwise_tensor_product: weights has shape {tuple(weights.shape)}, expected "
            f"{(num_edges, table.num_weights)} for '{irreps_in}' times '{irreps_harmonics}'"
        )
    given = {"x": x, "harmonics": harmonics, "weights": weights}
    check_alike("channelwise_tensor_product", given)
    run = _operator.dispatch(x)
    result: Tensor = run(
        x, harmonics, weights, edges, irreps_in, irreps_harmonics, table, as_layout(layout)
    )
    return result
