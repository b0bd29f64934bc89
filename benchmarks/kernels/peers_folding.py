"""What the operators of structure modules are compared with: plain PyTorch, SDPA, flex_attention.

As in `peers_pair`, every function takes the tensors of a case by name, and of plain PyTorch the
compiled peer is made.
"""

import functools

import torch
import torch.nn.functional as F
from benchmarks.kernels.peers_pair import compiled
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from bevatron import kernels
from bevatron.kernels.pair.smooth_lddt.reference import THRESHOLDS


def in_windows(x: Tensor, bias: Tensor) -> Tensor:
    """Cut the atoms [B, M, A, ..] into windows [B, M, W, Q, ..]."""
    W, Q = bias.shape[1], bias.shape[3]
    padding = [0, 0] * (x.ndim - 3)
    return F.pad(x, (*padding, 0, W * Q - x.shape[2])).unflatten(2, (W, Q))


def around(x: Tensor, bias: Tensor) -> Tensor:
    """Return the atoms around each window [B, M, W, .., K]: a view of one padded copy."""
    W, (Q, K) = bias.shape[1], bias.shape[3:]
    before, padding = (K - Q) // 2, [0, 0] * (x.ndim - 3)
    behind = W * Q - x.shape[2] + K - Q - before
    return F.pad(x, (*padding, before, behind)).unfold(2, K, Q)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bias: Tensor, mask: Tensor
) -> Tensor:
    queries = in_windows(q * q.shape[-1] ** -0.5, bias)
    logits = torch.einsum("bmwqhd,bmwhdk->bmwhqk", queries, around(k, bias)) + bias[:, None]
    keep = around(mask[:, None], bias)[:, :, :, None, None]
    weights = logits.masked_fill(~keep, float("-inf")).softmax(-1)
    result = torch.einsum("bmwhqk,bmwhdk->bmwqhd", weights, around(v, bias)).flatten(2, 3)
    return gate.sigmoid() * result[:, :, : q.shape[2]]


def of_rows(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return windows as samples and copies as rows: q, k, v [W, M, n, H, D] and the mask."""
    rows = in_windows(q, bias).squeeze(0).transpose(0, 1)  # an index would copy the gradient
    keys, values = (around(x, bias).squeeze(0).movedim(-1, 2).transpose(0, 1) for x in (k, v))
    keep = around(mask[:, None], bias)[0, 0][:, None].expand(-1, q.shape[1], -1)
    return rows, keys, values, keep


def joined(windows: Tensor, gate: Tensor) -> Tensor:
    """Turn a result [W, M, Q, H, D] into gated atoms."""
    return gate.sigmoid() * windows.transpose(0, 1).flatten(1, 2)[None, :, : gate.shape[2]]


def pair_attention_of_windows(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bias: Tensor, mask: Tensor
) -> Tensor:
    rows, keys, values, keep = of_rows(q, k, v, bias, mask)
    gates = in_windows(gate, bias).squeeze(0).transpose(0, 1)
    windows = kernels.pair_attention(
        rows, keys, values, bias.transpose(0, 1), keep, gate=gates, layout="BSNHD"
    )
    return windows.transpose(0, 1).flatten(1, 2)[None, :, : q.shape[2]]


def sdpa_of_windows(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bias: Tensor, mask: Tensor
) -> Tensor:
    rows, keys, values, keep = of_rows(q, k, v, bias, mask)
    W, M = rows.shape[:2]
    heads = [x.flatten(0, 1).transpose(1, 2) for x in (rows, keys, values)]
    added = bias.squeeze(0).masked_fill(~keep[:, 0, None, None], float("-inf"))
    added = added[:, None].expand(-1, M, -1, -1, -1).flatten(0, 1)
    found = F.scaled_dot_product_attention(*heads, attn_mask=added)
    return joined(found.transpose(1, 2).unflatten(0, (W, M)), gate)


def flex_of_windows(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bias: Tensor, mask: Tensor
) -> Tensor:
    Q, K = bias.shape[3:]
    return compiled(_flex_of_windows)(q, k, v, gate, bias, mask, inside(q.shape[2], Q, K, q.device))


@functools.cache
def inside(atoms: int, queries: int, keys: int, device: torch.device) -> BlockMask:
    """Return which atoms are around each window, as blocks."""

    def around_query(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        place = place_of(i, j, queries, keys)
        return (place >= 0) & (place < keys)

    return create_block_mask(around_query, None, None, atoms, atoms, device=str(device))


def place_of(i: Tensor, j: Tensor, queries: int, keys: int) -> Tensor:
    """Return the place of atom j among those around the window of atom i."""
    return j - i // queries * queries + (keys - queries) // 2


def _flex_of_windows(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bias: Tensor, mask: Tensor, blocks: BlockMask
) -> Tensor:
    added, (Q, K) = bias.squeeze(0), bias.shape[3:]

    def score(x: Tensor, _row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        place = place_of(i, j, Q, K).clamp(0, K - 1)
        return torch.where(mask[0, j], x + added[i // Q, head, i % Q, place], -float("inf"))

    heads = [x.squeeze(0).transpose(1, 2) for x in (q, k, v)]
    found: Tensor = flex_attention(*heads, score_mod=score, block_mask=blocks)
    return gate.sigmoid() * found.transpose(1, 2).unsqueeze(0)


def pair_weighted_averaging(
    m: Tensor,
    logits: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    v_weight: Tensor,
    gate_weight: Tensor,
    out_weight: Tensor,
) -> Tensor:
    n = F.layer_norm(m, norm_weight.shape, norm_weight, norm_bias)
    v = F.linear(n, v_weight).unflatten(-1, (len(logits), -1))
    average = torch.einsum("hij,sjhd->sihd", logits.softmax(-1), v).flatten(-2)
    return F.linear(F.linear(n, gate_weight).sigmoid() * average, out_weight)


def smooth_lddt(predicted: Tensor, truth: Tensor, radius: Tensor) -> Tensor:
    """Compute it on tensors of all pairs of atoms of all copies."""
    itself = torch.eye(truth.shape[1], dtype=torch.bool, device=truth.device)

    def distances(x: Tensor) -> Tensor:
        steps = [x[..., :, None, i] - x[..., None, :, i] for i in range(3)]
        squared = steps[0].square() + steps[1].square() + steps[2].square()
        return squared.masked_fill(itself, 1.0).sqrt()

    true, real = distances(truth), radius > 0
    counts = (true < radius[..., None]) & real[..., None] & real[:, None] & ~itself
    error = (distances(predicted) - true[:, None]).abs()
    closeness = sum(torch.sigmoid(t - error) for t in THRESHOLDS) / len(THRESHOLDS)
    total = torch.where(counts[:, None], closeness, 0.0).sum((-2, -1))
    return total / (1e-10 + counts.sum((-2, -1)))[:, None]


def smooth_lddt_in_tiles(predicted: Tensor, truth: Tensor, radius: Tensor) -> Tensor:
    with kernels.use(smooth_lddt="reference"):
        return kernels.smooth_lddt(predicted, truth, radius)
