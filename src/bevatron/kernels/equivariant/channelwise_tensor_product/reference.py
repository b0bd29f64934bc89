"""The specification of the channelwise tensor product, block of x by block of x."""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from bevatron.kernels.equivariant.channelwise_tensor_product.paths import Path, PathTable
from bevatron.kernels.equivariant.edge_order import EdgeOrder
from bevatron.maths.constants import computed_once
from bevatron.maths.irreps import Irreps, Layout
from bevatron.maths.so3 import wigner_3j


def channelwise_tensor_product(
    x: Tensor,
    harmonics: Tensor,
    weights: Tensor,
    edges: Tensor | EdgeOrder,
    irreps_in: Irreps,
    irreps_harmonics: Irreps,
    table: PathTable,
    layout: Layout = "mul_ir",
) -> Tensor:
    """Per block of x, one small matrix per edge couples the sender to all paths of the block.

    Each path's part is multiplied by its weights and summed over receivers. Channels come last, so
    that a CPU vectorises along them.
    """
    senders, receivers = edges.edges if isinstance(edges, EdgeOrder) else edges
    # One split, because the gradient of every slice would be a full-sized sum.
    path_weights = weights.split([path.out.mul for path in table.paths], dim=1)
    blocks = x.split([block.mul * block.dim for block in irreps_in], dim=1)
    results: dict[int, Tensor] = {}
    for i, (block, part) in enumerate(zip(irreps_in, blocks, strict=True)):
        chosen = [p for p, path in enumerate(table.paths) if path.x == i]
        if not chosen:
            continue
        if layout == "mul_ir":
            by_node = part.unflatten(1, (block.mul, block.dim)).mT.contiguous()
        else:
            by_node = part.unflatten(1, (block.dim, block.mul))
        paths = [table.paths[p] for p in chosen]
        messages = _messages(
            by_node.index_select(0, senders),
            _matrices(harmonics, paths, irreps_harmonics),
            [path_weights[p].unsqueeze(1) for p in chosen],
            [path.out.dim for path in paths],
        )
        for p, message in zip(chosen, messages, strict=True):
            total = message.new_zeros(x.shape[0], *message.shape[1:])
            total = total.index_add(0, receivers, message)
            results[p] = (total.mT if layout == "mul_ir" else total).flatten(1)
    if not results:
        return x.new_zeros(x.shape[0], 0)
    return torch.cat([results[p] for p in range(len(table.paths))], dim=1)


def _messages(
    gathered: Tensor, matrices: Tensor, weights: Sequence[Tensor], dims: Sequence[int]
) -> list[Tensor]:
    """Return w M x of every path, [E, m3, K], from x [E, m1, K] and M [E, m3 of all paths, m1]."""
    if gathered.shape[1] == 1:
        # With one column a broadcast is cheaper than a matmul.
        columns = matrices.split(dims, dim=1)
        return [m * (w * gathered) for m, w in zip(columns, weights, strict=True)]
    coupled = (matrices @ gathered).split(dims, dim=1)
    return [part * w for part, w in zip(coupled, weights, strict=True)]


def _matrices(harmonics: Tensor, paths: Sequence[Path], irreps_harmonics: Irreps) -> Tensor:
    """Contract the coefficients of all paths of one block of x with the harmonics: M."""
    starts = [part.start for part in irreps_harmonics.slices]
    couplings = tuple((starts[p.harmonics], p.l1, p.l2, p.out.l) for p in paths)
    coefficients = _coefficients(couplings, harmonics.shape[1], harmonics.dtype, harmonics.device)
    matrices: Tensor = (harmonics @ coefficients).unflatten(1, (-1, 2 * paths[0].l1 + 1))
    return matrices


@computed_once
def _coefficients(
    couplings: tuple[tuple[int, int, int, int], ...],
    num_harmonics: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return sqrt(2 l3 + 1) C as a matrix [m2 of all harmonics, (path, m3, m1)].

    Each coupling is (first row of its harmonics, l1, l2, l3).
    """
    columns = []
    for start, l1, l2, l3 in couplings:
        part = (sqrt(2 * l3 + 1) * wigner_3j(l1, l2, l3)).permute(1, 2, 0).flatten(1)
        columns.append(part.new_zeros(num_harmonics, part.shape[1]))
        columns[-1][start : start + len(part)] = part
    return torch.cat(columns, dim=1).to(device, dtype)
