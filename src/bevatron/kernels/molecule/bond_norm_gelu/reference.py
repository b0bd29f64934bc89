"""The parts of a split layer summed, normalised and activated in plain PyTorch."""

from torch import Tensor

from bevatron.kernels.molecule.bonds import Bonds
from bevatron.kernels.molecule.norm_gelu.reference import activated_norm
from bevatron.kernels.shared.dtypes import wide_type


def bond_norm_gelu(
    edge_rows: Tensor,
    atom_rows: Tensor,
    bonds: Bonds,
    weight: Tensor,
    bias: Tensor,
    linear_bias: Tensor | None,
    graph_rows: Tensor | None,
    graph: Tensor | None,
    ptr: Tensor | None,
    eps: float,
) -> Tensor:
    """Compute ``gelu(layer_norm(a[receiver] + b[sender] + c + t[graph] + linear_bias))``."""
    del ptr
    wide = wide_type(edge_rows)
    of_receiver, of_sender = atom_rows.to(wide).chunk(2, 1)
    z = of_receiver[bonds.receivers] + of_sender[bonds.senders] + edge_rows.to(wide)
    if graph_rows is not None and graph is not None:
        z = z + graph_rows.to(wide)[graph[bonds.receivers]]
    if linear_bias is not None:
        z = z + linear_bias.to(wide)
    return activated_norm(z, weight, bias, eps, "gelu").to(edge_rows.dtype)
