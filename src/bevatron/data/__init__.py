"""From files to batches: readers, prepare, store, packing, loader."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bevatron.data.packing.sampler import BalancedBatchSampler

__all__ = ["BalancedBatchSampler"]


def __getattr__(name: str) -> Any:
    # The sampler needs torch; importing bevatron.data must stay light.
    if name == "BalancedBatchSampler":
        from bevatron.data.packing.sampler import BalancedBatchSampler

        return BalancedBatchSampler
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
