"""Which batches of an epoch are still to come, also after a resume with other batches or ranks.

An epoch is a list of segments. The first packs all samples; when a run is resumed with another
capacity, algorithm or number of ranks, the samples not yet used are packed again as a further
segment. A segment is known by its settings and the number of batches taken from it, so a checkpoint
holds a few numbers and never a list of samples. A segment has a cost model of its own and knows
which batches overtook others in the loader.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np

from bevatron.config import to_dict
from bevatron.data.packing import CostModel, Plan, pack
from bevatron.errors import ConfigError
from bevatron.parallel.mesh import Mesh
from bevatron.train.settings import BatchConfig, with_named_costs
from bevatron.typing import FloatArray, IntArray

IndexedBatch = tuple[IntArray, FloatArray]
"""Indices and weights of a batch's samples."""


@dataclass
class Segment:
    """Batches of an epoch that were packed together.

    Attributes
    ----------
    batch, num_ranks
        What they were packed for.
    done
        Batches taken by each rank.
    skipped, ahead
        Per rank: places below ``done`` not yet taken and places from ``done`` on already taken;
        empty unless a loader window let batches overtake.
    """

    batch: dict[str, Any]
    num_ranks: int
    done: int = 0
    skipped: list[list[int]] = field(default_factory=list)
    ahead: list[list[int]] = field(default_factory=list)

    @property
    def in_order(self) -> bool:
        """Whether exactly the first ``done`` batches were taken."""
        return not any(self.skipped)


@dataclass(frozen=True)
class EpochPlan:
    """What is left of an epoch for one rank.

    Attributes
    ----------
    segments
        All of this epoch; the last one is current.
    batches
        Still to come, in order.
    first
        Place of the first of them in its segment.
    num_batches
        Batches per rank of the whole epoch, all segments.
    plan
        The plan of the last segment, for reports; None once nothing is left.
    changed
        Whether the rest of the epoch was repacked.
    """

    segments: list[Segment]
    batches: Sequence[IndexedBatch]
    first: int
    num_batches: int
    plan: Plan | None
    changed: bool = False

    def of_all_ranks(self) -> Sequence[IndexedBatch]:
        """All batches of the last segment, of all ranks; equal on all ranks."""
        if self.plan is None or not isinstance(self.batches, SampleBatches):
            return self.batches
        samples = self.batches.samples
        ranks = [SampleBatches(self.plan.flat(rank), samples) for rank in range(len(self.plan))]
        return [batch for rank in ranks for batch in rank]


def plan_epoch(
    sizes: Mapping[str, IntArray],
    config: BatchConfig,
    mesh: Mesh,
    *,
    seed: int,
    epoch: int,
    segments: Sequence[Segment] = (),
    describe: Callable[[int], str] | None = None,
) -> EpochPlan:
    """Plan what is left of an epoch, every sample exactly once over all ranks and segments.

    Parameters
    ----------
    sizes
        What every sample uses of each capacity, such as ``{"atoms": [n], "edges": [n]}``.
    config
        How to pack now.
    mesh
        This rank among all.
    seed, epoch
        Seeds of the order.
    segments
        Those of the checkpoint; none = the epoch begins.
    describe
        Names a sample in errors.

    Raises
    ------
    DataError
        If a sample is above capacity.
    ConfigError
        If a capacity is of something that is not counted.
    """
    samples: IntArray | None = None
    plan: Plan | None = None
    before = 0
    for number, segment in enumerate(segments):
        batch = BatchConfig(**segment.batch)
        plan = pack_samples(sizes, samples, batch, segment.num_ranks, seed, epoch, describe)
        same = _named(batch, sizes) == _named(config, sizes) and segment.num_ranks == mesh.world
        if number == len(segments) - 1 and same and segment.in_order:
            batches = SampleBatches(plan.flat(mesh.rank, segment.done), samples)
            whole = before + plan.num_steps
            return EpochPlan(list(segments), batches, segment.done, whole, plan)
        samples = _left_over(plan, samples, segment)
        before += segment.done
    if samples is not None and not len(samples):
        return EpochPlan(list(segments), [], segments[-1].done, before, None)
    plan = pack_samples(sizes, samples, config, mesh.world, seed, epoch, describe)
    new = Segment(batch=to_dict(config), num_ranks=mesh.world)
    return EpochPlan(
        [*segments, new],
        SampleBatches(plan.flat(mesh.rank), samples),
        0,
        before + plan.num_steps,
        plan,
        changed=bool(segments),
    )


