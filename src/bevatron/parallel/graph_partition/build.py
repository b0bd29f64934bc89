"""Partitions a graph for each scheme: every rank builds its part from a source of edges."""

import math

import torch
from torch import Tensor

from bevatron.data.graphs.generators_randomness import RandomOrder
from bevatron.errors import ConfigError, DataError
from bevatron.kernels.graph.csr import Csr
from bevatron.parallel.collectives import gather_json
from bevatron.parallel.graph_partition.blocks import (
    Entries,
    Numbering,
    collect_entries,
    order_all_by_demand,
    order_by_demand,
)
from bevatron.parallel.graph_partition.feature_parallel import FeatureParallel
from bevatron.parallel.graph_partition.grid import Grid, Split
from bevatron.parallel.graph_partition.one_and_half_d import OneAndHalfD
from bevatron.parallel.graph_partition.rows import Rows
from bevatron.parallel.graph_partition.scheme import Scheme, pad_rows
from bevatron.parallel.graph_partition.sources import EdgeSource
from bevatron.parallel.graph_partition.two_dimensional import TwoDimensional
from bevatron.parallel.graph_partition.wire import Wire
from bevatron.parallel.groups import Group, open_groups
from bevatron.parallel.mesh import Mesh


def build_two_dimensional(
    source: EdgeSource,
    mesh: Mesh,
    grid: Grid,
    *,
    seed: int = 0,
    chunks: int = 1,
    wire: Wire | None = None,
    regather: bool = False,
) -> Scheme:
    """Build block A_ij; see `two_dimensional`.

    Raises ConfigError if the size of the grid is not the number of ranks.
    """
    if grid.size != mesh.world:
        raise ConfigError(
            f"graph partition: a grid of {grid.px} x {grid.py} needs {grid.size} ranks, "
            f"there are {mesh.world}"
        )
    n, device = source.num_vertices, mesh.device
    i, j = grid.position(mesh.rank)
    row_group = open_groups([grid.row_group(a) for a in range(grid.px)], mesh)
    column_group = open_groups([grid.column_group(b) for b in range(grid.py)], mesh)
    split = Split(n, mesh.world)
    numbering = Numbering(split, grid.row_group(i), grid.column_group(j), RandomOrder(n, seed))
    entries, prefixes = order_by_demand(
        _entries(source, numbering, mesh),
        *(numbering, column_group, row_group, split.length(mesh.rank)),
    )
    vertices = numbering.own_vertices(mesh.rank, device)[prefixes.own]
    padded = pad_rows(vertices, split.padded)
    row_ids = row_group.all_gather(padded).wait()
    col_ids = column_group.all_gather(padded[: prefixes.prefix]).wait()
    return TwoDimensional(
        _matrix(entries, row_ids, col_ids),
        *(vertices, _everyone(mesh), row_group, column_group),
        padded=split.padded,
        prefix=prefixes.prefix,
        chunks=chunks,
        wire=wire,
        regather=regather,
    )


def build_feature_parallel(
    source: EdgeSource, mesh: Mesh, *, seed: int = 0, wire: Wire | None = None
) -> Scheme:
    """Build the whole matrix on every rank; see `feature_parallel`."""
    n, everyone = source.num_vertices, _everyone(mesh)
    split = Split(n, mesh.world)
    pieces = list(range(mesh.world))
    numbering = Numbering(split, pieces, pieces, RandomOrder(n, seed))
    entries = _entries(source, numbering, mesh)
    old, prefix = order_all_by_demand(entries, numbering)
    own = old[mesh.rank, : split.length(mesh.rank)]
    vertices = numbering.own_vertices(mesh.rank, mesh.device)[own]
    ids = everyone.all_gather(pad_rows(vertices, split.padded)).wait()
    col_ids = ids.view(mesh.world, split.padded)[:, :prefix].reshape(-1)
    return FeatureParallel(
        _matrix(entries, ids, col_ids),
        *(vertices, everyone),
        padded=split.padded,
        prefix=prefix,
        wire=wire,
    )


def build_rows(source: EdgeSource, mesh: Mesh, *, seed: int = 0) -> Scheme:
    """Build this rank's rows and find the features they refer to; see `rows`."""
    n, everyone, device = source.num_vertices, _everyone(mesh), mesh.device
    split = Split(n, mesh.world)
    numbering = Numbering(split, [mesh.rank], list(range(mesh.world)), RandomOrder(n, seed))
    entries = _entries(source, numbering, mesh)
    needed, place = entries.col.unique(return_inverse=True)
    receive = torch.bincount(needed // split.padded, minlength=mesh.world)
    send = everyone.all_to_all(receive).wait().tolist()
    wanted = everyone.all_to_all(needed % split.padded, receive.tolist(), send).wait()
    vertices = numbering.own_vertices(mesh.rank, device)
    col_ids = everyone.all_to_all(vertices[wanted], send, receive.tolist()).wait()
    block = _matrix(Entries(entries.row, place, entries.values), vertices, col_ids)
    return Rows(block, vertices, everyone, wanted=wanted, send=send, receive=receive.tolist())


def build_one_and_half_d(source: EdgeSource, mesh: Mesh, *, seed: int = 0) -> Scheme:
    """Build block A_ij of a square grid; see `one_and_half_d`.

    Raises ConfigError if the number of ranks is not a square.
    """
    side = math.isqrt(mesh.world)
    if side * side != mesh.world:
        raise ConfigError(
            f"graph partition: one_and_half_d needs a square number of ranks, found {mesh.world}"
        )
    n, device, grid = source.num_vertices, mesh.device, Grid(side, side)
    i, j = grid.position(mesh.rank)
    row_group = open_groups([grid.row_group(a) for a in range(side)], mesh)
    column_group = open_groups([grid.column_group(b) for b in range(side)], mesh)
    split = Split(n, side)
    numbering = Numbering(split, [i], [j], RandomOrder(n, seed))
    ids = [pad_rows(numbering.own_vertices(piece, device), split.padded) for piece in (i, j)]
    block = _matrix(_entries(source, numbering, mesh), *ids)
    vertices = numbering.own_vertices(i, device)
    groups = (_everyone(mesh), row_group, column_group)
    return OneAndHalfD(block, vertices, *groups, padded=split.padded)


def _entries(source: EdgeSource, numbering: Numbering, mesh: Mesh) -> Entries:
    """Collect a rank's entries; bad data found by one rank raises on all."""
    found, mistake = None, None
    try:
        found = collect_entries(source, numbering, mesh.device)
    except DataError as error:
        mistake = str(error)
    mistakes = gather_json(mistake, mesh)
    if found is None:
        raise DataError(mistake)
    for rank, message in enumerate(mistakes):
        if message is not None:
            raise DataError(f"rank {rank} failed: DataError: {message}")
    return found


def _everyone(mesh: Mesh) -> Group:
    return open_groups([range(mesh.world)], mesh)


def _matrix(entries: Entries, row_ids: Tensor, col_ids: Tensor) -> Csr:
    """Build CSR and CSC, freeing the lists of entries meanwhile."""
    shape = (len(row_ids), len(col_ids))
    row = entries.row.to(torch.int32)
    del entries.row
    col = entries.col.to(torch.int32)
    del entries.col
    return Csr.from_coo(row, col, shape, entries.values, row_ids=row_ids, col_ids=col_ids)
