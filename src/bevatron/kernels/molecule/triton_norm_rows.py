"""Rows normalised in registers, shared by the norms of atoms and of bonds."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

CHANNELS_PER_WARP, MOST_WARPS = 256, 16
"""Block size: a thread holds eight adjacent channels of all rows, so that sums over rows need no
shuffles; there are few rows, so that several programs fit on an SM."""
ELEMENTS_PER_WARP = 512


def shape_of_block(width: int, elements: int = ELEMENTS_PER_WARP) -> tuple[int, int, int]:
    """Return the width padded to a power of two, the rows of a block, and warps."""
    pad = int(triton.next_power_of_2(width))
    warps = min(max(1, pad // CHANNELS_PER_WARP), MOST_WARPS)
    return pad, max(1, elements * warps // pad), warps


@triton.jit
def normalise_rows(z, mask, Mean, Rstd, row, count, eps, C: tl.constexpr):
    """Normalise rows that are zero where masked; store each row's mean and 1/sigma."""
    mean = tl.sum(z, 1) / C  # [BLOCK]
    centred = z - mean[:, None]
    if z.shape[1] != C:
        centred = tl.where(mask, centred, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)  # [BLOCK]
    tl.store(Mean + row, mean, mask=row < count)
    tl.store(Rstd + row, rstd, mask=row < count)
    return centred * rstd[:, None]


@triton.jit
def renormalise_rows(z, Mean, Rstd, row, count, WIDE: tl.constexpr):
    """Normalise rows with the statistics `normalise_rows` stored; return 1/sigma too.

    Rows past the end get 1/sigma = 0. Masked channels are not zero: callers that sum over channels
    multiply them by zeros.
    """
    mean = tl.load(Mean + row, mask=row < count, other=0.0).to(WIDE)  # [BLOCK]
    rstd = tl.load(Rstd + row, mask=row < count, other=0.0).to(WIDE)  # [BLOCK]
    return (z - mean[:, None]) * rstd[:, None], rstd
