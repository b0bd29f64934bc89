"""Kronecker graphs made on a device: Graph500's parameters, directed, each entry once."""

import torch
from torch import Tensor

from bevatron.kernels import Csr

A, B, C = 0.57, 0.19, 0.19
PIECE = 2**26
"""Edges that are drawn at once."""


def kronecker(scale: int, asked: int, device: torch.device | str, seed: int = 42) -> Csr:
    """Draw ``asked`` edges between ``2**scale`` vertices and keep each pair once.

    Vertices are numbered at random, and a row that would be empty gets one entry off the diagonal,
    as in the generator of the paper's artifact.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    count = 2**scale
    number = torch.randperm(count, generator=generator, device=device)
    keys = torch.empty(0, dtype=torch.int64, device=device)
    drawn: list[Tensor] = []
    for start in range(0, asked, PIECE):
        drawn.append(_draw(scale, min(PIECE, asked - start), number, generator))
        if len(drawn) == 4 or start + PIECE >= asked:
            keys, drawn = torch.unique(torch.cat([keys, *drawn])), []
    filled = torch.zeros(count, dtype=torch.bool, device=device)
    filled[keys // count] = True
    empty = (~filled).nonzero().squeeze(1)
    other = torch.randint(1, count, (len(empty),), generator=generator, device=device)
    keys = torch.cat([keys, empty * count + (empty + other) % count]).sort().values
    row_ptr = torch.searchsorted(keys, torch.arange(count + 1, device=device) * count)
    col = (keys % count).to(torch.int32)
    del keys, drawn
    return Csr.from_csr(row_ptr, col, (count, count))


def _draw(scale: int, edges: int, number: Tensor, generator: torch.Generator) -> Tensor:
    row = torch.zeros(edges, dtype=torch.int64, device=number.device)
    col = torch.zeros_like(row)
    for _ in range(scale):
        place = torch.rand(edges, generator=generator, device=number.device)
        low = place >= A + B
        right = ((place >= A) & ~low) | (place >= A + B + C)
        row, col = 2 * row + low, 2 * col + right
    return number[row] * len(number) + number[col]
