"""Cost models, and the packing problem in integers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bevatron.data.packing.randomness import RandomStream
from bevatron.errors import DataError
from bevatron.typing import BoolArray, FloatArray, IntArray

Numbers: TypeAlias = float | np.number[Any] | Sequence[Any] | npt.NDArray[Any]
"""A number or array-like of numbers."""

CostTable: TypeAlias = npt.NDArray[Any]
"""Costs [n, d] of any real type."""

_RESOLUTION_BITS = 32
"""Number of bits of a fractional cost after rounding, relative to the largest."""


@dataclass(frozen=True, init=False)
class CostModel:
    """Time or memory of a sample: weights times named counts, plus a constant.

    Parameters
    ----------
    nodes, edges : weights of the two counts of a graph, if ``weights`` are not given
    constant : what a sample costs by itself
    weights : by the name of a count; one called ``constant`` is the constant

    Examples
    --------
    >>> CostModel(nodes=1.0, edges=0.5, constant=2.0)(np.array([3]), np.array([4]))
    array([7.])
    >>> CostModel(weights={"tokens": 0.5, "constant": 2.0})({"tokens": np.array([4])})
    array([4.])
    """

    weights: tuple[tuple[str, float], ...]
    constant: float

    def __init__(
        self,
        nodes: float = 1.0,
        edges: float = 0.0,
        constant: float = 0.0,
        *,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        by_name = dict({"nodes": nodes, "edges": edges} if weights is None else weights)
        object.__setattr__(self, "constant", by_name.pop("constant", constant))
        object.__setattr__(self, "weights", tuple(by_name.items()))

    def __call__(
        self, counts: Mapping[str, Numbers] | Numbers, num_edges: Numbers = 0.0
    ) -> FloatArray:
        """Compute the cost of each sample.

        Parameters
        ----------
        counts : by name, [n] each; or the numbers of nodes alone
        num_edges : numbers of edges, [n], if ``counts`` are those of nodes

        Returns
        -------
        FloatArray
            Costs, [n].
        """
        given = counts if isinstance(counts, Mapping) else {"nodes": counts, "edges": num_edges}
        total = np.zeros(np.shape(next(iter(given.values()))))
        for name, weight in self.weights:
            total = total + weight * np.asarray(given[name], dtype=np.float64)
        return total + self.constant


@dataclass(frozen=True)
class Problem:
    """Samples to be packed; all quantities are integers.

    Attributes
    ----------
    units : [d, n] what a sample uses of each capacity
    limits : [d] the capacities
    balance : [n] the quantity to balance over ranks
    num_ranks : the number of batches, ``reserved`` included, must be a multiple of it
    reserved : number of batches that exist already
    """

    units: IntArray
    limits: IntArray
    balance: IntArray
    num_ranks: int
    reserved: int
    stream: RandomStream

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.balance)

    @property
    def tightest(self) -> int:
        """The capacity that needs the most batches."""
        return int(np.argmax(self.units.sum(axis=1) / self.limits))

    def round_up(self, num_batches: int) -> int:
        """Return the smallest allowed number of batches of at least ``num_batches``."""
        total = -(-(num_batches + self.reserved) // self.num_ranks) * self.num_ranks
        return total - self.reserved

    def loads(
        self, batch_of: IntArray, num_batches: int, samples: BoolArray | None = None
    ) -> IntArray:
        """Sum up ``units`` per batch, of all or of some samples: [d, num_batches]."""
        units = self.units if samples is None else self.units[:, samples]
        sums = [batch_sums(column, batch_of, num_batches) for column in units]
        return np.array(sums, dtype=np.int64).reshape(len(self.units), num_batches)


def batch_sums(values: IntArray, batch_of: IntArray, num_batches: int) -> IntArray:
    """Add up whole numbers per batch; exact below 2^53."""
    return np.bincount(batch_of, weights=values, minlength=num_batches).astype(np.int64)


def cost_columns(costs: Numbers) -> CostTable:
    """Return costs [n] or [n, d] as [n, d], checked.

    Raises DataError if a cost is negative or not finite.
    """
    table = np.asarray(costs)
    if table.dtype.kind not in "iuf":
        raise DataError(f"the costs of samples must be numbers, not of type {table.dtype}")
    if table.ndim not in {1, 2}:
        raise DataError(f"the costs of samples must be [n] or [n, d], got the shape {table.shape}")
    table = table.reshape(len(table), -1 if table.size else 1)
    if table.dtype.kind == "f" and not np.isfinite(table).all():
        row = int(np.flatnonzero(~np.isfinite(table).all(axis=1))[0])
        raise DataError(f"the cost of sample {row} is not finite ({table[row].tolist()})")
    if table.size and table.min() < 0:
        row = int(np.flatnonzero((table < 0).any(axis=1))[0])
        raise DataError(f"the cost of sample {row} is negative ({table[row].tolist()})")
    return table


def capacities(capacity: Numbers | None, num_columns: int) -> FloatArray | None:
    """Return one positive capacity for each column of the costs.

    Raises DataError if there are fewer or more, or one is not above zero.
    """
    if capacity is None:
        return None
    limits = np.atleast_1d(np.asarray(capacity, dtype=np.float64))
    if limits.shape != (num_columns,):
        raise DataError(
            f"costs have {num_columns} column(s) but {limits.size} capacities were given; "
            f"give one for each column"
        )
    if not (limits > 0).all():
        raise DataError(f"a capacity must be above zero, got {limits.tolist()}")
    return limits


def whole_units(table: CostTable, limits: FloatArray) -> tuple[IntArray, IntArray]:
    """Convert cost columns and capacities to integers, so that sums are exact.

    Integer costs stay unchanged; fractions are rounded down to 2^-32 of the largest in their
    column, so a batch may exceed a fractional capacity by that much per sample.
    """
    units = np.empty((table.shape[1], len(table)), dtype=np.int64)
    whole_limits = np.empty(len(limits), dtype=np.int64)
    for j, limit in enumerate(limits):
        column = table[:, j]
        if table.dtype.kind in "iu" or bool((column == np.rint(column)).all()):
            units[j] = column
            whole_limits[j] = int(min(np.floor(limit), 2.0**52))
        else:
            scale = _scale(max(float(column.max(initial=0.0)), 1e-300))
            # Rounded down, so that ten times 0.1 fits into 1.
            units[j] = np.floor(column * scale)
            whole_limits[j] = int(min(np.rint(limit * scale), 2.0**52))
    return units, whole_limits


def whole_balance(values: Numbers, num_samples: int) -> IntArray:
    """Convert the quantity to balance to integers."""
    column = cost_columns(values)
    if column.shape != (num_samples, 1):
        raise DataError(
            f"the balanced quantity needs one value for each of the {num_samples} samples, "
            f"got the shape {np.shape(values)}"
        )
    units: IntArray = whole_units(column, np.array([1.0]))[0][0]
    return units


def refuse_oversized(
    table: CostTable, limits: FloatArray, oversized: BoolArray, names: Callable[[int], str] | None
) -> None:
    """Raise an error that names the first sample above a capacity; DataError if there is one."""
    rows = np.flatnonzero(oversized)
    if not len(rows):
        return
    row = int(rows[0])
    column = int(np.flatnonzero(table[row] > limits)[0])
    name = names(row) if names is not None else f"sample {row}"
    more = f", like {len(rows) - 1} more" if len(rows) > 1 else ""
    which = f" in column {column}" if len(limits) > 1 else ""
    raise DataError(
        f"{name} costs {table[row, column]:g}{which}, more than the capacity of a batch "
        f"({limits[column]:g}){more}; raise the capacity, leave the sample out or ask for "
        f"oversized='alone'"
    )


def _scale(largest: float) -> float:
    """Return the power of two that brings ``largest`` just below 2^32."""
    # Values below 2^-960 count as zero.
    return float(2.0 ** min(_RESOLUTION_BITS - int(np.frexp(largest)[1]), 992))
