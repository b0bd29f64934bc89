"""Tensors that several operators of a block read: atoms, messages, the bias.

Autograd would sum the gradients that come back from the operators, with one launch each. Here
every operator returns the tensor for its next reader, so that the gradient comes back along the
same path and each operator adds its term where it writes. `Shared` holds what the last reader
returned, so that a forward reads like its equation.
"""

from torch import Tensor

from bevatron.kernels.molecule.bonds import Bonds
from bevatron.kernels.molecule.linear import linear_with_input
from bevatron.kernels.molecule.molecule_attention import molecule_attention_with_bias
from bevatron.kernels.molecule.neighbour_sums import neighbour_sums_with_inputs
from bevatron.kernels.molecule.segment_sum import segment_sum_with_input


class Shared:
    """A tensor for several readers.

    Attributes
    ----------
    value : the tensor returned by the last reader; any other use must come last
    """

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


def linear_of(x: Shared, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x W^T + b``."""
    y, x.value = linear_with_input(x.value, weight, bias)
    return y


def sums_of(x: Shared, ptr: Tensor, scale: Tensor | None = None) -> Tensor:
    """Sum the rows of each molecule, times their factors."""
    total, x.value = segment_sum_with_input(x.value, ptr, scale)
    return total


def neighbour_sums_of(
    messages: Shared,
    x: Shared | None,
    bonds: Bonds,
    *,
    scale: Tensor | None = None,
    outgoing: bool = True,
) -> Tensor:
    """Sum messages and neighbours over the bonds, the atom itself last; see `neighbour_sums`."""
    nodes = None if x is None else x.value
    sums, passed, near = neighbour_sums_with_inputs(
        messages.value, nodes, bonds, scale=scale, outgoing=outgoing, own=x is not None
    )
    assert passed is not None
    messages.value = passed
    if x is not None and near is not None:
        x.value = near
    return sums


def attention_of(
    qkv: Tensor,
    bias: Shared | None,
    graph_ptr: Tensor,
    pair_ptr: Tensor,
    scale: float,
    *,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    """Compute ``softmax(q k^T scale + B) v`` within molecules, [N, H, D]."""
    found, passed = molecule_attention_with_bias(
        qkv,
        None,
        None,
        None if bias is None else bias.value,
        graph_ptr,
        pair_ptr,
        scale,
        dropout=dropout,
        seed=seed,
    )
    if bias is not None and passed is not None:
        bias.value = passed
    return found
