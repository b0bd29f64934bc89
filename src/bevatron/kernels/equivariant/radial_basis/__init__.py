"""Bessel functions of edge lengths times a smooth cutoff."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_axes, check_shapes

__all__ = ["radial_basis"]

_operator = registry.operator("radial_basis", __name__, takes=support.float32_or_float64)


def radial_basis(
    lengths: Float[Tensor, " E"],
    frequencies: Float[Tensor, " B"],
    prefactor: Float[Tensor, ""],
    r_max: Float[Tensor, ""],
    order: int,
) -> Float[Tensor, "E B"]:
    r"""Compute :math:`c\, \frac{\sin(w_b r)}{r}\, u(r / r_{max})`.

    u is the polynomial that decays from 1 to 0 with two continuous derivatives; see
    `bevatron.maths.radial`. Equations 7 and 8 of Gasteiger et al., "Directional message passing"
    (ICLR 2020). Raises KernelError if Triton is requested and cannot run. The kernel differentiates
    twice, in the lengths only.

    Parameters
    ----------
    lengths : Å, above zero
    frequencies, prefactor, r_max
        w in 1/Å, c and the cutoff in Å; only the reference differentiates with respect to them.
    order : p of the polynomial, at least 2

    Examples
    --------
    >>> import torch
    >>> from bevatron.maths.radial import bessel_parameters
    >>> r = torch.tensor([1.0], dtype=torch.float64)
    >>> radial_basis(r, *bessel_parameters(5.0, 2), torch.tensor(5.0).double(), 5).round(decimals=4)
    tensor([[0.3700, 0.5987]], dtype=torch.float64)
    """
    try:
        (E,), (B,) = lengths.shape, frequencies.shape
    except ValueError:
        check_axes("radial_basis", "[edges]", lengths=lengths)
        check_axes("radial_basis", "[functions]", frequencies=frequencies)
        raise
    if not B:
        raise ValueError("radial_basis: there are no frequencies")
    wanted = {
        "lengths": (lengths, (E,)),
        "frequencies": (frequencies, (B,)),
        "prefactor": (prefactor, ()),
        "r_max": (r_max, ()),
    }
    check_shapes("radial_basis", wanted, lengths=lengths)
    run = _operator.dispatch(lengths)
    result: Tensor = run(lengths, frequencies, prefactor, r_max, order)
    return result
