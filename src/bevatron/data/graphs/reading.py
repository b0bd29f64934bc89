"""`read_graph`: any kind of graph file."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.graphs.edge_list import read_edge_list
from bevatron.data.graphs.graph import GraphArrays
from bevatron.data.graphs.npz import npz_vertices, read_npz, read_splits
from bevatron.data.graphs.ogb import ogb_vertices, read_ogb
from bevatron.data.graphs.options import GraphOptions
from bevatron.data.graphs.pyg import raw_from_pyg, read_pt
from bevatron.data.graphs.raw import RawGraph, finish
from bevatron.data.graphs.vertices import SPLIT_NAMES
from bevatron.data.graphs.zipped import NpzFile
from bevatron.errors import DataError, OutOfMemoryError, ran_out_of_memory
from bevatron.typing import Array

TEXT = {".txt", ".csv", ".tsv", ".edges", ".edgelist", ".el"}


def read_graph(
    source: Path | str | Any,
    options: GraphOptions | None = None,
    *,
    features: Path | None = None,
    labels: Path | None = None,
    splits: Path | None = None,
) -> GraphArrays:
    r"""Read a graph, check it and sort its edges.

    Raises DataError if a file cannot be read or holds invalid data, naming file and position;
    TrustError if a .pt file holds more than tensors and plain values; OutOfMemoryError if this
    machine has too little memory.

    Parameters
    ----------
    source
        An npz file, an edge list (.txt, .csv, .tsv, .edges, also .gz), a folder of OGB, a .pt file
        of PyTorch Geometric, or a `Data` object.
    options : self loops, reverse edges, duplicates, features, splits
    features, labels : .npy files with one row per vertex, for edge lists
    splits : .npz file with masks or indices of vertices: train, valid, test

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "triangle.txt"
    >>> _ = file.write_text("# source destination\n0 1\n1 2\n2 0\n")
    >>> graph = read_graph(file, GraphOptions(symmetrise=True))
    >>> graph.num_nodes, graph.num_edges, graph.edges.cols.tolist()
    (3, 6, [1, 2, 0, 2, 0, 1])
    """
    options = options or GraphOptions()
    is_file = isinstance(source, str | Path)
    with _explained_memory(str(source) if is_file else "the graph"):
        raw = _raw(Path(source)) if is_file else raw_from_pyg(source)
        return finish(_with_files(raw, features, labels, splits), options)


def read_vertices(
    path: Path,
    num_nodes: int,
    options: GraphOptions | None = None,
    *,
    features: Path | None = None,
    labels: Path | None = None,
    splits: Path | None = None,
) -> GraphArrays:
    """Read only the data of the vertices; the edges are read in pieces.

    Raises DataError as for `read_graph`, for features, labels and splits.

    Parameters
    ----------
    path, options, features, labels, splits : as for `read_graph`
    """
    options = options or GraphOptions()
    nothing = np.zeros(0, dtype=np.int64)
    raw = RawGraph(name=str(path), rows=nothing, cols=nothing, num_nodes=num_nodes)
    plain = replace(options, self_loops="keep", symmetrise=False, num_nodes=num_nodes)
    with _explained_memory(str(path)):
        if path.is_dir():
            raw = replace(raw, **ogb_vertices(path))
        elif path.suffix == ".npz":
            with NpzFile(path) as file:
                raw = replace(raw, **npz_vertices(file))
        return finish(_with_files(raw, features, labels, splits), plain)


@contextmanager
def _explained_memory(name: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"{name}: this machine has too little memory to read the graph ({error}); of an edge "
            "list, npz or folder of OGB, each process of torchrun holds only a part of the edges"
        ) from error


def _with_files(
    raw: RawGraph, features: Path | None, labels: Path | None, splits: Path | None
) -> RawGraph:
    given = {"features": features, "labels": labels, "splits": splits}
    names = {what: str(path) for what, path in given.items() if path is not None}
    raw = replace(raw, separate_files=names)
    if features is not None:
        raw = replace(raw, features=_array(features))
    if labels is not None:
        raw = replace(raw, labels=_array(labels))
    if splits is not None:
        with NpzFile(splits) as file:
            found = read_splits(file)
            if not found:
                raise DataError(
                    f"{splits}: holds no splits, expected arrays train, valid, test (found: "
                    f"{', '.join(file.names)})"
                )
            _check_names(splits, file.names)
            raw = replace(raw, splits=found)
    return raw


def _check_names(path: Path, names: Collection[str]) -> None:
    """Refuse a part of the split that is missing while an array has nearly its name."""
    for known in SPLIT_NAMES.values():
        close = [name for name in names if get_close_matches(name, known, n=1, cutoff=0.8)]
        if close and not set(known) & set(names):
            meant = get_close_matches(close[0], known, n=1)[0]
            raise DataError(f"{path}: holds an array '{close[0]}'; did you mean '{meant}'?")


def _raw(path: Path) -> RawGraph:
    if path.is_dir():
        return read_ogb(path)
    if not path.exists():
        raise DataError(f"{path}: there is no such file")
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if path.suffix == ".npz":
        return read_npz(path)
    if path.suffix in {".pt", ".pth"}:
        return read_pt(path)
    if suffix in TEXT or suffix == ".mtx":
        return read_edge_list(path)
    known = ", ".join(sorted(TEXT))
    raise DataError(
        f"{path}: is not a known kind of graph file; expected .npz, .pt, an edge list ({known}, "
        "also .gz) or a folder of OGB"
    )


def rows_of_files(
    features: Path | None = None, labels: Path | None = None, splits: Path | None = None
) -> int | None:
    """Count the vertices in separate files of features or labels; None without such files."""
    del splits
    found = next((path for path in (features, labels) if path is not None), None)
    return None if found is None else len(_array(found))


def _array(path: Path) -> Array:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as .npy ({error})") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise DataError(f"{path}: is an npz of several arrays, expected a .npy file of one")
    return array
