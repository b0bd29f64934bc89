"""The random mask of attention dropout: a function of (seed, row, column, head), never stored.

Forward and backward passes compute the same bits, in any order of entries, on any device and for
any partition of the matrix. The mixing steps are those of MurmurHash3's 32-bit finaliser.
"""

import torch
from torch import Tensor

from bevatron.kernels.graph.csr import Csr

MASK = 0xFFFFFFFF
FIRST, SECOND = 0x85EBCA6B, 0xC2B2AE35
COLUMN, HEAD = 0x9E3779B9, 0x7F4A7C15


def mix(word: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64."""
    word = word ^ (word >> 16)
    word = (word * FIRST) & MASK
    word = word ^ (word >> 13)
    word = (word * SECOND) & MASK
    return word ^ (word >> 16)


def as_seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """Return a seed as an int64 tensor [1] on a device; None draws one from torch's generator."""
    if seed is None:
        return torch.randint(0, 2**62, (1,), device=device)
    if isinstance(seed, Tensor):
        return seed.reshape(1).to(device, torch.int64)
    return torch.full((1,), seed, device=device, dtype=torch.int64)


def threshold(dropout: float) -> int:
    """Return the 32-bit word below which an entry is dropped."""
    return min(MASK, round(dropout * 2**32))


def keep_mask(csr: Csr, seed: Tensor, num_heads: int, dropout: float) -> Tensor:
    """Compute 0 or 1/(1 - dropout) for every entry in CSR order and head, [E, H] float64."""
    heads = torch.arange(num_heads, device=csr.device)
    low, high = seed & MASK, (seed >> 32) & MASK
    key = mix(low ^ mix((heads * HEAD + high) & MASK))
    row, col = csr.row_index.long(), csr.col.long()
    row = (row if csr.row_ids is None else csr.row_ids.long()[row]) & MASK
    col = (col if csr.col_ids is None else csr.col_ids.long()[col]) & MASK
    row_key = mix(row[:, None] ^ key)
    word = mix(row_key ^ mix((col + COLUMN) & MASK)[:, None])
    return (word >= threshold(dropout)).double() / (1.0 - dropout)
