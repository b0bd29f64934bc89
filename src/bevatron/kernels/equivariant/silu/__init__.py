"""SiLU, with a fused kernel for each order of derivative."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support

__all__ = ["silu"]

_operator = registry.operator("silu", __name__, takes=support.float32_or_float64)


def silu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    r"""Compute :math:`x \sigma(x)`, elementwise.

    Training on forces needs the second derivative, which takes torch about ten passes over the
    tensor and here one fused kernel. Raises KernelError if Triton is requested and cannot run. The
    kernel has first and second derivatives.

    Parameters
    ----------
    x : any shape

    Examples
    --------
    >>> import torch
    >>> silu(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.7311])
    """
    result: Tensor = _operator.dispatch(x)(x)
    return result
