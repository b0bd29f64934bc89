r"""Coefficients of MACE's symmetric product: all ways to couple nu equal factors to one degree L.

Each factor holds every degree 0..l_max once (irreps 0e+1o+2e+...). Factors are coupled from left to
right, ((l1 l2) -> l12, l3) -> ... -> L, so a path is a sequence of degrees; its coefficients are a
product of Clebsch-Gordan coefficients :math:`C^* = \sqrt{2l+1}\, C` ('component' normalised).
Paths, their order and their number are mace-torch's `U_matrix_real`, because a checkpoint's weights
have one entry per path. Paths that differ in the order of the factors are all kept.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from math import sqrt
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.errors import ConfigError
from bevatron.maths.so3 import coupling
from bevatron.typing import FloatArray, IntArray

MAX_DENSE_BYTES = 512 * 1024**2
"""Largest coefficient tensor, counted dense in float64, that is built."""


@dataclass(frozen=True, eq=False)
class CouplingTensor:
    """The coefficients U[M, lm_1, ..., lm_nu, path], stored sparse.

    Attributes
    ----------
    degree : L, the degree of the result
    l_max : highest degree of a factor; lm runs over the (l_max+1)² components of all degrees
    num_paths
        Length of the last axis. If nothing couples it is 1, all zero, as in mace-torch.
    indices : [non-zeros, 1+nu]: (M, lm_1, ..., lm_nu)
    paths : [non-zeros]: position on the last axis
    values : [non-zeros], float64
    key : identifies these coefficients in every process; `known_coupling` looks them up by it
    """

    degree: int
    l_max: int
    num_paths: int
    indices: IntArray
    paths: IntArray
    values: FloatArray
    key: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(repr((self.degree, self.l_max, self.num_paths)).encode())
        for array in (self.indices, self.paths, self.values):
            digest.update(np.ascontiguousarray(array).tobytes())
        object.__setattr__(self, "key", digest.hexdigest()[:16])
        _known.setdefault(self.key, self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Built again where it is unpickled, so that its key is known there too.
        made_of = (self.degree, self.l_max, self.num_paths, self.indices, self.paths, self.values)
        return CouplingTensor, made_of

    @property
    def correlation(self) -> int:
        """The number nu of factors."""
        return int(self.indices.shape[1]) - 1

    def dense(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return U as mace-torch stores it: [2L+1, S, ..., S, paths]; L = 0 has no first axis."""
        size = (self.l_max + 1) ** 2
        full = torch.zeros(
            (2 * self.degree + 1, *[size] * self.correlation, self.num_paths), dtype=dtype
        )
        where = tuple(torch.from_numpy(column) for column in (*self.indices.T, self.paths))
        full[where] = torch.from_numpy(self.values).to(dtype)
        return full if self.degree else full[0]

    @classmethod
    def from_dense(cls, u: Float[Tensor, "..."], degree: int) -> "CouplingTensor":
        """Take U as a checkpoint stores it, in any basis of paths."""
        full = u.detach().cpu().double().numpy()
        full = full if degree else full[None]
        size = full.shape[1]
        where = np.argwhere(full).astype(np.int64)
        return cls(
            degree=degree,
            l_max=round(sqrt(size)) - 1,
            num_paths=full.shape[-1],
            indices=where[:, :-1],
            paths=where[:, -1],
            values=full[tuple(where.T)],
        )

    def symmetrised(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Add up coefficients that differ only in the order of the factors.

        All factors are the same feature, so this changes no result and leaves far fewer terms.

        Returns
        -------
        tuple
            indices (M, lm_1 <= ... <= lm_nu), paths and values, as the attributes of those names.
        """
        rows = np.concatenate(
            [self.paths[:, None], self.indices[:, :1], np.sort(self.indices[:, 1:], axis=1)], axis=1
        )
        unique, inverse = np.unique(rows, axis=0, return_inverse=True)
        values: FloatArray = np.bincount(
            inverse.ravel(), weights=self.values, minlength=len(unique)
        ).astype(np.float64)
        keep = np.abs(values) > 1e-14
        return unique[keep, 1:], unique[keep, 0], values[keep]


_known: dict[str, CouplingTensor] = {}


def known_coupling(key: str) -> CouplingTensor:
    """Return the coefficients with this key; whatever was made in this process is known."""
    return _known[key]


@cache
def symmetric_coefficients(l_max: int, degree: int, correlation: int) -> CouplingTensor:
    r"""Coefficients that couple ``correlation`` factors of degrees 0..l_max to ``degree``.

    Equal to mace-torch's `U_matrix_real` for irreps 0e+1o+2e+... and output parity :math:`(-1)^L`,
    in value, order and number of paths. Kept for the life of the process. Raises ConfigError if the
    tensor would be too large; the message gives its size.

    Parameters
    ----------
    l_max : highest degree of a factor
    degree : L, the degree of the result
    correlation : the number nu of factors

    Examples
    --------
    >>> [symmetric_coefficients(3, 0, nu).num_paths for nu in (1, 2, 3)]
    [1, 4, 23]
    >>> symmetric_coefficients(3, 1, 2).dense().shape
    torch.Size([3, 16, 16, 6])
    """
    num_paths = count_paths(l_max, degree, correlation)
    size = (l_max + 1) ** 2
    dense_bytes = 8 * max(num_paths, 1) * (2 * degree + 1) * size**correlation
    if dense_bytes > MAX_DENSE_BYTES:
        raise ConfigError(
            f"correlation {correlation} with l_max {l_max} and hidden degree {degree} has "
            f"{num_paths} coupling paths, {dense_bytes / 2**30:.1f} GiB of coefficients (at most "
            f"{MAX_DENSE_BYTES / 2**30:.1f} GiB): lower the correlation, l_max or the hidden degree"
        )
    indices: list[IntArray] = [np.zeros((0, 1 + correlation), dtype=np.int64)]
    paths: list[IntArray] = [np.zeros(0, dtype=np.int64)]
    values: list[FloatArray] = [np.zeros(0)]
    found = _couplings(l_max, degree, correlation, remaining=0)
    for path, block in enumerate(found):
        where = np.argwhere(block.coefficients).astype(np.int64)
        values.append(block.coefficients[tuple(where.T)])
        paths.append(np.full(len(where), path, dtype=np.int64))
        indices.append(where + np.array([0, *(part**2 for part in block.degrees)]))
    return CouplingTensor(
        degree=degree,
        l_max=l_max,
        num_paths=max(len(found), 1),
        indices=np.concatenate(indices),
        paths=np.concatenate(paths),
        values=np.concatenate(values),
    )


def count_paths(l_max: int, degree: int, correlation: int) -> int:
    """Count the paths of `symmetric_coefficients` without building them."""
    counts = Counter({(part, (-1) ** part): 1 for part in range(l_max + 1)})
    for _ in range(correlation - 1):
        longer: Counter[tuple[int, int]] = Counter()
        for (left, parity), number in counts.items():
            for _right, out, out_parity in _products(left, parity, l_max, correlation):
                longer[out, out_parity] += number
        counts = longer
    return counts[degree, (-1) ** degree]


@dataclass(frozen=True)
class _Path:
    """One way to couple ``degrees`` to (``degree``, ``parity``); [2l+1, 2l_1+1, 2l_2+1, ...]."""

    degree: int
    parity: int
    degrees: tuple[int, ...]
    coefficients: FloatArray


def _couplings(l_max: int, degree: int, correlation: int, remaining: int) -> list[_Path]:
    """List all paths over ``correlation`` factors that can still become ``degree``.

    ``remaining`` factors follow. The order is that of nested loops over (left path, right degree,
    result), sorted stably by degree and then odd before even at every level.
    """
    if correlation == 1:
        paths = [
            _Path(part, (-1) ** part, (part,), np.eye(2 * part + 1)) for part in range(l_max + 1)
        ]
    else:
        paths = [
            _coupled(left, right, out, parity)
            for left in _couplings(l_max, degree, correlation - 1, remaining + 1)
            for right, out, parity in _products(
                left.degree, left.parity, l_max, correlation + remaining
            )
            if abs(out - degree) <= remaining * l_max
        ]
    if remaining == 0:
        return [p for p in paths if (p.degree, p.parity) == (degree, (-1) ** degree)]
    return sorted(paths, key=lambda path: (path.degree, path.parity))


def _products(
    left: int, parity: int, l_max: int, correlation: int
) -> Iterator[tuple[int, int, int]]:
    """Degrees (right factor, result) and the result's parity that ``left`` can couple to."""
    for right in range(l_max + 1):
        for out in range(abs(left - right), left + right + 1):
            out_parity = parity * (-1) ** right
            # mace-torch drops results of unnatural parity, and only them, for four factors.
            if correlation != 4 or out_parity == (-1) ** out:
                yield right, out, out_parity


def _coupled(left: _Path, right: int, out: int, parity: int) -> _Path:
    cg = (
        sqrt(2 * out + 1) * _table_sign(out, left.degree, right) * coupling(out, left.degree, right)
    )
    shape = (2 * out + 1, *left.coefficients.shape[1:], 2 * right + 1)
    flat = left.coefficients.reshape(len(left.coefficients), -1)
    block = np.einsum("jk,ijl->ikl", flat, cg).reshape(shape)
    return _Path(out, parity, (*left.degrees, right), block)


@cache
def _table_sign(l1: int, l2: int, l3: int) -> int:
    """Sign of e3nn 0.4.4's coupling relative to `coupling`, which is that of e3nn 0.6.

    mace-torch is bound to 0.4.4. Its tables, where l1+l2+l3 is odd, make the first non-zero entry
    positive for ascending degrees; where it is even both agree.
    """
    if (l1 + l2 + l3) % 2 == 0:
        return 1
    entries = coupling(*sorted((l1, l2, l3))).ravel()
    return 1 if entries[np.flatnonzero(entries)[0]] > 0 else -1
