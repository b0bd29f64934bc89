"""Invariant point attention, forward: weights by head, then the sums over the pair by query.

A program of `attend_kernel` owns BLOCK_Q queries of one head and walks over the keys with an online
softmax. It sums values and points, and writes the logits, which `pairs_kernel` reads for all heads
of a query while it reads that query's row of the pair once.

Dimensions: B samples, H heads, Nq queries, Nk keys, D channels and P or V points of a head, Z
channels of the pair. A block of points has 3 P columns: all x, all y, all z. ``x_N``, ``x_A``,
``x_H`` are the strides of residues, axes and heads.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import multiply

LEAST = tl.constexpr(-1e30)
"""Initial running maximum: finite, so that differences from it are never NaN."""


@triton.jit
def load_rows(base, first, count, step, BLOCK: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr):
    """Load rows of C numbers, zero outside."""
    row, col = first + tl.arange(0, BLOCK), tl.arange(0, C_PAD)
    at = base + row.to(tl.int64)[:, None] * step + col[None, :]
    inside = (row < count)[:, None] & (col < C)[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, C_PAD]


@triton.jit
def store_rows(
    base, first, count, step, block, BLOCK: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr
):
    """Store a block [BLOCK, C_PAD] where `load_rows` loads it."""
    row, col = first + tl.arange(0, BLOCK), tl.arange(0, C_PAD)
    at = base + row.to(tl.int64)[:, None] * step + col[None, :]
    inside = (row < count)[:, None] & (col < C)[None, :]
    tl.store(at, block.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_points(
    base, first, count, step, axis, BLOCK: tl.constexpr, P: tl.constexpr, P_PAD: tl.constexpr
):
    """Load points, one row for each residue (or head, with its stride), zero outside."""
    row, col = first + tl.arange(0, BLOCK), tl.arange(0, P_PAD)
    at = base + row.to(tl.int64)[:, None] * step + (col // P * axis + col % P)[None, :]
    inside = (row < count)[:, None] & (col < 3 * P)[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, P_PAD]


@triton.jit
def store_points(
    base, first, count, step, axis, block,
    BLOCK: tl.constexpr, P: tl.constexpr, P_PAD: tl.constexpr,
):  # fmt: skip
    """Store a block [BLOCK, P_PAD] where `load_points` loads it."""
    row, col = first + tl.arange(0, BLOCK), tl.arange(0, P_PAD)
    at = base + row.to(tl.int64)[:, None] * step + (col // P * axis + col % P)[None, :]
    inside = (row < count)[:, None] & (col < 3 * P)[None, :]
    tl.store(at, block.to(base.dtype.element_ty), mask=inside)


@triton.jit
def squared_distances(a, b):
    """Return sums over points [BLOCK_Q, BLOCK_K]; both are relative to a point near them.

    As products they are on the tensor cores, and lose digits only by the extent of the structure.
    They are never rounded to TF32.
    """
    lengths = tl.sum(a * a, 1)[:, None] + tl.sum(b * b, 1)[None, :]
    return lengths - 2.0 * multiply(a, tl.trans(b), "split")


@triton.jit
def point_weight(HeadWeights, h, scale):
    """Return the factor of a head's squared distances, and its derivative by the head's weight."""
    x = tl.load(HeadWeights + h).to(tl.float32)  # []
    e = tl.exp(-tl.abs(x))
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + e)
    return softplus * scale, tl.where(x >= 0, 1.0, e) / (1.0 + e) * scale


@triton.jit
def attend_kernel(
    Q, K, V, QPoints, KPoints, VPoints, Bias, HeadWeights, Logits, Statistics, Scalars, Points,
    Relative,
    B, Nq, Nk, scale, point_scale, q_N, q_H, k_N, k_H, v_N, v_H,
    q_points_N, q_points_A, q_points_H, k_points_N, k_points_A, k_points_H,
    v_points_N, v_points_A, v_points_H,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, V_POINTS: tl.constexpr,
    D_PAD: tl.constexpr, P_PAD: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write logits, their maximum and 1 / sum of exponentials, and the sums of values and points.

    ``Statistics`` is [2, B, H, Nq]. ``Relative`` are the sums of points relative to the first
    key's: the backward pass needs digits that these have lost far from the origin.
    """
    first = tl.program_id(0) * BLOCK_Q
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    gamma, _ = point_weight(HeadWeights, h, point_scale)
    row = first + tl.arange(0, BLOCK_Q)
    q = load_rows(Q + b * Nq * q_N + h * q_H, first, Nq, q_N, BLOCK_Q, D, D_PAD) * scale
    at = QPoints + b * Nq * q_points_N + h * q_points_H
    q_points = load_points(at, first, Nq, q_points_N, q_points_A, BLOCK_Q, P, P_PAD)
    at_k, at_v = K + b * Nk * k_N + h * k_H, V + b * Nk * v_N + h * v_H
    at_k_points = KPoints + b * Nk * k_points_N + h * k_points_H
    at_v_points = VPoints + b * Nk * v_points_N + h * v_points_H
    k_centre = load_points(at_k_points, 0, Nk, k_points_N, k_points_A, 1, P, P_PAD)
    v_centre = load_points(at_v_points, 0, Nk, v_points_N, v_points_A, 1, V_POINTS, V_PAD)
    q_points -= k_centre
    pair = ((b * H + h) * Nq + row)[:, None] * Nk
    most = tl.full([BLOCK_Q], LEAST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    scalars = tl.zeros([BLOCK_Q, D_PAD], tl.float32)
    points = tl.zeros([BLOCK_Q, V_PAD], tl.float32)
    for start in range(0, Nk, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        inside = (row < Nq)[:, None] & (key < Nk)[None, :]
        k = load_rows(at_k, start, Nk, k_N, BLOCK_K, D, D_PAD)
        k_points = load_points(at_k_points, start, Nk, k_points_N, k_points_A, BLOCK_K, P, P_PAD)
        # [BLOCK_Q, BLOCK_K]
        bias = tl.load(Bias + pair + key[None, :], mask=inside, other=0.0).to(tl.float32)
        v = load_rows(at_v, start, Nk, v_N, BLOCK_K, D, D_PAD)
        v_points = load_points(
            at_v_points, start, Nk, v_points_N, v_points_A, BLOCK_K, V_POINTS, V_PAD
        )
        x = multiply(q, tl.trans(k), PRECISION) + bias
        x -= gamma * squared_distances(q_points, k_points - k_centre)
        tl.store(Logits + pair + key[None, :], x, mask=inside)
        x = tl.where((key < Nk)[None, :], x, float("-inf"))
        higher = tl.maximum(most, tl.max(x, 1))
        shrink, e = tl.exp(most - higher), tl.exp(x - higher[:, None])
        total, most = total * shrink + tl.sum(e, 1), higher
        scalars = scalars * shrink[:, None] + multiply(e, v, PRECISION)
        points = points * shrink[:, None] + multiply(e, v_points - v_centre, PRECISION)
    share = 1.0 / total
    at = Statistics + (b * H + h) * Nq + row
    tl.store(at, most, mask=row < Nq)
    tl.store(at + B * H * Nq, share, mask=row < Nq)
    at = Scalars + (b * Nq * H + h) * D
    store_rows(at, first, Nq, H * D, scalars * share[:, None], BLOCK_Q, D, D_PAD)
    at = (b * Nq * 3 * H + h) * V_POINTS
    A: tl.constexpr = H * V_POINTS
    points *= share[:, None]
    store_points(Relative + at, first, Nq, 3 * A, A, points, BLOCK_Q, V_POINTS, V_PAD)
    store_points(Points + at, first, Nq, 3 * A, A, points + v_centre, BLOCK_Q, V_POINTS, V_PAD)


@triton.jit
def query_heads(Statistics, Nq, B, b, i, H: tl.constexpr, H_PAD: tl.constexpr):
    """Load maximum and 1 / sum of all heads of a query; zero outside."""
    h = tl.arange(0, H_PAD)
    at = Statistics + (b * H + h) * Nq + i
    most = tl.load(at, mask=h < H, other=0.0)  # [H_PAD]
    share = tl.load(at + B * H * Nq, mask=h < H, other=0.0)  # [H_PAD]
    return most, share


@triton.jit
def query_weights(
    Logits, most, share, Nq, Nk, b, i, start,
    H: tl.constexpr, H_PAD: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load the weights of all heads of a query [H_PAD, BLOCK_K]; zero outside."""
    h, key = tl.arange(0, H_PAD), start + tl.arange(0, BLOCK_K)
    at = Logits + (((b * H + h) * Nq + i) * Nk)[:, None] + key[None, :]
    inside = (h < H)[:, None] & (key < Nk)[None, :]
    x = tl.load(at, mask=inside, other=float("-inf"))  # [H_PAD, BLOCK_K]
    return tl.exp(x - most[:, None]) * share[:, None]


@triton.jit
def pairs_kernel(
    Logits, Statistics, Pair, Pairs, B, Nq, Nk,
    H: tl.constexpr, H_PAD: tl.constexpr, Z: tl.constexpr, Z_PAD: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the row of the pair of one query with the weights of all heads."""
    i, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    most, share = query_heads(Statistics, Nq, B, b, i, H, H_PAD)
    at = Pair + (b * Nq + i) * Nk * Z
    total = tl.zeros([H_PAD, Z_PAD], tl.float32)
    for start in range(0, Nk, BLOCK_K):
        w = query_weights(Logits, most, share, Nq, Nk, b, i, start, H, H_PAD, BLOCK_K)
        total += multiply(w, load_rows(at, start, Nk, Z, BLOCK_K, Z, Z_PAD), PRECISION)
    store_rows(Pairs + (b * Nq + i) * H * Z, 0, H, Z, total, H_PAD, Z, Z_PAD)
