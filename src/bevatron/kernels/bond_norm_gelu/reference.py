"""The sum of a split layer's parts, normalised and activated, in plain PyTorch."""

import torch
from torch import Tensor

from bevatron.kernels.bonds import Bonds
from bevatron.kernels.norm_gelu.reference import activated_norm
from bevatron.kernels.segment_sum.reference import segment_of_rows


def bond_norm_gelu(
    edge_rows: Tensor,
    receiver_rows: Tensor,
    sender_rows: Tensor,
    bonds: Bonds,
    weight: Tensor,
    bias: Tensor,
    linear_bias: Tensor | None,
    graph_rows: Tensor | None,
    ptr: Tensor | None,
    eps: float,
) -> Tensor:
    """Compute ``gelu(layer_norm(a[receiver] + b[sender] + c + t[graph] + linear_bias))``."""
    wide = torch.promote_types(edge_rows.dtype, torch.float32)
    z = receiver_rows.to(wide)[bonds.receivers] + sender_rows.to(wide)[bonds.senders]
    z = z + edge_rows.to(wide)
    if graph_rows is not None and ptr is not None:
        graph = segment_of_rows(ptr, bonds.num_atoms)[bonds.receivers]
        nothing = graph_rows.new_zeros((1, graph_rows.shape[1]), dtype=wide)
        z = z + torch.cat([graph_rows.to(wide), nothing])[graph]
    if linear_bias is not None:
        z = z + linear_bias.to(wide)
    return activated_norm(z, weight, bias, eps, "gelu").to(edge_rows.dtype)
