"""Attention within molecules in plain PyTorch, pair by pair: the specification."""

import torch
from torch import Tensor

from bevatron.kernels.shared.dtypes import wide_type

BITS = 0xFFFFFFFF


def molecule_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    graph_ptr: Tensor,
    pair_ptr: Tensor,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``sum_j softmax_j(scale q_i . k_j + bias_ij) v_j`` within every molecule.

    The bias is returned too.
    """
    queries, keys, values = q.unbind(1) if k is None or v is None else (q, k, v)
    num_atoms, num_heads, _ = queries.shape
    narrow, wide = q.dtype, wide_type(q)
    num_pairs = int(pair_ptr[-1]) if bias is None else len(bias)
    query, key = atoms_of_pairs(graph_ptr, pair_ptr, num_pairs, num_atoms)
    # Pairs of no molecule belong to an extra atom, which is dropped at the end.
    rows = num_atoms + 1
    none = q.new_zeros((1, *queries.shape[1:]), dtype=wide)
    queries, keys, values = (torch.cat([t.to(wide), none]) for t in (queries, keys, values))
    logits = (queries[query] * keys[key]).sum(-1) * scale
    if bias is not None:
        logits = logits + bias.to(wide)
    index = query[:, None].expand(-1, num_heads)
    top = logits.new_full((rows, num_heads), -torch.inf)
    top = top.scatter_reduce(0, index, logits.detach(), "amax", include_self=False)
    weights = torch.exp(logits - top[query])
    weights = weights / logits.new_zeros(rows, num_heads).index_add(0, query, weights)[query]
    if dropout > 0.0 and seed is not None:
        heads = torch.arange(num_heads, device=q.device)
        kept = dropout_mask(seed, query[:, None], key[:, None], heads[None, :], dropout)
        weights = torch.where(kept, weights / (1.0 - dropout), 0.0)
    out = torch.zeros_like(values).index_add(0, query, weights[..., None] * values[key])
    return out[:num_atoms].to(narrow), bias


def atoms_of_pairs(
    graph_ptr: Tensor, pair_ptr: Tensor, num_pairs: int, num_atoms: int
) -> tuple[Tensor, Tensor]:
    """Return the two atoms of each pair; pairs of no molecule get atom ``num_atoms``."""
    pairs = torch.arange(num_pairs, device=pair_ptr.device, dtype=pair_ptr.dtype)
    graph = torch.searchsorted(pair_ptr, pairs, right=True) - 1
    real = graph < len(pair_ptr) - 1
    graph = graph.clamp(max=len(pair_ptr) - 2)
    size = (graph_ptr[1:] - graph_ptr[:-1])[graph].clamp(min=1)
    place, first = pairs - pair_ptr[graph], graph_ptr[graph]
    query = torch.where(real, first + place // size, num_atoms)
    return query, torch.where(real, first + place % size, num_atoms)


def dropout_mask(seed: Tensor, query: Tensor, key: Tensor, head: Tensor, dropout: float) -> Tensor:
    """Return which weights are kept: a 32-bit hash of each is compared with the probability.

    The arguments broadcast. A row is hashed from the seed, the query and the head; then the key is
    mixed in.
    """
    seed = seed.to(torch.int64)
    row = _mix((seed & BITS) + _times(query.to(torch.int64), 0x9E3779B9))
    row = _mix(row + _times(head.to(torch.int64), 0x85EBCA6B) + ((seed >> 32) & BITS))
    return _mix(row + _times(key.to(torch.int64), 0xC2B2AE35)) >= threshold(dropout)


def threshold(dropout: float) -> int:
    """Return the hash, of 2^32, below which a weight is dropped."""
    return min(round(dropout * 2**32), BITS)


def _times(x: Tensor, factor: int) -> Tensor:
    return (x * factor) & BITS


def _mix(x: Tensor) -> Tensor:
    """Spread the bits of a 32-bit number: Wellons' lowbias32."""
    x = x & BITS
    x = _times(x ^ (x >> 16), 0x7FEB352D)
    x = _times(x ^ (x >> 15), 0x846CA68B)
    return x ^ (x >> 16)
