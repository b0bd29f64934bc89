"""Channelwise tensor product whose weights are the last linear layer of a radial network."""

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder, path_table
from bevatron.kernels.equivariant.edge_order import check_edge_product
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_alike, check_axes
from bevatron.maths.irreps import Irreps, Layout, as_layout

__all__ = ["EdgeOrder", "radial_tensor_product"]

_operator = registry.operator("radial_tensor_product", __name__, takes=support.float32_or_float64)


def radial_tensor_product(
    x: Float[Tensor, "N D_in"],
    harmonics: Float[Tensor, "E S"],
    hidden: Float[Tensor, "E H"],
    last_weight: Float[Tensor, "H W"],
    edges: Int[Tensor, "2 E"] | EdgeOrder,
    irreps_in: Irreps | str,
    irreps_harmonics: Irreps | str,
    irreps_out: Irreps | str,
    layout: Layout = "mul_ir",
) -> Float[Tensor, "N D_mid"]:
    r"""Compute `channelwise_tensor_product` with the weights :math:`w_e = h_e W`.

    The weights, P K per edge, are by far the largest tensor of a message passing step and depend on
    a few dozen hidden features. The Triton implementation computes them for a few thousand edges at
    a time, again in the backward and double backward passes, and never stores all of them.
    Raises ConfigError if the irreps cannot be read or the harmonics hold several copies of a
    degree; ValueError if a shape does not match the irreps, or the types differ.

    Parameters
    ----------
    x, harmonics, edges, irreps_in, irreps_harmonics, irreps_out, layout
        See `channelwise_tensor_product`.
    hidden
        Input of the last layer of the radial network. A factor that all weights of an edge share,
        such as a cutoff, can be multiplied into it.
    last_weight : weight of that layer, normalisation included; it has no bias and no activation

    Returns
    -------
    Tensor
        See `channelwise_tensor_product`.

    Examples
    --------
    >>> import torch
    >>> x, Y = torch.ones(2, 8), torch.ones(1, 4)
    >>> h, W, edges = torch.ones(1, 3), torch.ones(3, 16), torch.tensor([[0], [1]])
    >>> radial_tensor_product(x, Y, h, W, edges, "8x0e", "0e+1o", "0e+1o").shape
    torch.Size([2, 32])
    """
    irreps_in, irreps_harmonics = Irreps.parse(irreps_in), Irreps.parse(irreps_harmonics)
    table = path_table(irreps_in, irreps_harmonics, Irreps.parse(irreps_out))
    try:
        width = last_weight.shape[0]
    except IndexError:
        check_axes("radial_tensor_product", "[hidden, weights]", last_weight=last_weight)
        raise
    num_edges = check_edge_product(
        "radial_tensor_product", x, harmonics, edges, irreps_in, irreps_harmonics
    )
    for name, tensor, shape in (
        ("hidden", hidden, (num_edges, width)),
        ("last_weight", last_weight, (width, table.num_weights)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"radial_tensor_product: {name} has shape {tuple(tensor.shape)}, expected {shape}"
            )
    given = {"x": x, "harmonics": harmonics, "hidden": hidden, "last_weight": last_weight}
    check_alike("radial_tensor_product", given)
    run = _operator.dispatch(x)
    result: Tensor = run(
        x,
        harmonics,
        hidden,
        last_weight,
        edges,
        irreps_in,
        irreps_harmonics,
        table,
        as_layout(layout),
    )
    return result
