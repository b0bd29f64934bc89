"""The parts of a split layer summed, normalised and activated in Triton."""

from torch import Tensor

from bevatron.kernels.molecule.bonds import Bonds
from bevatron.kernels.molecule.norm_gelu.triton import normalise
from bevatron.kernels.shared.checks import check_width
from bevatron.kernels.shared.launch import contiguous


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
    """Compute the same as the reference; see `bevatron.kernels.molecule.bond_norm_gelu`."""
    check_width("bond_norm_gelu", edge_rows)
    rows = (edge_rows, atom_rows, graph_rows, linear_bias, weight, bias)
    lists = (bonds.receivers, bonds.senders, bonds.incoming, bonds.incoming_ptr, graph, ptr)
    y: Tensor = normalise(*map(contiguous, (*rows, *lists)), eps, False)[0]
    return y
