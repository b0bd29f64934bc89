# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Float32 matrix products on TF32 tensor cores, every number split into two that these hold.

Three of the four partial products are summed (3xTF32): errors are those of float32 arithmetic, at
more than its speed. For use inside Triton kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def allows_tf32() -> bool:
    """Whether torch may round float32 factors to TF32, whichever way it was told so."""
    # Not allow_tf32, which raises once fp32_precision has been set.
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def precision(x: Tensor) -> str:
    """Name how `multiply` computes: ``float64``, ``split``, or ``tf32`` where torch allows it."""
    if x.dtype == torch.float64:
        return "float64"
    return "tf32" if allows_tf32() else "split"


def halves(x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """Split as `split` does."""
    high = ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    if not exact:
        high = torch.where(x.isnan(), x, high)
    return high, x - high


@triton.jit
def split(x, EXACT: tl.constexpr):
    """Split float32 numbers into what TF32 holds of them, rounded, and the rest.

    NaN as CUDA writes it, 0x7fffffff, is rounded to -0; the rest, which `product` needs if EXACT,
    is NaN then. Without the rest NaN is kept.
    """
    bits = x.to(tl.int32, bitcast=True)
    high = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    if not EXACT:
        high = tl.where(x == x, high, x)  # noqa: PLR0124  false of NaN
    return high, x - high


@triton.jit
def product(a_high, a_low, b_high, b_low, EXACT: tl.constexpr):
    """Multiply two split matrices; the smallest of the four parts is left out.

    Longer sums are added up outside: a tensor core cuts digits off its own, which adds up too.
    """
    if EXACT:
        total = tl.dot(a_low, b_high, input_precision="tf32")
        total = tl.dot(a_high, b_low, total, input_precision="tf32")
        total = tl.dot(a_high, b_high, total, input_precision="tf32")
    else:
        total = tl.dot(a_high, b_high, input_precision="tf32")
    return total


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """Multiply two matrices as `precision` says; float64 is IEEE."""
    # With an else: what follows a return is compiled too, and float64 cannot be split.
    if PRECISION == "float64":
        total = tl.dot(a, b, input_precision="ieee", out_dtype=tl.float64)
    else:
        a_high, a_low = split(a, PRECISION == "split")
        b_high, b_low = split(b, PRECISION == "split")
        total = product(a_high, a_low, b_high, b_low, PRECISION == "split")
    return total
