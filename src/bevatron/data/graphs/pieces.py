"""Edges a piece at a time: graphs whose edge list no process needs as a whole.

An `EdgeSource` is what whoever cuts a graph into blocks takes (as `generators.Kronecker` is one):
``num_vertices``, ``merge_duplicates``, ``fill_empty_rows`` and ``pieces(device)``, which can be
walked as often as need be and gives the same edges every time.
"""

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
from bevatron.data.graphs.options import GraphOptions
from bevatron.data.graphs.raw import raw_edges
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
    path
        The file or OGB's folder.
    options
        Duplicates, reverse edges and self loops, done on the way: each piece is followed by its
        reverse, the first by the self loops, and whoever stores the entries keeps each once.
    num_vertices
        Number of vertices.
    """

    path: Path
    options: GraphOptions
    num_vertices: int

    fill_empty_rows = False

    @property
    def merge_duplicates(self) -> bool:
        """Whether an entry that comes twice is stored once, instead of being an error."""
        changes = self.options.symmetrise or self.options.self_loops == "add"
        return self.options.duplicates == "merge" or changes

    def fill_empty_row(self, rows: Int64[Tensor, "R"]) -> Int64[Tensor, "R"]:
        """Not used: empty rows stay empty."""
        return rows

    def pieces(
        self, device: torch.device | str = "cpu", piece: int | None = None
    ) -> Iterator[tuple[Int64[Tensor, "E"], Int64[Tensor, "E"]]]:
        """Yield (row, column) of all edges, about ``piece`` at a time.

        Raises
        ------
        DataError
            For an index out of range, naming the edge, or weights, which pieces do not carry.
        """
        n, loops = self.num_vertices, self.options.self_loops
        size = piece or PIECE_EDGES
        if loops == "add":
            for start in range(0, n, size):
                diagonal = torch.arange(start, min(start + size, n), device=device)
                yield diagonal, diagonal
        first = 0
        for edges in _file_pieces(self.path, size):
            check_indices(edges, n, str(self.path), first)
            if edges.weights is not None and not (edges.weights == 1).all():
                raise DataError(
                    f"{self.path}: has edge weights, which are not read in pieces; leave them out"
                )
            first += len(edges)
            rows, cols = (
                torch.from_numpy(values.astype(np.int64)).to(device)
                for values in (edges.rows, edges.cols)
            )
            if loops == "remove":
                kept = rows != cols
                rows, cols = rows[kept], cols[kept]
            yield rows, cols
            if self.options.symmetrise:
                yield cols, rows


def read_in_pieces(path: Path | str, options: GraphOptions | None = None) -> EdgeSource:
    r"""Open an edge list (text, npz, OGB's folder) to be read a piece at a time.

    Parameters
    ----------
    path
        The file; of an npz with ``edge_index`` or ``edge_src``/``edge_dst``, or a CSR matrix.
    options
        As for a whole graph; ids are not renumbered and weights not summed.

    Raises
    ------
    ConfigError
        For options that need the whole list.
    DataError
        If the file cannot be read.

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
    if options.renumber:
        raise ConfigError("renumber: needs the whole edge list; renumber the file beforehand")
    if options.duplicates == "sum":
        raise ConfigError("duplicates: 'sum' needs the whole edge list; choose 'merge'")
    if path.is_dir() and not is_ogb_folder(path):
        raise DataError(f"{path}: is a folder without OGB's raw/edge.csv.gz or raw/data.npz")
    if not path.exists():
        raise DataError(f"{path}: there is no such file")
    if path.suffix == ".npz":
        with NpzFile(path) as file:
            for name in (*WEIGHTS, *EDGE_FEATURES):
                if name in file:
                    raise DataError(
                        f"{path}: has '{name}', but weights and features of edges are not read in "
                        "pieces; leave it out"
                    )
    return EdgeSource(path, options, options.num_nodes or _count(path))


def _edge_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    binary = path / "raw" / "data.npz"
    return binary if binary.is_file() else path / "raw" / "edge.csv.gz"


def _count(path: Path) -> int:
    """Find the number of vertices, if need be by walking all edges once."""
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
    largest = -1
    for edges in _file_pieces(path, PIECE_EDGES):
        if len(edges):
            largest = max(largest, int(edges.rows.max()), int(edges.cols.max()))
    if largest < 0:
        raise DataError(f"{path}: holds no edges and no number of vertices")
    return largest + 1


def _file_pieces(path: Path, size: int) -> Iterator[Edges]:
    path = _edge_file(path)
    if path.suffix != ".npz":
        yield from edge_list_pieces(path, min(BLOCK_BYTES, 8 * size))
        return
    with NpzFile(path) as file:
        for prefix in ("", "adj_"):
            if sparse_format(file, prefix) in {"csr", "csc"}:
                yield from _compressed_pieces(file, prefix, size)
                return
        for source, destination in PAIRS:
            if source in file and destination in file:
                columns = zip(file.rows(source, size), file.rows(destination, size), strict=True)
                yield from (_edges(row, col) for col, row in columns)
                return
        if "edge_index" in file:
            shape, _ = file.header("edge_index")
            if len(shape) != 2 or shape[0] != 2:
                raise DataError(f"{path}: 'edge_index' has shape {shape}, expected [2, E]")
            m = shape[1]
            columns = zip(
                file.flat("edge_index", size, 0, m),
                file.flat("edge_index", size, m, 2 * m),
                strict=False,
            )
            yield from (_edges(row, col) for col, row in columns)
            return
        raise DataError(f"{path}: holds no edges that can be read in pieces")


def _compressed_pieces(file: NpzFile, prefix: str, size: int) -> Iterator[Edges]:
    indptr = file.read(f"{prefix}indptr")
    shape, _ = file.header(f"{prefix}indices")
    check_indptr(indptr, int(shape[0]), str(file.path), f"{prefix}indptr")
    by_row, start = sparse_format(file, prefix) == "csr", 0
    weights = f"{prefix}data"
    if weights in file and not all((part == 1).all() for part in file.rows(weights, size)):
        raise DataError(f"{file.path}: '{weights}' has weights, which are not read in pieces")
    for part in file.rows(f"{prefix}indices", size):
        places = np.arange(start, start + len(part))
        owner = np.searchsorted(indptr, places, side="right") - 1
        yield _edges(owner, part) if by_row else _edges(part, owner)
        start += len(part)


def _edges(rows: Array, cols: Array) -> Edges:
    return raw_edges("edges", rows, cols, None)
