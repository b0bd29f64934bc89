"""Deprecated: planning the rest of an epoch from a list of segments, kept for one release.

The trainer has `bevatron.train.epochs.plan_epoch`; other loops resume in mid-epoch through
``BalancedBatchSampler.set_epoch(epoch, start_step)``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from bevatron.config import from_dict
from bevatron.data.packing.algorithm1 import Order
from bevatron.data.packing.costs import Numbers, cost_columns
from bevatron.data.packing.epoch import Algorithm, pack
from bevatron.data.packing.plan import Plan
from bevatron.errors import DataError
from bevatron.typing import IntArray


@dataclass(frozen=True)
class PlanSegment:
    """Arguments of `pack`, and the number of completed steps of its plan.

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
        return {**asdict(self), "capacity": None if self.capacity is None else [*self.capacity]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PlanSegment":
        """Read plain values, strictly."""
        return from_dict(cls, values, "segment")

    def after(self, steps_done: int) -> "PlanSegment":
        """Return the same segment with another number of steps done."""
        return replace(self, steps_done=steps_done)


def remaining(
    costs: Numbers, segments: Sequence[PlanSegment], balance: Numbers | None = None
) -> IntArray:
    """Return the samples of an epoch that no step of ``segments`` has used, ascending."""
    left = np.arange(len(cost_columns(costs)), dtype=np.int64)
    for segment in segments:
        if len(left) and segment.steps_done:
            plan = _pack(costs, balance, left, segment, None)
            left = np.delete(left, plan.finished(segment.steps_done))
    return left


def replan(
    costs: Numbers,
    segments: Sequence[PlanSegment],
    balance: Numbers | None = None,
    names: Callable[[int], str] | None = None,
) -> Plan:
    """Plan the last segment over the samples that the earlier ones have not used.

    Raises DataError if there is no segment, or as `pack`.
    """
    if not segments:
        raise DataError("a plan needs at least one segment")
    left, last = remaining(costs, segments[:-1], balance), segments[-1]
    if len(left):
        plan = _pack(costs, balance, left, last, names)
        return replace(plan, indices=left[plan.indices])
    return Plan(
        indices=left,
        offsets=np.zeros(1, dtype=np.int64),
        num_ranks=last.num_ranks,
        repeated=None,
        costs=np.zeros((0, last.num_ranks)),
        used=np.zeros(cost_columns(costs).shape[1]),
        capacity=None if last.capacity is None else np.array(last.capacity),
    )


def _pack(
    costs: Numbers,
    balance: Numbers | None,
    left: IntArray,
    segment: PlanSegment,
    names: Callable[[int], str] | None,
) -> Plan:
    return pack(
        cost_columns(costs)[left],
        segment.capacity,
        segment.num_ranks,
        segment.seed,
        segment.epoch,
        segment.algorithm,
        balance=segment.balance_column if balance is None else np.asarray(balance)[left],
        batch_size=segment.batch_size,
        order=segment.order,
        oversized=segment.oversized,
        names=None if names is None else lambda row: names(int(left[row])),
    )
