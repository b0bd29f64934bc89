"""Edges in pieces, for graphs whose edge list is too long for one process.

Partitioning a graph into blocks takes an `EdgeSource` (or `generators.Kronecker`), which has
``num_vertices``, ``policy``, ``fill_empty_rows`` and ``pieces(device)``; it can be iterated
repeatedly and yields the same edges every time.
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
from bevatron.data.graphs.npz import edge_pieces, stated_count, weights_name
from bevatron.data.graphs.ogb import is_ogb_folder
from bevatron.data.graphs.options import EdgePolicy, GraphOptions
from bevatron.data.graphs.raw import checked_count, raw_edges
from bevatron.data.graphs.zipped import NpzFile
from bevatron.errors import ConfigError, DataError

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
    return "renumber needs the whole edge list" if options.renumber else ""


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
    listed = path / "raw" / "num-node-list.csv.gz"
    if listed.is_file():
        import gzip

        return int(gzip.decompress(listed.read_bytes()).split()[0])
    file_path = _edge_file(path)
    if file_path.suffix == ".npz":
        with NpzFile(file_path) as file:
            found = stated_count(file)
            if found is not None:
                return found
            for name in ("labels", "y", "features", "x"):
                if name in file:
                    return int(file.header(name)[0][0])
    return None


def _largest(path: Path) -> int:
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
            if weights_name(file) is None:
                return None
    for edges in _file_pieces(path, PIECE_EDGES):
        if edges.weights is not None and not (edges.weights == 1).all():
            return torch.float64 if edges.weights.dtype == np.float64 else torch.float32
        if edges.weights is None and path.suffix != ".npz":
            return None
    return None


def _file_pieces(path: Path, size: int) -> Iterator[Edges]:
    folder, path = path.is_dir(), _edge_file(path)
    if path.suffix != ".npz":
        yield from edge_list_pieces(path, min(BLOCK_BYTES, 8 * size))
        return
    with NpzFile(path) as file:
        for rows, cols, weights in edge_pieces(file, size, weighted=not folder):
            yield raw_edges(str(path), rows, cols, weights)
