"""PyTorch Geometric's `Data`: in memory, or saved and loaded without running any code."""

import struct
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from bevatron.data.graphs.graph import SparseFeatures
from bevatron.data.graphs.raw import RawGraph
from bevatron.data.graphs.vertices import SPLIT_NAMES
from bevatron.errors import DataError, TrustError
from bevatron.typing import Array


def raw_from_pyg(data: Any, name: str = "data") -> RawGraph:
    """Read a `torch_geometric.data.Data`, or a mapping with its fields.

    ``edge_index`` [2, E] holds sources and destinations: a destination attends to its sources.
    ``x``, ``y``, ``edge_weight`` (or ``edge_attr`` of one column) and the masks are taken if there.
    Raises DataError if there are no edges, edge features of several columns, or several graphs.
    """
    data = _single(data, name)
    values = data if isinstance(data, Mapping) else data.to_dict()
    if values.get("edge_index") is None:
        raise DataError(
            f"{name}: has no edge_index; of a HeteroData take one edge type, of a Data with adj_t "
            "its COO form"
        )
    sources, destinations = (_array(row) for row in values["edge_index"])
    count = values.get("num_nodes")
    if count is None and not isinstance(data, Mapping):
        count = data.num_nodes
    return RawGraph(
        name=name,
        rows=destinations,
        cols=sources,
        weights=_edge_weights(values, name),
        num_nodes=None if count is None else int(count),
        features=_features(values.get("x")),
        labels=_optional(values.get("y")),
        splits={
            key: _array(values[key])
            for names in SPLIT_NAMES.values()
            for key in names
            if values.get(key) is not None
        },
    )


def read_pt(path: Path) -> RawGraph:
    """Read a file that ``torch.save`` wrote of a `Data`, of its dict, or of a processed data set.

    It is loaded with ``weights_only``: tensors and plain values, nothing that could run code.
    Raises TrustError if the file holds more than that; DataError if it cannot be read or holds no
    graph.
    """
    try:
        with _pyg_classes():
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError:
        raise TrustError(
            f"{path}: holds Python objects other than tensors and PyTorch Geometric's Data, which "
            "could run any code when unpickled; save torch.save(data.to_dict(), FILE) instead"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, struct.error) as error:
        raise DataError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
    if isinstance(loaded, tuple) and loaded:  # (data, slices, ...) of an InMemoryDataset
        if len(loaded) > 1 and _more_than_one(loaded[1]):
            raise DataError(f"{path}: holds several graphs, expected one; {_APART}")
        loaded = loaded[0]
    loaded = _single(loaded, str(path))
    if not isinstance(loaded, Mapping) and not hasattr(loaded, "to_dict"):
        raise DataError(f"{path}: holds a {type(loaded).__name__}, expected a Data or its dict")
    return raw_from_pyg(loaded, str(path))


_APART = "save each to a file of its own and pass all of them"


def _single(data: Any, name: str) -> Any:
    """Take the graph out of a list of one."""
    if not isinstance(data, tuple | list):
        return data
    if len(data) != 1:
        raise DataError(f"{name}: is a list of {len(data):,} graphs, expected one; {_APART}")
    return data[0]


def _more_than_one(second: Any) -> bool:
    """Whether a graph is followed by the bounds of several in it, or by another graph."""
    if not isinstance(second, Mapping):
        return second is not None
    bounds = all(getattr(value, "ndim", 1) == 1 for value in second.values())
    return not bounds or any(len(value) > 2 for value in second.values())


def _pyg_classes() -> AbstractContextManager[Any]:
    """Allow the classes of a `Data`, if PyTorch Geometric is there; they only hold values."""
    try:
        from torch_geometric.data import data, storage
    except ImportError:
        return nullcontext()
    names: Iterable[tuple[Any, str]] = (
        (data, "Data"),
        (data, "DataEdgeAttr"),
        (data, "DataTensorAttr"),
        (storage, "GlobalStorage"),
    )
    return torch.serialization.safe_globals(
        [getattr(module, name) for module, name in names if hasattr(module, name)]
    )


def _edge_weights(values: Mapping[str, Any], name: str) -> Array | None:
    for key in ("edge_weight", "edge_attr"):
        found = _optional(values.get(key))
        if found is None:
            continue
        if found.ndim == 2 and found.shape[1] == 1:
            found = found[:, 0]
        if found.ndim != 1:
            raise DataError(
                f"{name}: {key} has shape {found.shape}; edge features are not supported, a weight "
                "per edge is: delete it or reduce it to one column"
            )
        return found
    return None


def _features(value: Any) -> Array | SparseFeatures | None:
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        csr = value.to_sparse_csr()
        return SparseFeatures(
            _array(csr.crow_indices()),
            _array(csr.col_indices()),
            csr.values().float().numpy(),
            int(csr.shape[1]),
        )
    return _optional(value)


def _optional(value: Any) -> Array | None:
    return None if value is None else _array(value)


def _array(value: Any) -> Array:
    return torch.as_tensor(value).detach().cpu().numpy()
