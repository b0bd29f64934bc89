"""From the sizes of all samples to the plan of an epoch.

``pack`` puts samples of mixed size into batches that use the device's memory fully and cost all
ranks the same. ``balanced`` is ours; ``algorithm1``, ``streaming`` and ``fixed_count`` are what
others use. The plan is a pure function of its arguments, so no rank needs to tell another.
"""

from bevatron.data.packing.costs import CostModel
from bevatron.data.packing.epoch import Algorithm, pack
from bevatron.data.packing.plan import Batches, Plan, RankPlan
from bevatron.data.packing.resume import PlanSegment, remaining, replan

__all__ = [
    "Algorithm",
    "Batches",
    "CostModel",
    "Plan",
    "PlanSegment",
    "RankPlan",
    "pack",
    "remaining",
    "replan",
]
