"""Own rows of pairs and alignments, and conversions between them and the whole.

On one process `own`, `own_rows`, `all_of`, `all_rows` and `all_together` return their argument, and
`transposed` a view of it.
"""

from jaxtyping import Shaped
from torch import Tensor

from bevatron.parallel.axial.collectives import Coming, bounds, gather, transpose
from bevatron.parallel.axial.groups import sample_group
from bevatron.parallel.groups import Group

ROWS = -3
"""Axis of the rows of a pair or an alignment [..., rows, N, C]."""


def own(x: Tensor, dim: int) -> Tensor:
    """Return this process's part of an axis of a replicated tensor."""
    group = sample_group()
    return x if group.size == 1 else x.narrow(dim, *bounds(x.shape[dim], group))


def own_rows(x: Shaped[Tensor, "*batch S N C"]) -> Shaped[Tensor, "*batch R N C"]:
    """Return this process's rows of a replicated tensor."""
    return own(x, ROWS)


def gathered(x: Tensor, dim: int, total: int) -> Coming:
    """Begin to gather all ``total`` entries of an axis of which each process has its part."""
    return gather(x, dim, total, sample_group())


def all_of(x: Tensor, dim: int, total: int) -> Tensor:
    """Gather all ``total`` entries of an axis of which each process has its part."""
    return gather(x, dim, total, sample_group().urgent).wait()


def all_rows(
    x: Shaped[Tensor, "*batch R N C"], total: int | None = None
) -> Shaped[Tensor, "*batch S N C"]:
    """Gather all rows: ``total``, as for an alignment, or as many as columns.

    Raises ValueError if this process's rows are not its part of so many.
    """
    return all_of(x, ROWS, x.shape[-2] if total is None else total)


def all_together(x: Tensor) -> Tensor:
    """Sum over the processes that share a sample, in the order of ranks, so all get equal bits."""
    size = sample_group().size
    return x if size == 1 else all_of(x[..., None], -1, size).sum(-1)


def turned(
    x: Shaped[Tensor, "*batch R N C"], total: int | None = None, group: Group | None = None
) -> Coming:
    """Begin to exchange own rows for own rows of the transposed: see `transposed`.

    ``group``: the processes that share the sample, or these as `Group.urgent`.
    """
    return transpose(x, x.shape[-2] if total is None else total, group or sample_group())


def transposed(
    x: Shaped[Tensor, "*batch R N C"], total: int | None = None
) -> Shaped[Tensor, "*batch K S C"]:
    """Return own rows of the transposed pair or alignment, that is its own columns.

    Parameters
    ----------
    x : own rows
    total : number of rows of all processes; None = as many as columns
    """
    return turned(x, total, sample_group().urgent).wait()
