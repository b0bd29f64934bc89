"""Edges in pieces, for graphs whose edge list is too long for one process.

Partitioning a graph into blocks takes an `EdgeSource` (or `generators.Kronecker`), which has
``num_vertices``, ``policy``, ``fill_empty_rows`` and ``pieces(device)``; it can be iterated
repeatedly and yields the same edges every time.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from bevatron.data.graphs.edge_list import BLOCK_BYTES, edge_list_pieces
from bevatron.data.graphs.graph import Edges
from bevatron.data.graphs.normalise import check_indices
from bevatron.data.graphs.npz import (
    COUNTS,
    EDGE_FEATURES,
    PAIRS,
    WEIGHTS,
    check_indptr,
    sparse_format,
)
from bevatron.data.graphs.ogb import is_ogb_folder
from bevatron.data.graphs.options import EdgePolicy, GraphOptions
from bevatron.data.graphs.raw import checked_count, raw_edges
from bevatron.data.graphs.zipped import NpzFile
from bevatron.errors import ConfigError, DataError
from bevatron.typing import Array

PIECE_EDGES = 2**22


@dataclass(frozen=True)
class EdgeSource:
    """Edges of a file as pieces of (row, column), row i attending to the columns stored in it.

    Made by `read_in_pieces`.

    Attributes
    ----------
    path : the file or OGB's folder
    policy : duplicates, reverse edges and self loops; applied where the pieces come together
    num_vertices : number of vertices
    weight_type : type of the edge weights: torch.float32 or float64; None if all are 1
    """

    path: Path
    policy: EdgePolicy
    num_vertices: int
    weight_type: torch.dtype | None = None

    fill_empty_rows = False

    @property
    def weighted(self) -> bool:
        """Whether entries of the matrix have values."""
        return self.weight_type is not None or self.policy.duplicates == "sum"

    @property
    def name(self) -> str:
        """The file, for messages."""
        return str(self.path)

    def fill_empty_row(self, rows: Int64[Tensor, "R"]) -> Int64[Tensor, "R"]:
        """Not used: empty rows stay empty."""
        return rows

    def pieces(
        self, device: torch.device | str = "cpu", piece: int | None = None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield (row, column), or (row, column, weight), of about ``piece`` edges at a time.

        Raises DataError for an index out of range or a weight that is not a number, naming the
        edge.
        """
        first = 0
        for edges in _file_pieces(self.path, piece or PIECE_EDGES):
            check_indices(edges, self.num_vertices, self.name, first)
            first += len(edges)
            found = [torch.from_numpy(ids.astype(np.int64)) for ids in (edges.rows, edges.cols)]
            if self.weight_type is not None:
                weights = np.ones(len(edges)) if edges.weights is None else edges.weights
                found.append(torch.tensor(weights, dtype=self.weight_type))
            yield tuple(tensor.to(device) for tensor in found)


def needs_whole_list(path: Path, options: GraphOptions) -> str:
    """Say why a graph cannot be read in pieces; nothing if it can.

    Examples
    --------
    >>> needs_whole_list(Path("graph.pt"), GraphOptions())
    'files of PyTorch Geometric are loaded as a whole'
    """
    if path.suffix in {".pt", ".pth"}:
        return "files of PyTorch Geometric are loaded as a whole"
    if options.renumber:
        return "renumber needs the whole edge list"
    return ""


def read_in_pieces(
    path: Path | str, options: GraphOptions | None = None, num_vertices: int | None = None
) -> EdgeSource:
    r"""Open an edge list (text, npz, OGB's folder) to be read a piece at a time.

    Raises ConfigError for a file or options that need the whole list; DataError if the file cannot
    be read.

    Parameters
    ----------
    path : the file; of an npz with ``edge_index`` or ``edge_src``/``edge_dst``, or a CSR matrix
    options : as for a whole graph; ids are not renumbered
    num_vertices
        How many there are unless the options or the file say so; by default the largest id + 1.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "ring.txt"
    >>> _ = file.write_text("0 1\n1 2\n2 0\n")
    >>> source = read_in_pieces(file)
    >>> source.num_vertices, [(row.tolist(), col.tolist()) for row, col in source.pieces()]
    (3, [([1, 2, 0], [0, 1, 2])])
    """
    path, options = Path(path), options or GraphOptions()
    obstacle = needs_whole_list(path, options)
    if obstacle:
        raise ConfigError(f"{path}: cannot be read in pieces, {obstacle}")
    if path.is_dir() and not is_ogb_folder(path):
        raise DataError(f"{path}: is a folder without OGB's raw/edge.csv.gz or raw/data.npz")
    if not path.exists():
        raise DataError(f"{path}: there is no such file")
    policy = EdgePolicy(options.self_loops, options.symmetrise, options.duplicates)
    count = options.num_nodes or _stated_count(path) or num_vertices or _largest(path) + 1
    return EdgeSource(path, policy, checked_count(count, str(path)), _weight_type(path))


def _edge_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    binary = path / "raw" / "data.npz"
    return binary if binary.is_file() else path / "raw" / "edge.csv.gz"


