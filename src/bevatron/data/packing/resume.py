"""Going on in mid-epoch, perhaps on another number of ranks or with another capacity.

An epoch that was interrupted is a list of *segments*: how batches were planned, and how many steps
of that plan were done. Each segment plans what the earlier ones left over. A checkpoint stores the
list (plain values); the costs of the samples give the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from bevatron.config import from_dict
from bevatron.data.packing.algorithm1 import Order
from bevatron.data.packing.costs import CostTable, Numbers, cost_columns
from bevatron.data.packing.epoch import Algorithm, pack
from bevatron.data.packing.plan import Plan
from bevatron.errors import DataError
from bevatron.typing import FloatArray, IntArray


@dataclass(frozen=True)
class PlanSegment:
    """Steps of an epoch that were planned together.

    The fields but the last are arguments of `pack`, which see.

    Attributes
    ----------
    steps_done
        Steps of this plan that are done.

    Examples
    --------
    >>> begun = PlanSegment(capacity=(4.0,), num_ranks=2, steps_done=1)
    >>> PlanSegment.from_json(begun.to_json()) == begun
    True
    >>> len(remaining([4, 4, 4, 4, 4, 4], [begun]))
    4
    """

    capacity: tuple[float, ...] | None
    num_ranks: int
    seed: int = 0
    epoch: int = 0
    algorithm: Algorithm = "balanced"
    batch_size: int | None = None
    order: Order = "emptiest"
    oversized: Literal["refuse", "alone"] = "refuse"
    balance_column: int = 0
    steps_done: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values = asdict(self)
        values["capacity"] = None if self.capacity is None else list(self.capacity)
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PlanSegment":
        """Read plain values, strictly."""
        return from_dict(cls, values, "segment")

    def after(self, steps_done: int) -> "PlanSegment":
        """Return the same segment with other steps done."""
        return replace(self, steps_done=steps_done)


def remaining(
    costs: Numbers, segments: Sequence[PlanSegment], balance: Numbers | None = None
) -> IntArray:
    """Return the samples of an epoch that no step of ``segments`` has used, ascending.

    Parameters
    ----------
    costs : [n] or [n, d]
        As for `pack`, of all samples.
    segments
        What was done, in order.
    balance : [n] or None
        The balanced quantity; None is the segment's column of ``costs``.
    """
    table, values = cost_columns(costs), _values(balance)
    left = np.arange(len(table), dtype=np.int64)
    for segment in segments:
        if not len(left):
            break
        if segment.steps_done:
            plan = _pack(table, values, left, segment, None)
            unused = np.ones(len(left), dtype=bool)
            unused[plan.finished(segment.steps_done)] = False
            left = left[unused]
    return left


def replan(
    costs: Numbers,
    segments: Sequence[PlanSegment],
    balance: Numbers | None = None,
    names: Callable[[int], str] | None = None,
) -> Plan:
    """Plan the last segment over the samples that the earlier ones have not used.

    Training goes on at step ``segments[-1].steps_done`` of this plan. With a single segment it is
    `pack` itself. To go on with other arguments, append a new segment.

    Raises
    ------
    DataError
        If there is no segment, or as `pack`.
    """
    if not segments:
        raise DataError("a plan needs at least one segment")
    table, values = cost_columns(costs), _values(balance)
    left = remaining(table, segments[:-1], values)
    last = segments[-1]
    if not len(left):
        return _nothing(table, last)
    plan = _pack(table, values, left, last, names)
    return replace(plan, indices=left[plan.indices])


def _values(balance: Numbers | None) -> FloatArray | None:
    return None if balance is None else np.asarray(balance, dtype=np.float64)


def _pack(
    table: CostTable,
    balance: FloatArray | None,
    left: IntArray,
    segment: PlanSegment,
    names: Callable[[int], str] | None,
) -> Plan:
    return pack(
        table[left],
        segment.capacity,
        segment.num_ranks,
        segment.seed,
        segment.epoch,
        segment.algorithm,
        balance=segment.balance_column if balance is None else balance[left],
        batch_size=segment.batch_size,
        order=segment.order,
        oversized=segment.oversized,
        names=None if names is None else lambda row: names(int(left[row])),
    )


def _nothing(table: CostTable, segment: PlanSegment) -> Plan:
    """Return a plan without steps."""
    return Plan(
        indices=np.zeros(0, dtype=np.int64),
        offsets=np.zeros(1, dtype=np.int64),
        num_ranks=segment.num_ranks,
        repeated=None,
        costs=np.zeros((0, segment.num_ranks)),
        used=np.zeros(table.shape[1]),
        capacity=None if segment.capacity is None else np.array(segment.capacity),
    )
