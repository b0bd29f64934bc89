"""Counts the bytes that this process sends, from the tensors handed to torch.distributed.

Every collective of `Group` reports its input tensor here. The bytes that a rank sends follow from
that tensor and the size of the group, for the ring algorithms that NCCL uses on large messages:
all-gather b (g-1) with b the rank's own part, reduce-scatter b (g-1)/g and all-reduce 2 b (g-1)/g
with b the whole tensor, all-to-all the parts for others, passing on b itself. A backend that
emulates a collective by another (gloo) counts as the requested collective.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Traffic:
    """Bytes sent by this process, by operation.

    Attributes
    ----------
    sent : operation -> bytes
    calls : operation -> number of calls
    """

    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Bytes sent by all operations."""
        return sum(self.sent.values())

    def words(self, word_bytes: int = 4) -> float:
        """Return the total in words of ``word_bytes`` bytes."""
        return self.total / word_bytes


_open: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this process sends within a ``with`` block.

    Examples
    --------
    >>> with count_traffic() as traffic:
    ...     pass
    >>> traffic.total
    0
    """
    traffic = Traffic()
    _open.append(traffic)
    try:
        yield traffic
    finally:
        _open.remove(traffic)


def record(operation: str, handed: Tensor, group_size: int, parts: int | None = None) -> None:
    """Count one collective.

    Parameters
    ----------
    operation : all_gather, reduce_scatter, all_reduce, all_to_all or pass_on
    handed : input tensor of torch.distributed
    group_size : number of processes that take part
    parts : for all_to_all: elements of ``handed`` that stay on this rank
    """
    if not _open or group_size == 1:
        return
    size, others = handed.numel() * handed.element_size(), group_size - 1
    if operation == "all_gather":
        sent = size * others
    elif operation == "reduce_scatter":
        sent = size * others // group_size
    elif operation == "all_reduce":
        sent = 2 * size * others // group_size
    elif operation == "all_to_all":
        sent = size - (parts or 0) * handed.element_size()
    elif operation == "pass_on":
        sent = size
    else:
        raise ValueError(f"operation: found '{operation}'")
    for traffic in _open:
        traffic.sent[operation] += sent
        traffic.calls[operation] += 1
