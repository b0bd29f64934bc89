"""Smooth lDDT: which blocks of pairs count, then sums over them and their gradient.

`near_kernel` goes through the true distances once for all copies and lists, for each block of
atoms, the blocks with a pair that counts; most are too far apart. A program of `rows_kernel` owns
BLOCK atoms of one copy and walks over that list. Each atom is written by one program, so results
repeat bit for bit.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["atoms", "blocks"])
def near_kernel(Truth, Radius, Near, Count, atoms, blocks, BLOCK: tl.constexpr):
    """Write the number and the list of a block's near blocks, and the pairs of its atoms."""
    structure = tl.program_id(1).to(tl.int64)
    y_at, r_at = Truth + structure * atoms * 3, Radius + structure * atoms
    listed = Near + (structure * blocks + tl.program_id(0)) * (blocks + 1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < atoms
    y0, y1, y2 = load_points(y_at, row, inside)
    r = tl.load(r_at + row, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    count = tl.zeros([BLOCK], dtype=tl.float32)
    found = 0
    for block in range(blocks):
        m = block * BLOCK + tl.arange(0, BLOCK)
        _, weight = weights(y0, y1, y2, r, y_at, r_at, row, m, atoms)
        of_row = tl.sum(weight, 1)
        if tl.sum(of_row, 0) > 0:
            count += of_row
            found += 1
            tl.store(listed + found, block)
    tl.store(listed, found)
    # Both atoms of a pair have counted it.
    tl.store(Count + structure * atoms + row, count * 0.5, mask=inside)


@triton.jit(do_not_specialize=["atoms", "copies", "blocks"])
def rows_kernel(
    Predicted, Truth, Radius, Near, Total, Score, Gradient, atoms, copies, blocks,
    BLOCK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Write each atom's part of the score of its copy, and the gradient with respect to it."""
    copy = tl.program_id(1).to(tl.int64)
    structure = copy // copies
    x_at = Predicted + copy * atoms * 3
    y_at, r_at = Truth + structure * atoms * 3, Radius + structure * atoms
    listed = Near + (structure * blocks + tl.program_id(0)) * (blocks + 1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < atoms
    x0, x1, x2 = load_points(x_at, row, inside)
    y0, y1, y2 = load_points(y_at, row, inside)
    r = tl.load(r_at + row, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    score = tl.zeros([BLOCK], dtype=tl.float32)
    g0 = tl.zeros([BLOCK], dtype=tl.float32)
    g1 = tl.zeros([BLOCK], dtype=tl.float32)
    g2 = tl.zeros([BLOCK], dtype=tl.float32)
    for found in range(tl.load(listed)):  # []
        m = tl.load(listed + 1 + found) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        true, weight = weights(y0, y1, y2, r, y_at, r_at, row, m, atoms)
        # [BLOCK, BLOCK]
        d0, d1, d2 = steps(x0, x1, x2, x_at, m, atoms)
        distance = tl.sqrt(d0 * d0 + d1 * d1 + d2 * d2)
        closeness, slope = close(distance - true)
        score += tl.sum(closeness * weight, 1)
        if GRADIENT:
            slope = slope * weight / tl.maximum(distance, 1e-30)
            g0 += tl.sum(slope * d0, 1)
            g1 += tl.sum(slope * d1, 1)
            g2 += tl.sum(slope * d2, 1)
    share = 0.25 / tl.load(Total + structure).to(tl.float32)  # []
    # Both atoms of a pair have counted it.
    tl.store(Score + copy * atoms + row, score * (0.5 * share), mask=inside)
    if GRADIENT:
        out = Gradient + (copy * atoms + row) * 3
        tl.store(out, g0 * share, mask=inside)
        tl.store(out + 1, g1 * share, mask=inside)
        tl.store(out + 2, g2 * share, mask=inside)


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
def weights(y0, y1, y2, r, y_at, r_at, row, m, atoms):
    """Return true distances and how often pairs count, for their row and for their column."""
    r_m = tl.load(r_at + m, mask=m < atoms, other=0.0).to(tl.float32)  # [BLOCK]
    # [BLOCK, BLOCK]
    d0, d1, d2 = steps(y0, y1, y2, y_at, m, atoms)
    true = tl.sqrt(d0 * d0 + d1 * d1 + d2 * d2)
    both = (r[:, None] > 0) & (r_m[None, :] > 0) & (row[:, None] != m[None, :])
    weight = (true < r[:, None]).to(tl.float32) + (true < r_m[None, :]).to(tl.float32)
    return true, tl.where(both, weight, 0.0)


@triton.jit
def close(error):
    """Return the sum of sigmoid(t - |error|) over 0.5, 1, 2, 4 Å, and its derivative."""
    # With x = e^t e^-s a sigmoid is x / (1 + x): one exponential and one reciprocal for all four.
    r = tl.exp(-tl.abs(error))
    a, b = r * 1.6487212707001282, r * 2.718281828459045
    c, d = r * 7.38905609893065, r * 54.598150033144236
    of_ab, of_cd = (1 + a) * (1 + b), (1 + c) * (1 + d)
    both = 1 / (of_ab * of_cd)
    of_ab, of_cd = both * of_cd, both * of_ab
    p, q = (1 + b) * of_ab, (1 + a) * of_ab
    u, v = (1 + d) * of_cd, (1 + c) * of_cd
    a, b, c, d = a * p, b * q, c * u, d * v
    slope = a * p + b * q + c * u + d * v
    slope = tl.where(error > 0, -slope, tl.where(error < 0, slope, 0.0))
    return a + b + c + d, slope
