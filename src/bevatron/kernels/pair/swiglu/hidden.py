"""A hidden layer between two products, without a gradient of its own: operators make it again."""

from torch import Tensor

from bevatron.kernels.pair.swiglu import halves
from bevatron.kernels.pair.swiglu import triton_products as fused
from bevatron.kernels.pair.swiglu.triton import launch_forward
from bevatron.kernels.shared.chunked_linear import linear


def hidden_rows(x: Tensor, wide: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return silu(gates) * values [n, H] of rows [n, C].

    ``wide`` [2 H, C] makes gates, then values, with a bias [2 H].
    """
    gate, up = wide.chunk(2)
    if bias is None and fused.fits(x, gate):
        return fused.hidden_rows(x, gate, up)
    gates, values = halves(linear(x, wide, bias))
    # In place: the hidden rows on their gates.
    launch_forward(gates, values, gates)
    return gates