def _stated_count(path: Path) -> int | None:
    """Read the number of vertices, if the file states it."""
    listed = path / "raw" / "num-node-list.csv.gz"
    if listed.is_file():
        import gzip

        return int(gzip.decompress(listed.read_bytes()).split()[0])
    file_path = _edge_file(path)
    if file_path.suffix == ".npz":
        with NpzFile(file_path) as file:
            for name in (*COUNTS, "num_nodes_list"):
                if name in file:
                    return int(file.read(name).reshape(-1)[0])
            for prefix in ("", "adj_"):
                if f"{prefix}indptr" in file:
                    return int(file.header(f"{prefix}indptr")[0][0]) - 1
            for name in ("labels", "y", "features", "x"):
                if name in file:
                    return int(file.header(name)[0][0])
    return None


def _largest(path: Path) -> int:
    """Find the largest number of a vertex by a pass over all edges."""
    largest = -1
    for edges in _file_pieces(path, PIECE_EDGES):
        if len(edges):
            largest = max(largest, int(edges.rows.max()), int(edges.cols.max()))
    if largest < 0:
        raise DataError(f"{path}: holds no edges and no number of vertices")
    return largest


def _weight_type(path: Path) -> torch.dtype | None:
    """Find the type of the edge weights, if necessary by a pass over all edges."""
    if not path.is_dir() and path.suffix == ".npz":
        with NpzFile(path) as file:
            if _weights_name(file) is None:
                return None
    for edges in _file_pieces(path, PIECE_EDGES):
        if edges.weights is not None and not (edges.weights == 1).all():
            return torch.float64 if edges.weights.dtype == np.float64 else torch.float32
        if edges.weights is None and path.suffix != ".npz":
            return None
    return None


def _weights_name(file: NpzFile) -> str | None:
    """Name the array of a weight per edge; refuse features of edges.

    Raises DataError for features of edges.
    """
    for prefix in ("", "adj_"):
        if sparse_format(file, prefix) is not None and f"{prefix}data" in file:
            return f"{prefix}data"
    for name in EDGE_FEATURES:
        if name in file and len(shape := file.header(name)[0]) != 1 and shape[1:] != (1,):
            raise DataError(
                f"{file.path}: '{name}' has shape {shape}; features of edges are not supported, a "
                "weight per edge is: leave it out or reduce it to one column"
            )
    return next((name for name in (*WEIGHTS, *EDGE_FEATURES) if name in file), None)


def _weights(file: NpzFile, name: str | None, size: int) -> Iterator[Array | None]:
    """Yield the weights of each piece, None forever if there are none."""
    if name is None:
        yield from itertools.repeat(None)
    else:
        yield from (part.reshape(-1) for part in file.rows(name, size))


def _file_pieces(path: Path, size: int) -> Iterator[Edges]:
    folder, path = path.is_dir(), _edge_file(path)
    if path.suffix != ".npz":
        yield from edge_list_pieces(path, min(BLOCK_BYTES, 8 * size))
        return
    with NpzFile(path) as file:
        weights = _weights(file, None if folder else _weights_name(file), size)
        for prefix in ("", "adj_"):
            if sparse_format(file, prefix) in {"csr", "csc"}:
                yield from _compressed_pieces(file, prefix, size, weights)
                return
        for source, destination in PAIRS:
            if source in file and destination in file:
                columns = zip(file.rows(source, size), file.rows(destination, size), strict=True)
                yield from _weighted(((row, col) for col, row in columns), weights, path)
                return
        for name in ("edge_index", "edges"):
            if name in file:
                yield from _weighted(_pairs_of(file, name, size), weights, path)
                return
        raise DataError(f"{path}: holds no edges that can be read in pieces")


def _pairs_of(file: NpzFile, name: str, size: int) -> Iterator[tuple[Array, Array]]:
    """Yield (rows, columns) of an array [2, E] or [E, 2] of sources and destinations."""
    shape, _ = file.header(name)
    if len(shape) != 2 or 2 not in shape:
        raise DataError(f"{file.path}: '{name}' has shape {shape}, expected [2, E]")
    if shape[0] != 2 or name == "edges":
        yield from ((part[:, 1], part[:, 0]) for part in file.rows(name, size))
        return
    m = shape[1]
    columns = zip(file.flat(name, size, 0, m), file.flat(name, size, m, 2 * m), strict=False)
    yield from ((row, col) for col, row in columns)


def _compressed_pieces(
    file: NpzFile, prefix: str, size: int, weights: Iterator[Array | None]
) -> Iterator[Edges]:
    indptr = file.read(f"{prefix}indptr")
    shape, _ = file.header(f"{prefix}indices")
    check_indptr(indptr, int(shape[0]), str(file.path), f"{prefix}indptr")
    by_row = sparse_format(file, prefix) == "csr"

    def pairs() -> Iterator[tuple[Array, Array]]:
        start = 0
        for part in file.rows(f"{prefix}indices", size):
            places = np.arange(start, start + len(part))
            owner = np.searchsorted(indptr, places, side="right") - 1
            yield (owner, part) if by_row else (part, owner)
            start += len(part)

    yield from _weighted(pairs(), weights, file.path)


def _weighted(
    pairs: Iterator[tuple[Array, Array]], weights: Iterator[Array | None], path: Path
) -> Iterator[Edges]:
    """Zip (rows, columns) with their weights.

    Raises DataError if there are more or fewer weights than edges.
    """
    for rows, cols in pairs:
        yield raw_edges(str(path), rows, cols, next(weights, np.zeros(0, dtype=np.float32)))
    left = next(weights, None)
    if left is not None:
        raise DataError(f"{path}: holds at least {len(left):,} weights more than edges")
