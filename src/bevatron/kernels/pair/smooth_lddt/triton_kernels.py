"""Smooth lDDT: sums over the pairs of a block of atoms of one copy, or their gradient.

A program owns BLOCK atoms of one copy and walks over all atoms, BLOCK_M at a time. Most blocks of
pairs are too far apart in the truth to count; their predicted distances are not computed.
Each atom is written by one program, so results repeat bit for bit.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def rows_kernel(
    Predicted, Truth, Radius, Scale, Score, Count, Gradient, atoms, copies,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Write the score and the number of pairs of each atom, or its gradient times Scale."""
    copy = tl.program_id(1).to(tl.int64)
    x_at = Predicted + copy * atoms * 3
    y_at = Truth + copy // copies * atoms * 3
    r_at = Radius + copy // copies * atoms
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < atoms
    x0, x1, x2 = load_points(x_at, row, inside)
    y0, y1, y2 = load_points(y_at, row, inside)
    r = tl.load(r_at + row, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    score = tl.zeros([BLOCK], dtype=tl.float32)
    count = tl.zeros([BLOCK], dtype=tl.float32)
    g0 = tl.zeros([BLOCK], dtype=tl.float32)
    g1 = tl.zeros([BLOCK], dtype=tl.float32)
    g2 = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, atoms, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        # [BLOCK_M]
        r_m = tl.load(r_at + m, mask=m < atoms, other=0.0).to(tl.float32)
        # [BLOCK, BLOCK_M]
        d0, d1, d2 = steps(y0, y1, y2, y_at, m, atoms)
        true = tl.sqrt(d0 * d0 + d1 * d1 + d2 * d2)
        both = (r[:, None] > 0) & (r_m[None, :] > 0) & (row[:, None] != m[None, :])
        # A pair counts once for its row and once for its column.
        weight = (true < r[:, None]).to(tl.float32) + (true < r_m[None, :]).to(tl.float32)
        weight = tl.where(both, weight, 0.0)
        of_row = tl.sum(weight, 1)
        if tl.sum(of_row, 0) > 0:
            count += of_row
            # [BLOCK, BLOCK_M]
            d0, d1, d2 = steps(x0, x1, x2, x_at, m, atoms)
            distance = tl.sqrt(d0 * d0 + d1 * d1 + d2 * d2)
            closeness, slope = close(distance - true)
            if GRADIENT:
                slope = slope * weight / tl.maximum(distance, 1e-30)
                g0 += tl.sum(slope * d0, 1)
                g1 += tl.sum(slope * d1, 1)
                g2 += tl.sum(slope * d2, 1)
            else:
                score += tl.sum(closeness * weight, 1)
    if GRADIENT:
        scale = tl.load(Scale + copy).to(tl.float32)  # []
        out = Gradient + (copy * atoms + row) * 3
        tl.store(out, g0 * scale, mask=inside)
        tl.store(out + 1, g1 * scale, mask=inside)
        tl.store(out + 2, g2 * scale, mask=inside)
    else:
        # Both atoms of a pair have counted it.
        tl.store(Score + copy * atoms + row, score * 0.5, mask=inside)
        tl.store(Count + copy * atoms + row, count * 0.5, mask=inside)


@triton.jit
def load_points(at, atom, inside):
    """Load the three coordinates of some atoms."""
    x = tl.load(at + atom * 3, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    y = tl.load(at + atom * 3 + 1, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    z = tl.load(at + atom * 3 + 2, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    return x, y, z


@triton.jit
def steps(x0, x1, x2, at, m, atoms):
    """Load atoms m and return the vectors from them to the given atoms, by coordinate."""
    y0, y1, y2 = load_points(at, m, m < atoms)
    return x0[:, None] - y0[None, :], x1[:, None] - y1[None, :], x2[:, None] - y2[None, :]


@triton.jit
def close(error):
    """Return the mean of sigmoid(t - |error|) over 0.5, 1, 2, 4 Å, and its derivative."""
    # 1 / (1 + e^s e^-t): one exponential for all four, capped far beyond where they reach 0.
    growth = tl.exp(tl.minimum(tl.abs(error), 80.0))
    a = 1 / (1 + growth * 0.6065306597126334)
    b = 1 / (1 + growth * 0.36787944117144233)
    c = 1 / (1 + growth * 0.1353352832366127)
    d = 1 / (1 + growth * 0.01831563888873418)
    slope = 0.25 * (a * (1 - a) + b * (1 - b) + c * (1 - c) + d * (1 - d))
    slope = tl.where(error > 0, -slope, tl.where(error < 0, slope, 0.0))
    return 0.25 * (a + b + c + d), slope
