"""Spherical harmonics of the directions of vectors."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support

__all__ = ["spherical_harmonics"]

_operator = registry.operator("spherical_harmonics", __name__, takes=support.float32_or_float64)


def spherical_harmonics(l_max: int, vectors: Float[Tensor, "E 3"]) -> Float[Tensor, "E S"]:
    r"""Compute real spherical harmonics of degrees up to ``l_max`` of :math:`\hat v = v / |v|`.

    The basis and normalisation are those of `bevatron.maths.so3.spherical_harmonics` with
    ``normalize``: :math:`\sum_m Y_{lm}^2 = 2l + 1`. Raises KernelError if Triton is requested and
    cannot run. The kernel has first and second derivatives.

    Parameters
    ----------
    l_max : highest degree
    vectors : any length above zero; length zero gives NaN

    Returns
    -------
    Tensor
        S = (l_max+1)² components.

    Examples
    --------
    >>> import torch
    >>> spherical_harmonics(1, torch.tensor([[0.0, 2.0, 0.0]])).round(decimals=4)
    tensor([[1.0000, 0.0000, 1.7321, 0.0000]])
    """
    if vectors.shape[1:] != (3,):
        raise ValueError(
            f"spherical_harmonics: vectors has shape {tuple(vectors.shape)}, expected [E, 3]"
        )
    result: Tensor = _operator.dispatch(vectors)(l_max, vectors)
    return result
