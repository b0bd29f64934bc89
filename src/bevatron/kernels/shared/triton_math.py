# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Float32 matmuls on TF32 tensor cores, for use inside Triton kernels (3xTF32).

Each float32 number is split into a high and a low part, both exact in TF32. Three of the four
partial products are accumulated: the error of float32 arithmetic at a higher throughput.
Shapes: a [M, K] times b [K, N].
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
    """Whether torch may round float32 factors to TF32, by either of its settings."""
    # Not allow_tf32, which raises once fp32_precision has been set.
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def precision(x: Tensor) -> str:
    """Name how `multiply` computes: ``float64``, ``split``, or ``tf32`` if torch allows it."""
    if x.dtype == torch.float64:
        return "float64"
    return "tf32" if allows_tf32() else "split"


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


@triton.jit
def logistic(z):
    """Compute the sigmoid, elementwise; it is 0 where exp2 overflows.

    The square of rsqrt takes two instructions, a division eight; both are accurate to two ulp.
    """
    root = tl.rsqrt(1.0 + tl.exp2(z * -LOG2E))
    return root * root


@triton.jit
def sigmoids(x):
    """Return sigma(x) and sigma(-x), neither computed as 1 minus the other, which would cancel."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e), tl.where(x >= 0, e, 1.0) / (1.0 + e)


@triton.jit
def _power(x, P: tl.constexpr):
    """Compute x to the power P by repeated multiplication."""
    result = tl.full(x.shape, 1.0, x.dtype)
    for _ in tl.static_range(P):
        result = result * x
    return result


@triton.jit
def cutoff(r, r_max, P: tl.constexpr):
    """Return u and its first two derivatives with respect to r."""
    x = r / r_max
    x_power = _power(x, P - 2)
    k = P * (P + 1) * (P + 2) / 2
    inner = (P + 1) * (P + 2) / 2 - x * (P * (P + 2) - x * (P * (P + 1) / 2))
    one_minus_x = 1.0 - x
    u = 1.0 - x_power * x * x * inner
    du = -k * x_power * x * one_minus_x * one_minus_x / r_max
    ddu = -k * x_power * one_minus_x * ((P - 1) - (P + 1) * x) / (r_max * r_max)
    within = r < r_max
    return tl.where(within, u, 0.0), tl.where(within, du, 0.0), tl.where(within, ddu, 0.0)


@triton.jit
def row_offsets(row, n1, n2, s0, s1, s2, AXES: tl.constexpr):
    """Return the offset of the first element of each row [BLOCK]; ``row`` is int64."""
    if AXES == 1:
        return row * s2
    outer = row // n2
    if AXES == 2:
        return outer * s1 + (row - outer * n2) * s2
    outermost = outer // n1
    return outermost * s0 + (outer - outermost * n1) * s1 + (row - outer * n2) * s2


@triton.jit
def load_vector(vector, col, C: tl.constexpr, WIDE: tl.constexpr = tl.float32):
    """Load one number per channel in the type of the accumulators, to broadcast over rows."""
    return tl.load(vector + col, mask=col < C, other=0.0).to(WIDE)[None, :]  # [1, C_PAD]


@triton.jit
def normalise(x, inside, eps, C: tl.constexpr):
    """Normalise rows [BLOCK, C_PAD], 0 in the padding; return each row's mean and 1/sigma too."""
    mean = tl.sum(x, 1) / C  # [BLOCK]
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / C + eps)  # [BLOCK]
    return centred * rstd[:, None], mean, rstd


@triton.jit
def norm_gradient(g, xhat, rstd, C: tl.constexpr):
    """Return dx [BLOCK, C_PAD] from g = dy scale weight and xhat, both 0 in the padding."""
    mean_g = tl.sum(g, 1) / C  # [BLOCK]
    mean_gx = tl.sum(g * xhat, 1) / C  # [BLOCK]
    return (g - mean_g[:, None] - xhat * mean_gx[:, None]) * rstd[:, None]


@triton.jit
def split_columns(both, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """Return the first and the last HALF columns of a block [BLOCK, 2 HALF]."""
    return tl.split(tl.permute(tl.reshape(both, [BLOCK, 2, HALF]), [0, 2, 1]))


CACHE_LINE = tl.constexpr(128)
"""Bytes."""
PREFETCHES = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)
"""Whether a kernel's instructions are those of NVIDIA's GPUs."""


@triton.jit
def prefetch(base, row, column, C: tl.constexpr, COLUMNS: tl.constexpr):
    """Bring columns ``column .. column + COLUMNS`` of rows [BLOCK] of [.., C] to the L2 cache.

    It takes no registers, so all that a program will read can be under way from its start.
    """
    if PREFETCHES:
        IN_LINE: tl.constexpr = CACHE_LINE * 8 // base.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = (COLUMNS + IN_LINE - 1) // IN_LINE
        first = tl.minimum(column + tl.arange(0, LINES) * IN_LINE, C - 1)  # [LINES]
        at = base + row.to(tl.int64)[:, None] * C + first[None, :]  # [BLOCK, LINES]
        # An instruction without a result: the zeros are not used.
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


GROUPED_ROWS = 8
"""Blocks of rows that `place` groups, so that they read weights from L2."""


@triton.jit
def place(program, count, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Map a program to its (row block, column block); ROWS row blocks share weights in the L2."""
    blocks = tl.cdiv(count, BLOCK)
    first = program // (ROWS * COLUMNS) * ROWS
    together = tl.minimum(blocks - first, ROWS)
    within = program % (ROWS * COLUMNS)
    return first + within % together, within // together
