"""The specification of the symmetric contraction: one matmul per element and channel.

All factors of a product are the same feature, so only sorted products of components count: 816
instead of 4096 for three factors of 16 components. A product of nu sorted components is one of nu-1
times its last, so with all monomials m_p of lower order

    B[n, k, M] = sum_i A[n, k, i] sum_p m_p(A[n, k]) C[z_n, k, p, M, i]

where C gathers the coefficients of all orders, already multiplied with the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np
import torch
from torch import Tensor

from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.maths.irreps import Layout
from bevatron.maths.symmetric_product import CouplingTensor
from bevatron.typing import IntArray


def symmetric_contraction(
    a: Tensor,
    weights: Sequence[Sequence[Tensor]],
    elements: Tensor | ElementOrder,
    couplings: tuple[tuple[CouplingTensor, ...], ...],
    layout: Layout = "mul_ir",
) -> Tensor:
    """Evaluate all degrees at once, element by element."""
    table = _table(couplings, a.dtype, a.device)
    stacked = [torch.cat(list(orders), dim=1) for orders in weights]
    groups = ElementOrder.of(elements, stacked[0].shape[0])
    parts = []
    by_element = a.contiguous()[groups.order].transpose(0, 1).split(groups.counts, dim=1)
    for element, a_kns in enumerate(by_element):
        if a_kns.shape[1] == 0:
            continue
        c = _fold(table, [weight[element] for weight in stacked])
        inner = (_monomials(a_kns, table.order - 1) @ c).unflatten(
            2, (table.num_m, table.num_components)
        )
        parts.append((inner * a_kns.unsqueeze(2)).sum(3))
    if not parts:
        return a.new_zeros(0, a.shape[1] * table.num_m)
    b_nkm = torch.cat(parts, dim=1).transpose(0, 1)[groups.inverse]
    blocks = [b_nkm[:, :, part] for part in table.degrees]
    return torch.cat([(b if layout == "mul_ir" else b.mT).flatten(1) for b in blocks], dim=1)


@dataclass(frozen=True)
class _Table:
    """Positions of the coefficients in C[k, p, (M, i)].

    ``positions`` and ``mixing`` hold, for each degree, the structurally non-zero places in C and
    the matrix [paths of all orders, places] that computes them from the weights.
    """

    order: int
    num_m: int
    num_monomials: int
    num_components: int
    degrees: tuple[slice, ...]
    positions: Tensor
    mixing: tuple[Tensor, ...]


def _fold(table: _Table, weights: Sequence[Tensor]) -> Tensor:
    """Return C[k, p, (M, i)] of one element from its weights [paths, K] of each degree."""
    entries = torch.cat([w.mT @ mix for w, mix in zip(weights, table.mixing, strict=True)], dim=1)
    width = table.num_m * table.num_components
    empty = entries.new_zeros(len(entries), table.num_monomials * width)
    full = empty.scatter(1, table.positions.expand(len(entries), -1), entries)
    return full.view(len(entries), table.num_monomials, width)


def _monomials(a: Tensor, order: int) -> Tensor:
    """Return all products of 0, 1, ..., ``order`` components i <= j <= ..., sorted by the last."""
    monomials = [torch.ones_like(a[..., :1])]
    components = a.split(1, dim=-1)
    for degree in range(1, order + 1):
        shorter = monomials[-1]
        grown = [
            shorter[..., : comb(i + degree - 1, degree - 1)] * component
            for i, component in enumerate(components)
        ]
        monomials.append(torch.cat(grown, dim=-1) if degree > 1 else a)
    return torch.cat(monomials, dim=-1)


@lru_cache(maxsize=64)
def _table(
    couplings: tuple[tuple[CouplingTensor, ...], ...], dtype: torch.dtype, device: torch.device
) -> _Table:
    """Arrange the coefficients of all degrees and orders for one matmul."""
    order = len(couplings[0])
    size = (couplings[0][0].l_max + 1) ** 2
    dims = [2 * orders[0].degree + 1 for orders in couplings]
    ends = np.cumsum(dims).tolist()
    slices = tuple(slice(end - dim, end) for dim, end in zip(dims, ends, strict=True))
    positions, mixing = [], []
    for orders, part in zip(couplings, slices, strict=True):
        places, matrix = _mixing(orders, size, ends[-1], part.start)
        positions.append(torch.from_numpy(places).to(device))
        mixing.append(matrix.to(device, dtype))
    return _Table(
        order=order,
        num_m=ends[-1],
        num_monomials=sum(comb(size + nu - 1, nu) for nu in range(order)),
        num_components=size,
        degrees=slices,
        positions=torch.cat(positions),
        mixing=tuple(mixing),
    )


def _mixing(
    orders: Sequence[CouplingTensor], size: int, num_m: int, first_m: int
) -> tuple[IntArray, Tensor]:
    """Return places in C and the matrix [paths, places] of one degree."""
    places, paths, values = [], [], []
    first_path = first_monomial = 0
    for nu, coupling in enumerate(orders, start=1):
        indices, path, value = coupling.symmetrised()
        # The rank of a sorted index tuple among all, ordered by the last: combinatorial numbering.
        ranks = [[comb(int(i) + t, t + 1) for i in range(size)] for t in range(nu)]
        monomial = first_monomial + sum(
            (np.array(ranks[t])[indices[:, 1 + t]] for t in range(nu - 1)),
            start=np.zeros(len(indices), dtype=np.int64),
        )
        places.append((monomial * num_m + first_m + indices[:, 0]) * size + indices[:, -1])
        paths.append(first_path + path)
        values.append(value)
        first_path += coupling.num_paths
        first_monomial += comb(size + nu - 2, nu - 1)
    unique, column = np.unique(np.concatenate(places), return_inverse=True)
    matrix = torch.zeros(first_path, len(unique), dtype=torch.float64)
    where = (torch.from_numpy(np.concatenate(paths)), torch.from_numpy(column.ravel()))
    matrix[where] = torch.from_numpy(np.concatenate(values))
    return unique, matrix
