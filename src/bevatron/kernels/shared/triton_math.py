# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Float32 matmuls on TF32 tensor cores, for use inside Triton kernels (3xTF32).

Every float32 number is split into a high and a low part, both exact in TF32. Three of the four
partial products are accumulated: the error is that of float32 arithmetic, the throughput is higher.
Shapes: a [M, K] times b [K, N].
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
    """Split float32 numbers into a high part, rounded to TF32, and the low part that remains.

    CUDA's NaN, 0x7fffffff, would round to -0. If EXACT the low part, which `product` then reads, is
    NaN; otherwise the high part stays NaN.
    """
    bits = x.to(tl.int32, bitcast=True)
    high = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    if not EXACT:
        high = tl.where(x == x, high, x)  # noqa: PLR0124  false for NaN
    return high, x - high


@triton.jit
def product(a_high, a_low, b_high, b_low, EXACT: tl.constexpr):
    """Multiply two split matrices; low times low, below float32 rounding, is left out.

    Callers accumulate over long K themselves, in float32: tensor cores truncate their accumulator,
    and the error would grow with K.
    """
    if EXACT:
        total = tl.dot(a_low, b_high, input_precision="tf32")  # [M, N]
        total = tl.dot(a_high, b_low, total, input_precision="tf32")  # [M, N]
        total = tl.dot(a_high, b_high, total, input_precision="tf32")  # [M, N]
    else:
        total = tl.dot(a_high, b_high, input_precision="tf32")  # [M, N]
    return total


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """Multiply two matrices in the PRECISION that `precision` returns; float64 is IEEE."""
    # An else branch, not an early return: Triton compiles what follows a return, and float64
    # cannot be split.
    if PRECISION == "float64":
        total = tl.dot(a, b, input_precision="ieee", out_dtype=tl.float64)  # [M, N]
    else:
        a_high, a_low = split(a, PRECISION == "split")
        b_high, b_low = split(b, PRECISION == "split")
        total = product(a_high, a_low, b_high, b_low, PRECISION == "split")  # [M, N]
    return total
