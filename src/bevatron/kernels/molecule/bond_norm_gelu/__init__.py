"""LayerNorm and GELU of an edge MLP whose first linear layer is split by its inputs."""

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.molecule.bonds import Bonds
from bevatron.kernels.shared.checks import check_segment_rows, check_vectors

__all__ = ["bond_norm_gelu"]

_operator = registry.operator("bond_norm_gelu", __name__)


def bond_norm_gelu(
    edge_rows: Float[Tensor, "E C"],
    atom_rows: Float[Tensor, "N _"],
    bonds: Bonds,
    weight: Float[Tensor, " C"],
    bias: Float[Tensor, " C"],
    *,
    linear_bias: Float[Tensor, " C"] | None = None,
    graph_rows: Float[Tensor, "G C"] | None = None,
    graph: Int[Tensor, " N"] | None = None,
    ptr: Int[Tensor, " _"] | None = None,
    eps: float = 1e-3,
) -> Float[Tensor, "E C"]:
    r"""Sum the parts of an edge MLP's first layer, normalise and apply GELU (tanh form).

    .. math::

        y_e = \operatorname{GELU}\Big( w \odot \operatorname{norm}\big(
        a_{r(e)} + b_{s(e)} + c_e + t_{g(r(e))} + d \big) + \beta \Big)

    A linear layer on ``[x_r | x_s | e | g]`` is the sum of four: on the receiver and the sender,
    which is computed once per atom, on the edge, and on the molecule's global features. The wide
    matmul per edge is never computed (GPS++, arXiv 2302.02947, edge update). Raises ValueError if a
    shape does not match, naming the argument.

    Parameters
    ----------
    edge_rows : c, the edge's part of the layer
    atom_rows
        [N, 2 C]: a and b, the parts of the receiving and of the sending atom, from one matmul per
        atom.
    bonds : see `bevatron.kernels.molecule.bonds.index_bonds`
    weight, bias : w and beta of the normalisation
    linear_bias : d, the bias of the whole layer
    graph_rows, graph, ptr
        t, one row per molecule; the molecule of each atom, [N], ascending; and the offsets of
        their atoms, [G + 1]. All three or none.
    eps : added to the variance

    Returns
    -------
    Tensor
        [E, C], of the type of ``edge_rows``; computed in float32 for 16-bit types.

    Examples
    --------
    >>> import torch
    >>> from bevatron.kernels.molecule.bonds import index_bonds
    >>> bonds = index_bonds(torch.tensor([[0, 1], [1, 0]]), 2)
    >>> atoms = torch.tensor([[1.0, 2.0, 0.0, 0.0], [3.0, 1.0, 0.0, 0.0]])
    >>> bond_norm_gelu(torch.zeros(2, 2), atoms, bonds, torch.ones(2), torch.zeros(2), eps=0.0)
    tensor([[ 0.8412, -0.1588],
            [-0.1588,  0.8412]])
    """
    if edge_rows.shape[0] != bonds.num_edges:
        raise ValueError(
            f"bond_norm_gelu: {edge_rows.shape[0]} edge rows do not go with {bonds.num_edges} edges"
        )
    shape = (bonds.num_atoms, 2 * edge_rows.shape[1])
    if tuple(atom_rows.shape) != shape or atom_rows.dtype != edge_rows.dtype:
        raise ValueError(
            f"bond_norm_gelu: atom_rows are {atom_rows.dtype} {tuple(atom_rows.shape)}, expected "
            f"{edge_rows.dtype} {shape}"
        )
    check_vectors("bond_norm_gelu", edge_rows, weight=weight, bias=bias, linear_bias=linear_bias)
    check_segment_rows("bond_norm_gelu", edge_rows, graph_rows, graph, ptr)
    run = _operator.dispatch(edge_rows)
    result: Tensor = run(
        *(edge_rows, atom_rows, bonds, weight, bias), *(linear_bias, graph_rows, graph, ptr, eps)
    )
    return result
