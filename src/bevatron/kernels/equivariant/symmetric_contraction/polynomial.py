"""The contraction as polynomials: one per component of the result, in the components of A.

All factors of a product are the same feature, so coefficients that differ in the order of factors
add up, and with the weights folded in

    B[n, k, M] = sum over terms t of M: C[z_n, t, k] * A[n, k, i_1] * .. * A[n, k, i_nu],
    C[z, t, k] = sum over paths p of all degrees and orders: mixing[t, p] * W[z, p, k]

Products of more factors contain those of fewer, so the terms form a tree: a node is a product, and
its children have one factor more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from bevatron.maths.constants import computed_once
from bevatron.maths.irreps import Layout, as_layout
from bevatron.maths.symmetric_product import CouplingTensor, known_coupling
from bevatron.typing import FloatArray


@dataclass
class Node:
    """A product of components and its terms.

    Attributes
    ----------
    terms : M -> index of the term
    children : component -> this product times the component
    """

    terms: dict[int, int] = field(default_factory=dict)
    children: dict[int, "Node"] = field(default_factory=dict)

    def restricted(self, m: int) -> "Node":
        """Return the tree of one component M of the result."""
        children = {i: child.restricted(m) for i, child in self.children.items()}
        return Node(
            {m: self.terms[m]} if m in self.terms else {},
            {i: child for i, child in children.items() if child.terms or child.children},
        )


@dataclass(frozen=True, eq=False)
class Polynomial:
    """A polynomial to evaluate; compares by identity.

    Attributes
    ----------
    size : S, the components of A
    degrees : L of each block of the result
    terms
        (M, sorted components) of each term; M counts over all blocks. Depth first in the tree.
    mixing : [terms, paths of all degrees and orders], float64
    layout : layout of a block of the result
    """

    size: int
    degrees: tuple[int, ...]
    terms: tuple[tuple[int, tuple[int, ...]], ...]
    mixing: FloatArray
    layout: Layout = "mul_ir"

    @property
    def num_m(self) -> int:
        """Components of the result in all blocks."""
        return sum(2 * degree + 1 for degree in self.degrees)

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Position of component M in a row of K channels: first * K + channel * step + shift."""
        if self.layout == "ir_mul":
            return [(m, 1, 0) for m in range(self.num_m)]
        return [
            (sum(2 * d + 1 for d in self.degrees[:block]), 2 * degree + 1, m)
            for block, degree in enumerate(self.degrees)
            for m in range(2 * degree + 1)
        ]

    def tree(self, first: int = 0, last: int | None = None) -> Node:
        """Arrange the terms first .. last-1 as a tree."""
        root = Node()
        for number, (m, product) in list(enumerate(self.terms))[first:last]:
            node = root
            for component in product:
                node = node.children.setdefault(component, Node())
            node.terms[m] = number
        return root

    def matrix(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `mixing` as a cached tensor."""
        return _mixing(self, dtype, device)


def polynomial_key(couplings: Sequence[Sequence[CouplingTensor]], layout: Layout = "mul_ir") -> str:
    """Name the polynomial of these couplings; only attributes are read, so a compiler can trace."""
    degrees = [",".join([coupling.key for coupling in orders]) for orders in couplings]
    return "/".join([layout, *degrees])


@cache
def known_polynomial(key: str) -> Polynomial:
    """Return the polynomial of this name."""
    layout, *degrees = key.split("/")
    found = polynomial_of(
        tuple(tuple(map(known_coupling, orders.split(","))) for orders in degrees)
    )
    return replace(found, layout=as_layout(layout))


@lru_cache(maxsize=64)
def polynomial_of(couplings: tuple[tuple[CouplingTensor, ...], ...]) -> Polynomial:
    """Collect the terms of all degrees and orders."""
    columns: dict[tuple[int, tuple[int, ...]], dict[int, float]] = {}
    first_m = first_path = 0
    for orders in couplings:
        for coupling in orders:
            for index, path, value in zip(*coupling.symmetrised(), strict=True):
                m, *product = (int(i) for i in index)
                # Components of high degree first: they share few products.
                key = (first_m + m, tuple(sorted(product, reverse=True)))
                columns.setdefault(key, {})[first_path + int(path)] = float(value)
            first_path += coupling.num_paths
        first_m += 2 * orders[0].degree + 1
    terms = sorted(columns, key=lambda term: (term[1], term[0]))
    mixing = np.zeros((len(terms), first_path))
    for row, term in enumerate(terms):
        for path, value in columns[term].items():
            mixing[row, path] = value
    return Polynomial(
        size=(couplings[0][0].l_max + 1) ** 2,
        degrees=tuple(orders[0].degree for orders in couplings),
        terms=tuple(terms),
        mixing=mixing,
    )


@computed_once
def _mixing(polynomial: Polynomial, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(polynomial.mixing).to(device, dtype)
