"""Remaining batches of an epoch, also after resuming with other batches or ranks.

An epoch is a list of segments. The first packs all samples; when a run is resumed with another
capacity, algorithm or number of ranks, the samples not yet used are packed again as a further
segment. A segment is known by its settings and the number of batches taken from it, so a checkpoint
holds a few numbers and never a list of samples. A segment has a cost model of its own and knows
which batches overtook others in the loader.

Where samples are drawn, what lies between two validations is treated as an epoch: its samples are
the draws with consecutive numbers, each used once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np

from bevatron.config import to_dict
from bevatron.data.packing import CostModel, Plan, pack
from bevatron.data.packing.draws import batches_per_step, deal
from bevatron.errors import ConfigError
from bevatron.parallel.mesh import Mesh
from bevatron.train.settings import BatchConfig, with_named_costs
from bevatron.typing import FloatArray, IntArray

IndexedBatch = tuple[IntArray, FloatArray]
"""Indices and weights of a batch's samples."""


@dataclass(frozen=True)
class Drawn:
    """The draws that form an epoch.

    Attributes
    ----------
    first, count : number of the first, and how many
    per_step : samples of one optimiser step over all ranks
    """

    first: int
    count: int
    per_step: int


@dataclass
class Segment:
    """Batches of an epoch that were packed together.

    Attributes
    ----------
    batch, num_ranks : what they were packed for
    done : batches taken by each rank
    skipped, ahead
        Per rank: places below ``done`` not yet taken and places from ``done`` on already taken;
        empty unless a loader window let batches overtake.
    drawn : the draws of the whole epoch; None where every sample of a data set is used once
    """

    batch: dict[str, Any]
    num_ranks: int
    done: int = 0
    skipped: list[list[int]] = field(default_factory=list)
    ahead: list[list[int]] = field(default_factory=list)
    drawn: Drawn | None = None

    @property
    def in_order(self) -> bool:
        """Whether exactly the first ``done`` batches were taken."""
        return not any(self.skipped)


@dataclass(frozen=True)
class EpochPlan:
    """The rest of an epoch for one rank.

    Attributes
    ----------
    segments : all of this epoch; the last one is current
    batches : still to come, in order
    first : place of the first of them in its segment
    num_batches : batches per rank of the whole epoch, all segments
    plan : the plan of the last segment, for reports; None once nothing is left
    changed : whether the rest of the epoch was repacked
    accumulate
        Batches of each rank in an optimiser step where that follows from the samples of a step;
        None = as the optimiser's settings say.
    """

    segments: list[Segment]
    batches: Sequence[IndexedBatch]
    first: int
    num_batches: int
    plan: Plan | None
    changed: bool = False
    accumulate: int | None = None

    def of_all_ranks(self) -> Sequence[IndexedBatch]:
        """All batches of the last segment, of all ranks; equal on all ranks."""
        if self.plan is None or not isinstance(self.batches, SampleBatches):
            return self.batches
        mine, plan = self.batches, self.plan
        ranks = [replace(mine, batches=plan.flat(rank)) for rank in range(len(plan))]
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
    drawn: Drawn | None = None,
) -> EpochPlan:
    """Plan what is left of an epoch, every sample exactly once over all ranks and segments.

    Raises DataError if a sample is above capacity; ConfigError if a capacity is of something that
    is not counted.

    Parameters
    ----------
    sizes : what every sample uses of each capacity, such as ``{"atoms": [n], "edges": [n]}``
    config : how to pack now
    mesh : this rank among all
    seed, epoch : seeds of the order
    segments : those of the checkpoint; none = the epoch begins
    describe : names a sample in errors
    drawn
        The draws of the epoch, ``sizes`` being theirs; None = every sample once. Over all segments
        they begin with the same one.
    """
    samples: IntArray | None = None
    plan: Plan | None = None
    before, first = 0, 0 if drawn is None else drawn.first
    each = None
    if drawn is not None:
        each = batches_per_step(drawn.per_step, mesh.world, config.size)

    def packed(batch: BatchConfig, num_ranks: int, of: Drawn | None) -> Plan:
        per_step = None if of is None else of.per_step
        return pack_samples(
            sizes, samples, batch, num_ranks, seed, epoch, describe, per_step=per_step
        )

    for number, segment in enumerate(segments):
        batch = BatchConfig(**segment.batch)
        plan = packed(batch, segment.num_ranks, segment.drawn)
        same = _named(batch, sizes) == _named(config, sizes) and segment.num_ranks == mesh.world
        same = same and segment.drawn == drawn
        if number == len(segments) - 1 and same and segment.in_order:
            batches = SampleBatches(plan.flat(mesh.rank, segment.done), samples, first)
            whole = before + plan.num_steps
            return EpochPlan(list(segments), batches, segment.done, whole, plan, accumulate=each)
        samples = _left_over(plan, samples, segment)
        before += segment.done
    if samples is not None and not len(samples):
        return EpochPlan(list(segments), [], segments[-1].done, before, None, accumulate=each)
    plan = packed(config, mesh.world, drawn)
    new = Segment(batch=to_dict(config), num_ranks=mesh.world, drawn=drawn)
    return EpochPlan(
        [*segments, new],
        SampleBatches(plan.flat(mesh.rank), samples, first),
        0,
        before + plan.num_steps,
        plan,
        changed=bool(segments),
        accumulate=each,
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
    *,
    per_step: int | None = None,
) -> Plan:
    """Pack all samples, or those given, as a `BatchConfig` says.

    The plan's indices are places in ``samples`` if those are given. With ``per_step`` the samples
    are dealt to steps of so many, in their order.
    """
    fixed_count = config.algorithm == "fixed_count"
    if per_step is not None and not fixed_count:
        raise ConfigError(
            f"batch.algorithm: samples are drawn here, which needs fixed_count, not "
            f"{config.algorithm}"
        )
    capacities = {} if per_step is not None else config.capacities(sizes)
    costs = config.costs(sizes)
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

    if per_step is not None:
        return deal(CostModel(weights=costs)(chosen), per_step, num_ranks, config.size)
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
    """Batches of a plan over a selection of samples, with the samples' own indices.

    ``first`` is added to all of them: the number of an epoch's first draw.
    """

    batches: Sequence[IndexedBatch]
    samples: IntArray | None
    first: int = 0

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
        own = indices if self.samples is None else self.samples[indices]
        return (own + self.first if self.first else own), weights


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
    return np.flatnonzero(left) if samples is None else samples[left]


def _counted(plan: Plan, rank: int, step: int) -> IntArray:
    counted: IntArray = plan.batch(rank, step)[plan.weights(rank, step) != 0]
    return counted


def segments_from_json(values: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """Turn the plain values of a checkpoint (`dataclasses.asdict`) into segments."""

    def segment(value: Mapping[str, Any]) -> Segment:
        drawn = value.get("drawn")
        own = {"batch": with_named_costs(value["batch"])}
        return Segment(**{**value, **own, "drawn": None if drawn is None else Drawn(**drawn)})

    return [segment(value) for value in values]
