"""Builds a rank's block of the matrix from a source of edges, piece by piece.

Apart from its own block a rank holds one piece of the edge list. Vertices are renumbered at random,
which balances the blocks (on Kronecker graphs from a factor of three to a few percent), and then
sorted within each piece by the number of edges that refer to them: columns without references come
last and are not sent, frequently used columns are contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from bevatron.data.graphs.generators_randomness import RandomOrder
from bevatron.data.graphs.normalise import duplicate_edge
from bevatron.parallel.graph_partition.grid import Split
from bevatron.parallel.graph_partition.sources import EdgeSource
from bevatron.parallel.groups import Group

SORTED_AT_ONCE = 1 << 29
"""Keys sorted in one call; torch sorts fewer than 2^31 on a GPU and needs memory for copies."""


@dataclass
class Entries:
    """Entries of a block, by row and then column, in the block's own numbers."""

    row: Int64[Tensor, "E"]
    col: Int64[Tensor, "E"]
    values: Float[Tensor, "E"] | None


@dataclass(frozen=True)
class Numbering:
    """The pieces of the vertices that form the rows and columns of a block.

    Attributes
    ----------
    split : the renumbered vertices in pieces
    row_pieces, col_pieces : pieces that make up the block's rows and columns, in order
    order : original vertex -> new number
    """

    split: Split
    row_pieces: Sequence[int]
    col_pieces: Sequence[int]
    order: RandomOrder

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the block, padding included."""
        return (len(self.row_pieces) * self.split.padded, len(self.col_pieces) * self.split.padded)

    def slots(self, pieces: Sequence[int], device: torch.device) -> Tensor:
        """Return for each piece its slot in the block, -1 for those of other blocks."""
        slots = torch.full((self.split.pieces,), -1, dtype=torch.int64)
        slots[torch.tensor(pieces)] = torch.arange(len(pieces))
        return slots.to(device)

    def own_vertices(self, piece: int, device: torch.device) -> Tensor:
        """Original numbers of the vertices of a piece, in order."""
        start = self.split.start(piece)
        return self.order.inverse(
            torch.arange(start, start + self.split.length(piece), device=device)
        )

    def vertex(self, place: int, pieces: Sequence[int]) -> int:
        """Original number of the vertex at a position of the block's rows or columns."""
        slot, offset = divmod(place, self.split.padded)
        return int(self.order.inverse(torch.tensor([self.split.start(pieces[slot]) + offset])))