def _named(config: BatchConfig, counted: Mapping[str, IntArray]) -> BatchConfig:
    """Write capacity and cost out by name, for a comparison."""
    return replace(config, capacity=config.capacities(counted), cost=config.costs(counted))


def pack_samples(
    sizes: Mapping[str, IntArray],
    samples: IntArray | None,
    config: BatchConfig,
    num_ranks: int,
    seed: int,
    epoch: int,
    describe: Callable[[int], str] | None = None,
) -> Plan:
    """Pack all samples, or those given, as a `BatchConfig` says.

    The plan's indices are places in ``samples`` if those are given.
    """
    capacities, costs = config.capacities(sizes), config.costs(sizes)
    for key, names in (("capacity", capacities), ("cost", costs)):
        for name in names:
            if name not in sizes and (key, name) != ("cost", "constant"):
                known = ", ".join(sizes)
                raise ConfigError(f"batch.{key}: '{name}' is not counted here (known: {known})")
    chosen = {
        name: values if samples is None else values[samples] for name, values in sizes.items()
    }

    def tell(place: int) -> str:
        index = place if samples is None else int(samples[place])
        return describe(index) if describe is not None else f"sample {index}"

    fixed_count = config.algorithm == "fixed_count"
    return pack(
        np.stack([chosen[key] for key in capacities], axis=1),
        None if fixed_count else list(capacities.values()),
        num_ranks,
        seed=seed,
        epoch=epoch,
        algorithm=config.algorithm,
        balance=CostModel(weights=costs)(chosen),
        batch_size=config.size if fixed_count else None,
        order=config.order,
        oversized=config.oversized,
        names=tell,
    )


@dataclass(frozen=True)
class SampleBatches(Sequence[IndexedBatch]):
    """Batches of a plan over a selection of samples, with the samples' own indices."""

    batches: Sequence[IndexedBatch]
    samples: IntArray | None

    def __len__(self) -> int:
        return len(self.batches)

    @overload
    def __getitem__(self, place: int) -> IndexedBatch: ...
    @overload
    def __getitem__(self, place: slice) -> list[IndexedBatch]: ...
    def __getitem__(self, place: int | slice) -> IndexedBatch | list[IndexedBatch]:
        if isinstance(place, slice):
            return [self[p] for p in range(len(self))[place]]
        indices, weights = self.batches[place]
        return (indices if self.samples is None else self.samples[indices]), weights


def _left_over(plan: Plan, samples: IntArray | None, segment: Segment) -> IntArray:
    """Return the samples that a segment was given and that were not taken, ascending."""
    taken = [plan.finished(segment.done)]
    waiting = []
    for rank, (skipped, ahead) in enumerate(zip(segment.skipped, segment.ahead, strict=True)):
        taken += [_counted(plan, rank, step) for step in ahead]
        waiting += [_counted(plan, rank, step) for step in skipped]
    left = np.ones(plan.num_samples if samples is None else len(samples), dtype=bool)
    left[np.concatenate(taken)] = False
    if waiting:
        left[np.concatenate(waiting)] = True
    if samples is None:
        return np.flatnonzero(left)
    rest: IntArray = samples[left]
    return rest


def _counted(plan: Plan, rank: int, step: int) -> IntArray:
    counted: IntArray = plan.batch(rank, step)[plan.weights(rank, step) != 0]
    return counted


def segments_from_json(values: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """Turn the plain values of a checkpoint (`dataclasses.asdict`) into segments."""
    return [Segment(**{**value, "batch": with_named_costs(value["batch"])}) for value in values]
