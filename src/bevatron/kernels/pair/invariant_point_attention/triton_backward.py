"""Invariant point attention, backward: by query over the pair, by head over queries, over keys.

`pairs_backward_kernel` reads the row of the pair of each query once and writes its gradient and
what the pair adds to the gradients of the weights. `queries_kernel` turns these into gradients of
the logits, which are those of the bias too, and sums over keys; `keys_kernel` sums over queries.
Nothing is added to what another program has written, so results repeat bit for bit.

Sums of points are taken relative to the first key's, so that they lose no digits far from the
origin. Dimensions as in `triton_forward`.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.pair.invariant_point_attention.triton_forward import (
    load_points,
    load_rows,
    point_weight,
    query_heads,
    query_weights,
    squared_distances,
    store_points,
    store_rows,
)
from bevatron.kernels.shared.triton_math import multiply


@triton.jit
def pairs_backward_kernel(
    Logits, Statistics, Pair, Scalars, Relative, Pairs, DScalars, DPoints, DPairs,
    DWeights, DPair, Delta, B, Nq, Nk,
    d_scalars_N, d_scalars_H, d_points_N, d_points_A, d_points_H, d_pairs_N, d_pairs_H,
    H: tl.constexpr, D: tl.constexpr, V_POINTS: tl.constexpr, Z: tl.constexpr,
    H_PAD: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, Z_PAD: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a query's row of the pair, its part of those of the weights, and delta.

    Delta is the product of results and their gradients: what the softmax subtracts.
    """
    i, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n = b * Nq + i
    A: tl.constexpr = H * V_POINTS
    d_pairs = load_rows(DPairs + n * d_pairs_N, 0, H, d_pairs_H, H_PAD, Z, Z_PAD)
    delta = tl.sum(load_rows(Pairs + n * H * Z, 0, H, Z, H_PAD, Z, Z_PAD) * d_pairs, 1)
    scalars = load_rows(Scalars + n * H * D, 0, H, D, H_PAD, D, D_PAD)
    at = DScalars + n * d_scalars_N
    delta += tl.sum(scalars * load_rows(at, 0, H, d_scalars_H, H_PAD, D, D_PAD), 1)
    points = load_points(Relative + n * 3 * A, 0, H, V_POINTS, A, H_PAD, V_POINTS, V_PAD)
    at = DPoints + n * d_points_N
    d_points = load_points(at, 0, H, d_points_H, d_points_A, H_PAD, V_POINTS, V_PAD)
    delta += tl.sum(points * d_points, 1)
    h = tl.arange(0, H_PAD)
    tl.store(Delta + (b * H + h) * Nq + i, delta, mask=h < H)

    most, share = query_heads(Statistics, Nq, B, b, i, H, H_PAD)
    for start in range(0, Nk, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        w = query_weights(Logits, most, share, Nq, Nk, b, i, start, H, H_PAD, BLOCK_K)
        z = load_rows(Pair + n * Nk * Z, start, Nk, Z, BLOCK_K, Z, Z_PAD)
        place = (((b * H + h) * Nq + i) * Nk)[:, None] + key[None, :]
        inside = (h < H)[:, None] & (key < Nk)[None, :]
        tl.store(DWeights + place, multiply(d_pairs, tl.trans(z), PRECISION), mask=inside)
        dz = multiply(tl.trans(w), d_pairs, PRECISION)
        store_rows(DPair + n * Nk * Z, start, Nk, Z, dz, BLOCK_K, Z, Z_PAD)


@triton.jit
def queries_kernel(
    K, V, QPoints, KPoints, VPoints, HeadWeights, Logits, Statistics, Delta, DWeights,
    DScalars, DPoints, DLogits, DQ, DQPoints, DHeadWeights,
    B, Nq, Nk, scale, point_scale, k_N, k_H, v_N, v_H,
    q_points_N, q_points_A, q_points_H, k_points_N, k_points_A, k_points_H,
    v_points_N, v_points_A, v_points_H, d_scalars_N, d_scalars_H,
    d_points_N, d_points_A, d_points_H,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, V_POINTS: tl.constexpr,
    D_PAD: tl.constexpr, P_PAD: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the logits, of queries and their points, and parts of the heads'."""
    first = tl.program_id(0) * BLOCK_Q
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    gamma, d_gamma = point_weight(HeadWeights, h, point_scale)
    row = first + tl.arange(0, BLOCK_Q)
    at_k, at_v = K + b * Nk * k_N + h * k_H, V + b * Nk * v_N + h * v_H
    at_k_points = KPoints + b * Nk * k_points_N + h * k_points_H
    at_v_points = VPoints + b * Nk * v_points_N + h * v_points_H
    k_centre = load_points(at_k_points, 0, Nk, k_points_N, k_points_A, 1, P, P_PAD)
    v_centre = load_points(at_v_points, 0, Nk, v_points_N, v_points_A, 1, V_POINTS, V_PAD)
    at = QPoints + b * Nq * q_points_N + h * q_points_H
    q_points = load_points(at, first, Nq, q_points_N, q_points_A, BLOCK_Q, P, P_PAD) - k_centre
    DScalars += b * Nq * d_scalars_N + h * d_scalars_H
    d_scalars = load_rows(DScalars, first, Nq, d_scalars_N, BLOCK_Q, D, D_PAD)
    DPoints += b * Nq * d_points_N + h * d_points_H
    d_points = load_points(DPoints, first, Nq, d_points_N, d_points_A, BLOCK_Q, V_POINTS, V_PAD)
    at = (b * H + h) * Nq + row
    most = tl.load(Statistics + at, mask=row < Nq, other=0.0)  # [BLOCK_Q]
    share = tl.load(Statistics + B * H * Nq + at, mask=row < Nq, other=0.0)  # [BLOCK_Q]
    delta = tl.load(Delta + at, mask=row < Nq, other=0.0)  # [BLOCK_Q]
    pair = at[:, None] * Nk + tl.arange(0, BLOCK_K)[None, :]
    dq = tl.zeros([BLOCK_Q, D_PAD], tl.float32)
    dq_points = tl.zeros([BLOCK_Q, P_PAD], tl.float32)
    sum_dx = tl.zeros([BLOCK_Q], tl.float32)
    by_distance = tl.zeros([BLOCK_Q], tl.float32)
    mean_distance = tl.zeros([BLOCK_Q], tl.float32)
    for start in range(0, Nk, BLOCK_K):
        inside = (row < Nq)[:, None] & (start + tl.arange(0, BLOCK_K) < Nk)[None, :]
        # [BLOCK_Q, BLOCK_K]
        x = tl.load(Logits + pair + start, mask=inside, other=float("-inf"))
        # [BLOCK_Q, BLOCK_K]
        dw = tl.load(DWeights + pair + start, mask=inside, other=0.0)
        v = load_rows(at_v, start, Nk, v_N, BLOCK_K, D, D_PAD)
        v_points = load_points(
            at_v_points, start, Nk, v_points_N, v_points_A, BLOCK_K, V_POINTS, V_PAD
        )
        k = load_rows(at_k, start, Nk, k_N, BLOCK_K, D, D_PAD)
        k_points = load_points(at_k_points, start, Nk, k_points_N, k_points_A, BLOCK_K, P, P_PAD)
        dw += multiply(d_scalars, tl.trans(v), PRECISION)
        dw += multiply(d_points, tl.trans(v_points - v_centre), PRECISION)
        w = tl.exp(x - most[:, None]) * share[:, None]
        dx = tl.where(inside, w * (dw - delta[:, None]), 0.0)
        tl.store(DLogits + pair + start, dx, mask=inside)
        dq += multiply(dx, k, PRECISION)
        dq_points += multiply(dx, k_points - k_centre, PRECISION)
        distance = squared_distances(q_points, k_points - k_centre)
        by_distance += tl.sum(dx * distance, 1)
        mean_distance += tl.sum(w * distance, 1)
        sum_dx += tl.sum(dx, 1)
    store_rows(DQ + (b * Nq * H + h) * D, first, Nq, H * D, dq * scale, BLOCK_Q, D, D_PAD)
    dq_points = 2 * gamma * (dq_points - sum_dx[:, None] * q_points)
    at = DQPoints + (b * Nq * 3 * H + h) * P
    store_points(at, first, Nq, 3 * H * P, H * P, dq_points, BLOCK_Q, P, P_PAD)
    at = DHeadWeights + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    # Exact gradients of a row's logits sum to 0; what is left of it would be times the distances.
    tl.store(at, -d_gamma * tl.sum(by_distance - sum_dx * mean_distance, 0))


@triton.jit
def keys_kernel(
    Q, QPoints, KPoints, HeadWeights, Logits, Statistics, DLogits, DScalars, DPoints,
    DKV, DKVPoints,
    B, Nq, Nk, scale, point_scale, q_N, q_H, q_points_N, q_points_A, q_points_H,
    k_points_N, k_points_A, k_points_H, d_scalars_N, d_scalars_H,
    d_points_N, d_points_A, d_points_H,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, V_POINTS: tl.constexpr,
    D_PAD: tl.constexpr, P_PAD: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys, values and their points.

    ``DKV`` is [B, Nk, H, 2 D], ``DKVPoints`` [B, Nk, 3, H, P + V]: keys, then values.
    """
    first = tl.program_id(0) * BLOCK_K
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    gamma, _ = point_weight(HeadWeights, h, point_scale)
    key = first + tl.arange(0, BLOCK_K)
    at = KPoints + b * Nk * k_points_N + h * k_points_H
    centre = load_points(at, 0, Nk, k_points_N, k_points_A, 1, P, P_PAD)
    k_points = load_points(at, first, Nk, k_points_N, k_points_A, BLOCK_K, P, P_PAD) - centre
    at_q = Q + b * Nq * q_N + h * q_H
    at_q_points = QPoints + b * Nq * q_points_N + h * q_points_H
    at_scalars = DScalars + b * Nq * d_scalars_N + h * d_scalars_H
    at_points = DPoints + b * Nq * d_points_N + h * d_points_H
    dk = tl.zeros([BLOCK_K, D_PAD], tl.float32)
    dv = tl.zeros([BLOCK_K, D_PAD], tl.float32)
    dk_points = tl.zeros([BLOCK_K, P_PAD], tl.float32)
    dv_points = tl.zeros([BLOCK_K, V_PAD], tl.float32)
    sum_dx = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, Nq, BLOCK_Q):
        row = start + tl.arange(0, BLOCK_Q)
        query = (b * H + h) * Nq + row
        most = tl.load(Statistics + query, mask=row < Nq, other=0.0)  # [BLOCK_Q]
        share = tl.load(Statistics + B * H * Nq + query, mask=row < Nq, other=0.0)  # [BLOCK_Q]
        pair = query[:, None] * Nk + key[None, :]
        inside = (row < Nq)[:, None] & (key < Nk)[None, :]
        x = tl.load(Logits + pair, mask=inside, other=float("-inf"))  # [BLOCK_Q, BLOCK_K]
        # [BLOCK_K, BLOCK_Q]
        dx = tl.trans(tl.load(DLogits + pair, mask=inside, other=0.0))
        q = load_rows(at_q, start, Nq, q_N, BLOCK_Q, D, D_PAD)
        q_points = load_points(at_q_points, start, Nq, q_points_N, q_points_A, BLOCK_Q, P, P_PAD)
        d_scalars = load_rows(at_scalars, start, Nq, d_scalars_N, BLOCK_Q, D, D_PAD)
        d_points = load_points(
            at_points, start, Nq, d_points_N, d_points_A, BLOCK_Q, V_POINTS, V_PAD
        )
        w = tl.trans(tl.exp(x - most[:, None]) * share[:, None])
        dk += multiply(dx, q, PRECISION)
        dk_points += multiply(dx, q_points - centre, PRECISION)
        sum_dx += tl.sum(dx, 1)
        dv += multiply(w, d_scalars, PRECISION)
        dv_points += multiply(w, d_points, PRECISION)
    at = DKV + (b * Nk * H + h) * 2 * D
    store_rows(at, first, Nk, 2 * H * D, dk * scale, BLOCK_K, D, D_PAD)
    store_rows(at + D, first, Nk, 2 * H * D, dv, BLOCK_K, D, D_PAD)
    dk_points = 2 * gamma * (dk_points - sum_dx[:, None] * k_points)
    A: tl.constexpr = H * (P + V_POINTS)
    at = DKVPoints + (b * Nk * 3 * H + h) * (P + V_POINTS)
    store_points(at, first, Nk, 3 * A, A, dk_points, BLOCK_K, P, P_PAD)
    store_points(at + P, first, Nk, 3 * A, A, dv_points, BLOCK_K, V_POINTS, V_PAD)
