"""The gated unit in plain PyTorch: the specification."""

from torch import Tensor

from bevatron.kernels.shared.dtypes import wide_type


def swiglu(gate: Tensor, value: Tensor | None) -> Tensor:
    """Compute ``silu(gate) * value``; 16-bit types in float32, rounded once."""
    if value is None:
        gate, value = gate.chunk(2, -1)
    wide = wide_type(gate)
    g, v = gate.to(wide), value.to(wide)
    return (g * g.sigmoid() * v).to(gate.dtype)
