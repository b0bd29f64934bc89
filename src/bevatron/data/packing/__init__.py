"""From the sizes of all samples to the plan of an epoch.

``pack`` puts samples of mixed size into batches that use the device's memory fully and cost all
ranks the same. ``balanced`` is ours; ``algorithm1``, ``streaming`` and ``fixed_count`` are what
others use. The plan is a pure function of its arguments, so ranks agree without communication.
"""

import warnings
from typing import Any

from bevatron.data.packing.costs import CostModel
from bevatron.data.packing.epoch import Algorithm, pack
from bevatron.data.packing.plan import Batches, Plan, RankPlan

__all__ = ["Algorithm", "Batches", "CostModel", "Plan", "RankPlan", "pack"]


def __getattr__(name: str) -> Any:
    if name in ("PlanSegment", "remaining", "replan"):
        warnings.warn(
            f"{__name__}.{name} is deprecated; see bevatron.train.epochs.plan_epoch",
            DeprecationWarning,
            stacklevel=2,
        )
        from bevatron.data.packing import resume

        return getattr(resume, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
