"""The Kronecker graphs of the paper's figures as matrices on a device."""

import torch

from bevatron.data.graphs.generators import Kronecker, block_entries
from bevatron.kernels import Csr


def kronecker(scale: int, asked: int, device: torch.device | str) -> Csr:
    """Draw ``asked`` edges between ``2**scale`` vertices and keep each pair once."""
    row, col = block_entries(Kronecker(2**scale, asked), device=device)
    row_ptr = torch.searchsorted(row, torch.arange(2**scale + 1, device=device))
    return Csr.from_csr(row_ptr, col.to(torch.int32), (2**scale, 2**scale))
