"""Sums over the bonds of every atom in plain PyTorch: the specification."""

import torch
from torch import Tensor

from bevatron.kernels.molecule.bonds import Bonds
from bevatron.kernels.shared.dtypes import wide_type


def neighbour_sums(
    messages: Tensor | None,
    nodes: Tensor | None,
    bonds: Bonds,
    scale: Tensor | None,
    outgoing: bool,
    own: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Add row by row, each part by itself; 16-bit types in float32, rounded once."""
    parts: list[Tensor] = []

    def add_up(rows: Tensor, atoms: Tensor) -> None:
        wide = rows.to(wide_type(rows))
        sums = wide.new_zeros(bonds.num_atoms, rows.shape[1]).index_add(0, atoms, wide)
        parts.append(sums.to(rows.dtype))

    if messages is not None:
        scaled = messages if scale is None else messages * scale.to(messages.dtype)[:, None]
        add_up(scaled, bonds.receivers)
        if outgoing:
            add_up(scaled, bonds.senders)
    if nodes is not None:
        add_up(nodes[bonds.senders], bonds.receivers)
        if own:
            parts.append(nodes)
    return torch.cat(parts, 1), messages, nodes
