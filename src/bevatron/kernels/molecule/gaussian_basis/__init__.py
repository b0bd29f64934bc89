"""Gaussian kernels of distances, with learned centres and widths."""

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry

__all__ = ["gaussian_basis"]

_operator = registry.operator("gaussian_basis", __name__)


def gaussian_basis(
    distances: Float[Tensor, " P"],
    mean: Float[Tensor, " K"],
    std: Float[Tensor, " K"],
    *,
    scale: float = 1.0,
    epsilon: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "P K"]:
    r"""Evaluate Gaussian densities of every distance.

    .. math::

        \psi_k(r) = \frac{c}{\sqrt{2\pi} s_k} \exp\Big(-\frac12
        \Big(\frac{r - \mu_k}{s_k}\Big)^2\Big), \qquad s_k = |\sigma_k| + \epsilon

    They are the input of the attention bias of Transformer-M and GPS++ (arXiv 2302.02947, eq. 31).
    Saved for the backward pass: the distances alone. Raises ValueError if a shape does not match.

    Parameters
    ----------
    distances : r
    mean, std : mu and sigma
    scale : c
    epsilon : lower bound of the width
    dtype
        Type of the result; that of ``mean`` by default. Computed in float32 at least.

    Returns
    -------
    Tensor
        [P, K].

    Examples
    --------
    >>> import torch
    >>> gaussian_basis(torch.tensor([1.0]), torch.tensor([1.0, 0.0]), torch.ones(2))
    tensor([[0.3989, 0.2420]])
    """
    if distances.ndim != 1 or mean.ndim != 1 or mean.shape != std.shape:
        raise ValueError(
            f"gaussian_basis: distances {tuple(distances.shape)}, mean {tuple(mean.shape)} and "
            f"std {tuple(std.shape)}, expected [P], [K], [K]"
        )
    run = _operator.dispatch(distances)
    kind = mean.dtype if dtype is None else dtype
    result: Tensor = run(distances, mean, std, scale, epsilon, kind)
    return result
