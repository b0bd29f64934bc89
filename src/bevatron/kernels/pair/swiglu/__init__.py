"""SwiGLU: silu(gate) * value."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import as_one_type, check_shapes

__all__ = ["swiglu"]

_operator = registry.operator("swiglu", __name__, takes=support.up_to_float32)


def swiglu(
    gate: Float[Tensor, "*rows _"], value: Float[Tensor, "*rows C"] | None = None
) -> Float[Tensor, "*rows C"]:
    r"""Multiply values by the SiLU of their gates.

    .. math:: y = \frac{g}{1 + e^{-g}} \odot v

    Shazeer, arXiv 2002.05202; the transitions of AlphaFold3 (algorithm 11). Raises ValueError if
    the shapes or types do not fit; KernelError if Triton is requested and cannot run. The kernel
    has first derivatives.

    Parameters
    ----------
    gate
        [..., C], in any strides; or [..., 2C], gates first, if ``value`` is not given: the
        output of one fused projection.
    value : [..., C], of the type of ``gate``

    Returns
    -------
    Tensor
        [..., C], contiguous. Saved for the backward pass: the inputs alone, unmodified.

    Examples
    --------
    >>> import torch
    >>> swiglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
    tensor([0.0000, 1.4621])
    """
    if value is None:
        if gate.ndim == 0 or gate.shape[-1] % 2:
            raise ValueError(
                f"swiglu: gate has shape {tuple(gate.shape)}, expected [..., 2C] where value is "
                "not given"
            )
    else:
        check_shapes("swiglu", {"value": (value, gate.shape)}, gate=gate)
        (value,) = as_one_type("swiglu", gate=gate, value=value)
    result: Tensor = _operator.dispatch(gate)(gate, value)
    return result
