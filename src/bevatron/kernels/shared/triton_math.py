# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Float32 matrix products on TF32 tensor cores, every number split into two that these hold.

Three of the four partial products are summed (3xTF32): errors are those of float32 arithmetic, at
more than its speed. For use inside Triton kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def accumulator(tensor: Tensor) -> tl.dtype:
    """Return the type in which a kernel computes from a tensor."""
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32


def allows_tf32() -> bool:
    """Whether torch may round float32 factors to TF32, whichever way it was told so."""
    # Not allow_tf32, which raises once fp32_precision has been set.
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def precision(x: Tensor) -> str:
    """Name how `multiply` computes: ``float64``, ``split``, or ``tf32`` where torch allows it."""
    if x.dtype == torch.float64:
        return "float64"
    return "tf32" if allows_tf32() else "split"


def high_and_low(x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
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


@triton.jit
def logistic(z):
    """Compute the sigmoid; where exp2 overflows it is 0.

    The square of a reciprocal root takes two instructions, a quotient eight; both are exact to two
    units in the last place.
    """
    root = tl.rsqrt(1.0 + tl.exp2(z * -LOG2E))
    return root * root


@triton.jit
def sigmoids(x):
    """Sigma(x) and sigma(-x), neither of them as a difference."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e), tl.where(x >= 0, e, 1.0) / (1.0 + e)


@triton.jit
def _power(x, P: tl.constexpr):
    """Raise x to the power P by multiplication."""
    result = tl.full(x.shape, 1.0, x.dtype)
    for _ in tl.static_range(P):
        result = result * x
    return result


@triton.jit
def cutoff(r, r_max, P: tl.constexpr):
    """U and its first two derivatives by r."""
    x = r / r_max
    below = _power(x, P - 2)
    k = P * (P + 1) * (P + 2) / 2
    inner = (P + 1) * (P + 2) / 2 - x * (P * (P + 2) - x * (P * (P + 1) / 2))
    rest = 1.0 - x
    u = 1.0 - below * x * x * inner
    du = -k * below * x * rest * rest / r_max
    ddu = -k * below * rest * ((P - 1) - (P + 1) * x) / (r_max * r_max)
    inside = r < r_max
    return tl.where(inside, u, 0.0), tl.where(inside, du, 0.0), tl.where(inside, ddu, 0.0)


@triton.jit
def row_offsets(row, n1, n2, s0, s1, s2, AXES: tl.constexpr):
    """Say where rows of a tensor begin; ``row`` is int64."""
    if AXES == 1:
        return row * s2
    outer = row // n2
    if AXES == 2:
        return outer * s1 + (row - outer * n2) * s2
    outermost = outer // n1
    return outermost * s0 + (outer - outermost * n1) * s1 + (row - outer * n2) * s2


@triton.jit
def load_vector(vector, col, C: tl.constexpr, WIDE: tl.constexpr = tl.float32):
    """Load one number per channel as [1, C_PAD]."""
    return tl.load(vector + col, mask=col < C, other=0.0).to(WIDE)[None, :]


@triton.jit
def norm_gradient(g, xhat, rstd, C: tl.constexpr):
    """Return dx of rows from g = dy scale weight and the normalised rows: both 0 behind C."""
    mean_g = tl.sum(g, 1) / C
    mean_gx = tl.sum(g * xhat, 1) / C
    return (g - mean_g[:, None] - xhat * mean_gx[:, None]) * rstd[:, None]


GROUPED_ROWS = 8
"""Blocks of rows that `place` works on together, so that weights are read from the cache."""


@triton.jit
def place(program, count, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Say which block of rows and which of columns is a program's: ROWS blocks of rows in turn."""
    blocks = tl.cdiv(count, BLOCK)
    first = program // (ROWS * COLUMNS) * ROWS
    together = tl.minimum(blocks - first, ROWS)
    within = program % (ROWS * COLUMNS)
    return first + within % together, within // together
