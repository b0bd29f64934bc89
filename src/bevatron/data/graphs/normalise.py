"""Self loops, reverse edges and duplicates: the edges of a graph in their final order."""

from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.data.graphs.graph import Edges, Found, in_float32, index_type
from bevatron.data.graphs.options import EdgePolicy
from bevatron.errors import DataError
from bevatron.typing import BoolArray, IntArray


def normalise_edges(
    edges: Edges, num_nodes: int, policy: EdgePolicy, name: str
) -> tuple[Edges, Found]:
    """Check, sort and change edges as a policy says.

    First duplicates are merged, then missing reverse edges are added, then self loops are handled.
    Without weights only the keys ``row * N + column`` are held in memory. Raises DataError for an
    index out of range, a weight that is not a number, or a duplicate that is not allowed.

    Parameters
    ----------
    edges : in any order
    num_nodes : N

    Returns
    -------
    The edges by row, then column, and what was done.
    """
    check_indices(edges, num_nodes, name)
    keys = edges.rows.astype(np.int64) * num_nodes + edges.cols
    keys, weights, doubled = _merged(keys, edges.weights, num_nodes, policy, name)
    keys, weights, mirrored = (
        _symmetrised(keys, weights, num_nodes) if policy.symmetrise else (keys, weights, 0)
    )
    keys, weights, added = _with_loops(keys, weights, num_nodes, policy)
    dtype: Any = index_type(num_nodes)
    rows = (keys // max(num_nodes, 1)).astype(dtype)
    cols = (keys - rows.astype(np.int64) * num_nodes).astype(dtype)
    found = Found(len(edges), doubled, mirrored, added)
    return Edges(rows, cols, weights), found


def duplicate_edge(name: str, row: int, col: int, more: str = "") -> DataError:
    """Return the error of an edge that is repeated."""
    return DataError(
        f"{name}: the edge from {col} to {row} occurs more than once{more}; set "
        "duplicates='merge' or duplicates='sum' to combine them"
    )


def check_indices(edges: Edges, num_nodes: int, name: str, first: int = 0) -> None:
    """Refuse edges that point outside of the graph; DataError naming the first such edge.

    Parameters
    ----------
    first : number of the first of these edges in the file, for the message
    """
    for what, values in (("destination", edges.rows), ("source", edges.cols)):
        wrong = np.flatnonzero((values < 0) | (values >= num_nodes))
        if len(wrong):
            value = int(values[wrong[0]])
            kind = "is negative" if value < 0 else f"is outside of its {num_nodes} vertices"
            raise DataError(
                f"{name}: edge {first + int(wrong[0])}: its {what} {value} {kind} "
                "(vertices are numbered from 0)"
            )
    if edges.weights is not None:
        wrong = np.flatnonzero(~in_float32(edges.weights))
        if len(wrong):
            raise DataError(
                f"{name}: edge {first + int(wrong[0])}: its weight is "
                f"{edges.weights[wrong[0]]}, expected a number that float32 holds"
            )


def _merged(
    keys: IntArray,
    weights: npt.NDArray[np.floating] | None,
    num_nodes: int,
    policy: EdgePolicy,
    name: str,
) -> tuple[IntArray, npt.NDArray[np.floating] | None, int]:
    """Sort the keys and keep each once."""
    if weights is None:
        keys.sort()
    else:
        order = np.argsort(keys, kind="stable")
        keys, weights = keys[order], weights[order]
    new: BoolArray = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    doubled = len(keys) - int(new.sum())
    if not doubled:
        if policy.duplicates == "sum" and weights is None:
            weights = np.ones(len(keys), dtype=np.float32)
        return keys, weights, 0
    if policy.duplicates == "refuse":
        row, col = divmod(int(keys[np.flatnonzero(~new)[0]]), num_nodes)
        raise duplicate_edge(name, row, col, f" ({doubled:,} such entries in all)")
    if policy.duplicates == "sum":
        begins = np.flatnonzero(new)
        values = np.ones(len(keys), dtype=np.float32) if weights is None else weights
        weights = np.add.reduceat(values, begins)
    elif weights is not None:
        weights = weights[new]
    return keys[new], weights, doubled


def _symmetrised(
    keys: IntArray, weights: npt.NDArray[np.floating] | None, num_nodes: int
) -> tuple[IntArray, npt.NDArray[np.floating] | None, int]:
    """Add the reverse of the edges that have none; keys are sorted before and after."""
    rows, cols = np.divmod(keys, num_nodes)
    mirrored = cols * num_nodes + rows
    place = np.minimum(np.searchsorted(keys, mirrored), max(len(keys) - 1, 0))
    missing = keys[place] != mirrored if len(keys) else np.zeros(0, dtype=bool)
    extra = mirrored[missing]
    both = None if weights is None else np.concatenate([weights, weights[missing]])
    return *_sorted(np.concatenate([keys, extra]), both), len(extra)


def _with_loops(
    keys: IntArray, weights: npt.NDArray[np.floating] | None, num_nodes: int, policy: EdgePolicy
) -> tuple[IntArray, npt.NDArray[np.floating] | None, int]:
    if policy.self_loops == "keep":
        return keys, weights, 0
    diagonal = np.arange(num_nodes, dtype=np.int64) * (num_nodes + 1)
    if policy.removes_loops:
        others = keys % (num_nodes + 1) != 0 if num_nodes else np.ones(0, dtype=bool)
        keys, weights = keys[others], None if weights is None else weights[others]
    if not policy.adds_loops:
        return keys, weights, 0
    place = np.minimum(np.searchsorted(keys, diagonal), max(len(keys) - 1, 0))
    missing = keys[place] != diagonal if len(keys) else np.ones(num_nodes, dtype=bool)
    extra = diagonal[missing]
    ones = None if weights is None else np.ones(len(extra), dtype=weights.dtype)
    both = None if weights is None or ones is None else np.concatenate([weights, ones])
    return *_sorted(np.concatenate([keys, extra]), both), len(extra)


def _sorted(
    keys: IntArray, weights: npt.NDArray[np.floating] | None
) -> tuple[IntArray, npt.NDArray[np.floating] | None]:
    if weights is None:
        keys.sort()
        return keys, None
    order = np.argsort(keys, kind="stable")
    return keys[order], weights[order]
