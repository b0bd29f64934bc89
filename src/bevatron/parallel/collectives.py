"""Sums and messages over all ranks; on one process each returns its argument.

All ranks must call the same functions in the same order. Messages are JSON, never pickles.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from bevatron.parallel.mesh import Mesh

Name = TypeVar("Name", str, tuple[str, str])


def sum_over_ranks(values: Tensor, mesh: Mesh) -> Tensor:
    """Sum a tensor over all ranks, in place, and return it."""
    if mesh.world > 1:
        distributed.all_reduce(values, group=mesh.group)
    return values


def sum_scalars(values: Mapping[Name, float], mesh: Mesh) -> dict[Name, float]:
    """Sum named scalars over all ranks in one float64 reduction.

    Parameters
    ----------
    values
        Scalars; every rank must give the same names. Order does not matter.

    Returns
    -------
    dict
        In the order of ``values``.

    Examples
    --------
    >>> sum_scalars({"graphs": 4}, Mesh())
    {'graphs': 4.0}
    """
    if mesh.world == 1:
        return {name: float(value) for name, value in values.items()}
    names = sorted(values)
    vector = torch.tensor([values[name] for name in names], dtype=torch.float64)
    total = dict(zip(names, sum_over_ranks(vector, mesh).tolist(), strict=True))
    return {name: total[name] for name in values}


def broadcast(values: Tensor, mesh: Mesh) -> Tensor:
    """Broadcast a tensor from rank 0, in place, and return it."""
    if mesh.world > 1:
        distributed.broadcast(values, group=mesh.group, group_src=0)
    return values


def gather_bytes(data: bytes, mesh: Mesh) -> list[bytes]:
    """All-gather bytes, in order of rank."""
    if mesh.world == 1:
        return [data]
    lengths = torch.zeros(mesh.world, dtype=torch.int64)
    lengths[mesh.rank] = len(data)
    sum_over_ranks(lengths, mesh)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    parts = [torch.empty_like(padded) for _ in range(mesh.world)]
    distributed.all_gather(parts, padded, group=mesh.group)
    return [
        part.numpy().tobytes()[:length]
        for part, length in zip(parts, lengths.tolist(), strict=True)
    ]


def gather_json(value: Any, mesh: Mesh) -> list[Any]:
    """All-gather plain values, in order of rank."""
    return [json.loads(part) for part in gather_bytes(json.dumps(value).encode(), mesh)]


def broadcast_json(value: Any, mesh: Mesh) -> Any:
    """Broadcast a plain value from rank 0."""
    return gather_json(value if mesh.is_main else None, mesh)[0]


def barrier(mesh: Mesh) -> None:
    """Barrier: wait until all ranks have called it."""
    sum_over_ranks(torch.zeros(1), mesh)
