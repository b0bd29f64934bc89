"""Indexed linear map: the channels of each atom times the matrix of its element."""

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.kernels.shared.checks import check_alike, check_index

_operator = registry.operator("indexed_linear", __name__)


def indexed_linear(
    x: Float[Tensor, "N K M"],
    weights: Float[Tensor, "Z K J"],
    elements: Int[Tensor, "N"] | ElementOrder,
    scale: float = 1.0,
) -> Float[Tensor, "N J M"]:
    r"""Multiply the channels of each atom by the matrix of its element.

    .. math::

        y_{n,j,m} = s \sum_k W_{z_n,k,j} \, x_{n,k,m}

    MACE's skip connection (mace-torch: ``skip_tp``, a product with a one-hot vector of elements).
    Raises ValueError if a shape does not fit the others, or the types differ.

    Parameters
    ----------
    x : features of N atoms: K channels of M components, in any memory layout
    weights : one matrix per element
    elements
        Element of each atom; or an `ElementOrder`, which is sorted once for several operators.
    scale : s, usually 1 / sqrt(K)

    Returns
    -------
    Tensor
        From Triton, components come before channels in memory, [N, M, J], if they do in ``x``.
        Triton gives NaN for an element that is not in 0..Z-1; the reference raises RuntimeError.

    Examples
    --------
    >>> import torch
    >>> x, weights = torch.ones(2, 3, 1), torch.stack([torch.eye(3), 2 * torch.eye(3)])
    >>> indexed_linear(x, weights, torch.tensor([1, 0])).squeeze(2)
    tensor([[2., 2., 2.],
            [1., 1., 1.]])
    """
    of_atoms = elements.elements if isinstance(elements, ElementOrder) else elements
    if x.ndim != 3 or weights.ndim != 3 or x.shape[1] != weights.shape[1]:
        raise ValueError(
            f"indexed_linear: features {tuple(x.shape)} do not go with weights "
            f"{tuple(weights.shape)}; expected (atoms, channels, components) and "
            "(elements, channels, channels of the result)"
        )
    if of_atoms.shape != x.shape[:1]:
        raise ValueError(f"indexed_linear: {tuple(of_atoms.shape)} elements for {len(x)} atoms")
    check_index("indexed_linear", "elements", of_atoms, (len(x),), x=x)
    if len(x) and not len(weights):
        raise ValueError(f"indexed_linear: weights of no element for {len(x)} atoms")
    order = ElementOrder.of(elements, weights.shape[0])
    if order.num_elements != weights.shape[0]:
        raise ValueError(
            f"indexed_linear: the order is of {order.num_elements} elements, the weights of "
            f"{weights.shape[0]}"
        )
    check_alike("indexed_linear", {"x": x, "weights": weights})
    run = _operator.dispatch(x)
    result: Tensor = run(x, weights, order, scale)
    return result