def collect_entries(source: EdgeSource, numbering: Numbering, device: torch.device) -> Entries:
    """Read a source once, keep the entries of one block and apply the source's policy.

    All copies of an edge are entries of one block, and so are all copies of its reverse: what
    `bevatron.data.graphs.normalise` does with a whole graph is decided here for each block. Raises
    DataError for a duplicate that the policy refuses.
    """
    policy, block = source.policy, _Block(numbering, device)
    filled = torch.zeros(block.shape[0] if source.fill_empty_rows else 0, dtype=torch.bool)
    filled = filled.to(device)
    own, mirrored = _Stream(policy.duplicates), _Stream(policy.duplicates)
    for row, col, *value in source.pieces(device):
        own.add(*block.entries(row, col, value[0] if value else None, filled))
        if policy.symmetrise:
            mirrored.add(*block.entries(col, row, value[0] if value else None))
    if source.fill_empty_rows:
        empty = block.empty_rows(filled)
        own.add(*block.entries(empty, source.fill_empty_row(empty), None))
    size = block.shape[0] * block.shape[1]
    streams = [own.merged(size, device)]
    if policy.duplicates == "refuse":
        _refuse_duplicates(streams[0][0], numbering, source.name)
    if policy.symmetrise:
        streams.append(mirrored.merged(size, device))
    if policy.self_loops != "keep":
        loops = block.diagonal()
        if policy.removes_loops:
            streams = [_without(stream, loops) for stream in streams]
        if policy.adds_loops:
            values = streams[0][1]
            streams.append((loops, None if values is None else values.new_ones(len(loops))))
    key, found = streams[0] if len(streams) == 1 else _union(streams, size, device)
    return Entries(key // block.shape[1], key.remainder_(block.shape[1]), found)


_Keys = tuple[Tensor, Tensor | None]
"""Keys row * columns + column of a block's entries, and their values."""


class _Block:
    """Finds the entries of a block among edges in original numbers."""

    def __init__(self, numbering: Numbering, device: torch.device) -> None:
        self.numbering, self.shape, self.device = numbering, numbering.shape, device
        self._row_slots = numbering.slots(numbering.row_pieces, device)
        self._col_slots = numbering.slots(numbering.col_pieces, device)

    def entries(
        self, row: Tensor, col: Tensor, value: Tensor | None, filled: Tensor | None = None
    ) -> _Keys:
        """Return the keys of the edges in the block, and mark their rows in ``filled``."""
        numbering, padded = self.numbering, self.numbering.split.padded
        piece, place = numbering.split.locate(numbering.order(row))
        slot = self._row_slots[piece]
        mine = slot >= 0
        key = slot[mine].mul_(padded).add_(place[mine])
        if filled is not None and len(filled):
            filled[key] = True
        piece, place = numbering.split.locate(numbering.order(col[mine]))
        slot = self._col_slots[piece]
        inside = slot >= 0
        key = key[inside].mul_(self.shape[1])
        key = key.add_(slot[inside].mul_(padded).add_(place[inside]))
        return key, None if value is None else value[mine][inside]

    def empty_rows(self, filled: Tensor) -> Tensor:
        """Return the vertices of rows that are not marked."""
        found, padded = [], self.numbering.split.padded
        for slot, piece in enumerate(self.numbering.row_pieces):
            own = self.numbering.own_vertices(piece, self.device)
            found.append(own[~filled[slot * padded : slot * padded + len(own)]])
        return torch.cat(found)

    def diagonal(self) -> Tensor:
        """Return the keys of the self loops in the block, ascending."""
        split, found = self.numbering.split, []
        for row_slot, piece in enumerate(self.numbering.row_pieces):
            if piece in self.numbering.col_pieces:
                place = torch.arange(split.length(piece), device=self.device)
                col_slot = list(self.numbering.col_pieces).index(piece)
                row, col = row_slot * split.padded + place, col_slot * split.padded + place
                found.append(row * self.shape[1] + col)
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=self.device)


class _Stream:
    """Merges entries as they come; only weighted ones are all kept until the end."""

    def __init__(self, duplicates: str) -> None:
        self.duplicates = duplicates
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def add(self, key: Tensor, value: Tensor | None) -> None:
        """Add the entries of a piece."""
        if value is None and self.duplicates == "sum":
            value = torch.ones(len(key), device=key.device)
        if value is not None:
            self.values.append(value)
            self.keys.append(key)
        else:
            self.keys.append(key.unique() if self.duplicates == "merge" else key.sort().values)

    def merged(self, bound: int, device: torch.device) -> _Keys:
        """Return the entries by key, with duplicates merged, summed, or left to be refused."""
        if not self.values:
            return _merge(self.keys, bound, device, unique=self.duplicates == "merge"), None
        key, values = torch.cat(self.keys), torch.cat(self.values)
        if self.duplicates == "sum":
            key, place = key.unique(return_inverse=True)
            return key, values.new_zeros(len(key)).index_add_(0, place, values)
        key, order = key.sort(stable=True)
        return _first(key, values[order]) if self.duplicates == "merge" else (key, values[order])


def _first(key: Tensor, values: Tensor) -> _Keys:
    """Keep the first of equal keys; keys ascend."""
    new = torch.ones_like(key, dtype=torch.bool)
    torch.ne(key[1:], key[:-1], out=new[1:])
    return key[new], values[new]


def _without(entries: _Keys, others: Tensor) -> _Keys:
    """Remove entries with the given keys; keys ascend."""
    key, values = entries
    if not len(others):
        return entries
    place = torch.searchsorted(others, key).clamp(max=len(others) - 1)
    kept = others[place] != key
    return key[kept], None if values is None else values[kept]


def _union(streams: Sequence[_Keys], bound: int, device: torch.device) -> _Keys:
    """Join entries; of duplicates across streams the first wins."""
    if streams[0][1] is None:
        return _merge([key for key, _ in streams], bound, device, unique=True), None
    key, order = torch.cat([key for key, _ in streams]).sort(stable=True)
    return _first(key, torch.cat([v for _, v in streams if v is not None])[order])


