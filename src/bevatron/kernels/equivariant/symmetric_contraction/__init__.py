"""Symmetric contraction: products of an atom's features, coupled to degree L."""

from collections.abc import Mapping, Sequence

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.kernels.shared.checks import check_alike, check_index
from bevatron.maths.irreps import Irreps, Layout, as_layout
from bevatron.maths.symmetric_product import CouplingTensor, symmetric_coefficients

_operator = registry.operator("symmetric_contraction", __name__)


def symmetric_contraction(
    a: Float[Tensor, "N K S"],
    weights: Mapping[int, Sequence[Float[Tensor, "Z _ K"]]],
    elements: Int[Tensor, "N"] | ElementOrder,
    irreps_out: Irreps | str,
    correlation: int,
    coefficients: Mapping[int, Sequence[CouplingTensor]] | None = None,
    layout: Layout = "mul_ir",
) -> Float[Tensor, "N D_out"]:
    r"""Couple products of an atom's features to degree L, channel by channel.

    .. math::

        B_{n,k,LM} = \sum_{\nu=1}^{c} \sum_{\eta} W^{\nu L}_{z_n,\eta,k} \sum_{lm_1 \dots lm_\nu}
        U^{\nu L}_{M,lm_1 \dots lm_\nu,\eta} \prod_{i=1}^{\nu} A_{n,k,lm_i}

    Equations 10 and 11 of Batatia et al., "MACE" (NeurIPS 2022), as mace-torch computes them.
    Raises ConfigError if the coefficients would be too large; ValueError if a shape does not fit
    the others, or the types differ.

    Parameters
    ----------
    a : features A of N atoms in K channels; S = (l_max+1)² components of degrees 0..l_max
    weights : for every degree L of the result, W of order 1, 2, ..., ``correlation``
    elements
        Element of each atom, a row of the weights; or an `ElementOrder`, which is sorted once for
        several operators.
    irreps_out : degrees of the result, K copies each: ``128x0e+128x1o``; the parity is (-1)^L
    correlation : c, the highest order of the products
    coefficients
        For every L, U of order 1 .. c, from a checkpoint; else
        `bevatron.maths.symmetric_product.symmetric_coefficients`, which are mace-torch's.
    layout
        Layout of the result: e3nn's ``mul_ir``, in which the 2L+1 components of a channel are
        contiguous; or ``ir_mul``, in which the channels of a component are.

    Returns
    -------
    Tensor
        The blocks of ``irreps_out`` concatenated, each in the requested layout.

    Examples
    --------
    >>> import torch
    >>> a, elements = torch.ones(2, 8, 4), torch.tensor([0, 1])
    >>> weights = {0: [torch.ones(3, 1, 8), torch.ones(3, 2, 8)]}
    >>> symmetric_contraction(a, weights, elements, "8x0e", 2).shape
    torch.Size([2, 8])
    """
    irreps_out = Irreps.parse(irreps_out)
    l_max = _l_max(a)
    couplings, ordered = [], []
    for block in irreps_out:
        tensors = tuple(
            coefficients[block.l]
            if coefficients is not None
            else (symmetric_coefficients(l_max, block.l, nu) for nu in range(1, correlation + 1))
        )
        if block.mul != a.shape[1] or block.parity != (-1) ** block.l:
            raise ValueError(
                f"symmetric_contraction: '{block}' cannot be made from {a.shape[1]} channels; the "
                "copies must be as many and the parity (-1)^L"
            )
        _check_weights(block.l, weights[block.l], tensors, correlation, a)
        couplings.append(tensors)
        ordered.append(list(weights[block.l]))
    of_atoms = elements.elements if isinstance(elements, ElementOrder) else elements
    if of_atoms.shape != a.shape[:1]:
        raise ValueError(
            f"symmetric_contraction: {tuple(of_atoms.shape)} elements for {a.shape[0]} atoms"
        )
    check_index("symmetric_contraction", "elements", of_atoms, (len(a),), a=a)
    num_elements = {len(weight) for of_degree in ordered for weight in of_degree}
    if isinstance(elements, ElementOrder):
        num_elements.add(elements.num_elements)
    if len(num_elements) > 1:
        raise ValueError(
            "symmetric_contraction: the weights, and the order of elements if it is given, are of "
            f"{', '.join(map(str, sorted(num_elements)))} elements; all must be of as many"
        )
    of_all = [weight for of_degree in ordered for weight in of_degree]
    check_alike("symmetric_contraction", {"a": a, "weights": of_all})
    run = _operator.dispatch(a)
    result: Tensor = run(a, ordered, elements, tuple(couplings), as_layout(layout))
    return result


def _l_max(a: Tensor) -> int:
    l_max = round(a.shape[-1] ** 0.5) - 1 if a.ndim == 3 else -1
    if l_max < 0 or (l_max + 1) ** 2 != a.shape[-1]:
        raise ValueError(
            f"symmetric_contraction: a has shape {tuple(a.shape)}, expected (atoms, channels, "
            "(l_max+1)^2)"
        )
    return l_max


def _check_weights(
    degree: int,
    weights: Sequence[Tensor],
    couplings: Sequence[CouplingTensor],
    correlation: int,
    a: Tensor,
) -> None:
    if not len(weights) == len(couplings) == correlation:
        raise ValueError(
            f"symmetric_contraction: degree {degree} has {len(weights)} weights and "
            f"{len(couplings)} coefficient tensors for correlation {correlation}"
        )
    for nu, (weight, coupling) in enumerate(zip(weights, couplings, strict=True), start=1):
        if weight.ndim != 3 or weight.shape[1:] != (coupling.num_paths, a.shape[1]):
            raise ValueError(
                f"symmetric_contraction: weights of degree {degree}, order {nu} have shape "
                f"{tuple(weight.shape)}, expected (elements, {coupling.num_paths}, {a.shape[1]})"
            )
        if (coupling.l_max + 1) ** 2 != a.shape[2] or coupling.correlation != nu:
            raise ValueError(
                f"symmetric_contraction: coefficients of degree {degree}, order {nu} are for "
                f"l_max {coupling.l_max} and order {coupling.correlation}"
            )
