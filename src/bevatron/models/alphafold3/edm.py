r"""Noise levels of the diffusion (AlphaFold3, section 3.7; Karras et al., arXiv 2206.00364).

A noise level sigma is the standard deviation, in Å, of the noise on every coordinate;
``SIGMA_DATA`` = 16 Å is that of the structures themselves.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

SIGMA_DATA = 16.0
"""Å."""
LARGEST, SMALLEST, POWER = 160.0, 4e-4, 7.0
"""Of the schedule: its ends, in units of `SIGMA_DATA`, and its exponent."""
LOG_MEAN, LOG_DEVIATION = -1.2, 1.5
"""Of the logarithm of a training noise level in units of `SIGMA_DATA`."""


class Preconditioning(NamedTuple):
    r"""Factors of a denoiser :math:`D(x) = c_{skip} x + c_{out} F(c_{in} x, c_{noise})`.

    Attributes
    ----------
    skip, out, in_, noise : same shape as the noise levels
    """

    skip: Tensor
    out: Tensor
    in_: Tensor
    noise: Tensor


def preconditioning(sigma: Float[Tensor, "*levels"]) -> Preconditioning:
    r"""Return the factors for noise levels in Å.

    .. math:: c_{skip} = \frac{\sigma_d^2}{\sigma^2 + \sigma_d^2}, \quad
        c_{out} = \frac{\sigma \sigma_d}{\sqrt{\sigma^2 + \sigma_d^2}}, \quad
        c_{in} = \frac{1}{\sqrt{\sigma^2 + \sigma_d^2}}, \quad
        c_{noise} = \tfrac14 \ln \frac{\sigma}{\sigma_d}
    """
    variance = sigma.square() + SIGMA_DATA**2
    return Preconditioning(
        SIGMA_DATA**2 / variance,
        sigma * SIGMA_DATA * variance.rsqrt(),
        variance.rsqrt(),
        (sigma / SIGMA_DATA).log() / 4,
    )


def loss_weight(sigma: Float[Tensor, "*levels"]) -> Float[Tensor, "*levels"]:
    r"""Return :math:`(\sigma^2 + \sigma_d^2) / (\sigma \sigma_d)^2`, in 1/Å^2.

    The supplement prints a sum in the denominator; published models have the product, of EDM.
    """
    return (sigma.square() + SIGMA_DATA**2) / (sigma * SIGMA_DATA).square()


def training_sigma(normal: Float[Tensor, "*levels"]) -> Float[Tensor, "*levels"]:
    r"""Return :math:`\sigma_d \exp(-1.2 + 1.5 n)` for standard normal numbers n, in Å."""
    return SIGMA_DATA * (LOG_MEAN + LOG_DEVIATION * normal).exp()


def schedule(
    num_steps: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "_"]:
    r"""Return the noise levels of sampling in ``num_steps`` steps, in Å; the last is 0.

    .. math:: \sigma_t = \sigma_d \big( s_{max}^{1/7} +
        \tfrac{t}{T} (s_{min}^{1/7} - s_{max}^{1/7}) \big)^7

    Computed in float64 and rounded once.

    Examples
    --------
    >>> schedule(2)
    tensor([2560.0000,   55.9748,    0.0000])
    """
    share = torch.linspace(0.0, 1.0, num_steps + 1, dtype=torch.float64, device=device)
    first, last = LARGEST ** (1 / POWER), SMALLEST ** (1 / POWER)
    levels: Tensor = SIGMA_DATA * (first + share * (last - first)) ** POWER
    return (levels * (share < 1.0)).to(dtype)