def _refuse_duplicates(key: Tensor, numbering: Numbering, name: str) -> None:
    for start in range(0, len(key), SORTED_AT_ONCE):
        part = key[start : start + SORTED_AT_ONCE + 1]
        twice = (part[1:] == part[:-1]).nonzero()
        if len(twice):
            place = divmod(int(part[int(twice[0])]), numbering.shape[1])
            pieces = (numbering.row_pieces, numbering.col_pieces)
            row, col = map(numbering.vertex, place, pieces)
            raise duplicate_edge(name, row, col)


def _merge(keys: list[Tensor], bound: int, device: torch.device, *, unique: bool) -> Tensor:
    """Merge sorted vectors of keys, by ranges of keys that can be sorted at once."""
    total = sum(len(part) for part in keys)
    if total == 0:
        return torch.zeros(0, dtype=torch.int64, device=device)
    ranges = -(-total // SORTED_AT_ONCE)
    cuts = torch.tensor([bound * k // ranges for k in range(ranges + 1)], device=device)
    places = [torch.searchsorted(part, cuts).tolist() for part in keys]
    merged = []
    for k in range(ranges):
        pieces = zip(keys, places, strict=True)
        part = torch.cat([part[place[k] : place[k + 1]] for part, place in pieces])
        merged.append(part.unique() if unique else part.sort().values)
    keys.clear()
    return merged[0] if ranges == 1 else torch.cat(merged)


@dataclass(frozen=True)
class Prefixes:
    """The order of vertices within the pieces of a rank's rows and columns.

    Attributes
    ----------
    own : [length] position in the old order of each vertex of the rank's own piece
    prefix : rows of each piece that are sent to the ranks of a column group
    """

    own: Int64[Tensor, "T"]
    prefix: int


def order_by_demand(
    entries: Entries, numbering: Numbering, column_group: Group, row_group: Group, own_length: int
) -> tuple[Entries, Prefixes]:
    """Renumber the vertices of every piece by descending number of references as a column.

    Columns of the block get the numbers slot * prefix + position: only the first ``prefix``
    vertices of each piece are ever sent. All ranks take part. Entries are changed in place.
    """
    padded, device = numbering.split.padded, entries.row.device
    counts = torch.zeros(numbering.shape[1], dtype=torch.int64, device=device)
    for part in entries.col.split(SORTED_AT_ONCE):
        counts += torch.bincount(part, minlength=len(counts))
    counts = column_group.all_reduce(counts).wait().view(-1, padded)
    own = counts[column_group.index].clone()
    own[own_length:] = -1
    old = torch.argsort(own, descending=True, stable=True)
    place = torch.empty_like(old)
    place[old] = torch.arange(padded, device=device)
    used = torch.where(own > 0, place + 1, 0).max().view(1)
    prefix = max(int(column_group.all_reduce(used, "max").wait()), 1)
    row_places = row_group.all_gather(place).wait()
    col_places = column_group.all_gather(place).wait()
    _renumber(entries.row, padded, padded, row_places)
    _renumber(entries.col, padded, prefix, col_places)
    return entries, Prefixes(old[:own_length], prefix)


def order_all_by_demand(entries: Entries, numbering: Numbering) -> tuple[Tensor, int]:
    """Do the same for a block that is the whole matrix, where every rank knows all counts.

    Returns
    -------
    tuple
        [pieces, padded] position in the old order of each vertex, padding last; and the prefix.
    """
    split, device = numbering.split, entries.row.device
    counts = torch.zeros(numbering.shape[1], dtype=torch.int64, device=device)
    for part in entries.col.split(SORTED_AT_ONCE):
        counts += torch.bincount(part, minlength=len(counts))
    counts = counts.view(split.pieces, split.padded)
    for piece in range(split.pieces):
        counts[piece, split.length(piece) :] = -1
    old = torch.argsort(counts, dim=1, descending=True, stable=True)
    places = torch.arange(split.padded, device=device).expand_as(old)
    place = torch.empty_like(old).scatter_(1, old, places)
    prefix = max(int((counts > 0).sum(1).max()), 1)
    _renumber(entries.row, split.padded, split.padded, place.view(-1))
    _renumber(entries.col, split.padded, prefix, place.view(-1))
    return old, prefix


def _renumber(ids: Tensor, padded: int, width: int, places: Tensor) -> None:
    """Replace positions within pieces, in place because ids may fill most of the memory."""
    for part in ids.split(SORTED_AT_ONCE):
        part.copy_((part // padded).mul_(width).add_(places[part]))
