"""Groups of processes that compute one sample together, and the group of this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from bevatron.errors import ConfigError
from bevatron.parallel import windows
from bevatron.parallel.groups import Group, Silent, open_groups
from bevatron.parallel.mesh import Mesh

_ALONE = Group([0], 0)
_joined: list[Group] = [_ALONE]


def sample_group() -> Group:
    """Return the processes that share this process's sample; outside `shared` only itself."""
    return _joined[-1]


def data_mesh(mesh: Mesh, size: int) -> Mesh:
    """Return the index of this process's group and the number of groups, one sample each.

    Raises ConfigError if the processes cannot be divided into groups of this size.

    Examples
    --------
    >>> group = data_mesh(Mesh(rank=5, world=6), size=2)
    >>> group.rank, group.world
    (2, 3)
    """
    if size < 1 or mesh.world % size:
        raise ConfigError(
            f"parallel.axial: {mesh.world} process{'es' if mesh.world > 1 else ''} cannot be "
            f"divided into groups of {size}; start a multiple of {size} processes"
        )
    return replace(mesh, rank=mesh.rank // size, world=mesh.world // size)


def sizes_per_sample(world: int, samples: int) -> list[int]:
    """Return the group sizes, ascending, that leave no process of a step without a sample.

    Larger groups never compute a sample in proportionally less time.

    Examples
    --------
    >>> [sizes_per_sample(world, samples=4) for world in (2, 4, 8, 12)]
    [[1, 2], [1, 2, 4], [2, 4, 8], [3, 4, 6, 12]]
    """
    return [size for size in range(1, world + 1) if world % size == 0 and world // size <= samples]


@contextmanager
def one_of(size: int) -> Iterator[Group]:
    """Act as the first of several processes that share a sample, without running the others."""
    _joined.append(Silent(size) if size > 1 else _ALONE)
    try:
        yield _joined[-1]
    finally:
        _joined.pop()


@contextmanager
def shared(mesh: Mesh, size: int) -> Iterator[Group]:
    """Let every ``size`` consecutive processes share their samples within a ``with`` block.

    All processes must enter it together. It applies to the whole process, including the threads
    of backward passes.
    """
    groups = data_mesh(mesh, size).world
    partition = [range(size * k, size * (k + 1)) for k in range(groups)]
    _joined.append(windows.opened(open_groups(partition, mesh, apart=True), mesh))
    try:
        yield _joined[-1]
    finally:
        _joined.pop()
