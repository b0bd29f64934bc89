"""`pack`: from the costs of all samples to the plan of an epoch."""

import typing
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from bevatron.data.packing import costs as costing
from bevatron.data.packing.algorithm1 import Order, algorithm1
from bevatron.data.packing.balanced import balanced
from bevatron.data.packing.baselines import fixed_count, streaming
from bevatron.data.packing.costs import Numbers, Problem, batch_sums
from bevatron.data.packing.plan import Plan
from bevatron.data.packing.randomness import RandomStream, sorting_order
from bevatron.data.ragged import pointer
from bevatron.errors import DataError
from bevatron.typing import BoolArray, FloatArray, IntArray

Algorithm = Literal["balanced", "algorithm1", "streaming", "fixed_count"]
Oversized = Literal["refuse", "alone"]


def pack(
    costs: Numbers,
    capacity: Numbers | None,
    num_ranks: int,
    seed: int = 0,
    epoch: int = 0,
    algorithm: Algorithm = "balanced",
    *,
    balance: int | Numbers = 0,
    batch_size: int | None = None,
    order: Order = "emptiest",
    oversized: Oversized = "refuse",
    names: Callable[[int], str] | None = None,
) -> Plan:
    """Plan an epoch: put all samples into batches, the same number on every rank.

    A pure function of its arguments, equal on every rank and machine. Every sample occurs exactly
    once, no batch is empty, and all ranks have the same number of batches; if there are too few
    samples for that, the cheapest are repeated with weight zero. Raises DataError if there are no
    samples, one is above a capacity, or arguments are inconsistent.

    Parameters
    ----------
    costs : [n] or [n, d]
        What each sample uses of each capacity: atoms, edges, squared atoms, ones (graphs).
    capacity
        Upper bound of each cost column over a batch: a number, or one per column. Only
        ``fixed_count`` works without (None); given one, it reports the fill but does not obey it.
    num_ranks : number of processes that share the epoch
    seed, epoch : seed the batches, their order and their ranks
    algorithm
        ``balanced`` (ours), ``algorithm1`` (Firoz et al. 2025), ``streaming`` (GPS++) or
        ``fixed_count`` (mace-torch, PyG).
    balance
        The quantity to balance over ranks: a column of ``costs``, or one value per sample, such as
        a `CostModel` returns.
    batch_size : number of samples in a batch; only for ``fixed_count``
    order : which batch `algorithm1` fills first
    oversized
        What to do with a sample above a capacity: raise an error that names it, or pack it alone.
    names : returns the name of a sample for messages, such as ``dataset.describe``

    Examples
    --------
    >>> plan = pack([5, 9, 3, 4, 6, 1, 2], capacity=10, num_ranks=1)
    >>> sorted(batch.tolist() for batch in plan[0])
    [[0, 2, 6], [1, 5], [3, 4]]
    """
    _check_choice("algorithm", algorithm, Algorithm)
    _check_choice("order", order, Order)
    _check_choice("oversized", oversized, Oversized)
    _check_arguments(num_ranks, seed, epoch, algorithm, capacity, batch_size)
    table = costing.cost_columns(costs)
    limits = costing.capacities(capacity, table.shape[1])
    count = len(table)
    if not count:
        raise DataError("there are no samples to pack; check the data set and its selection")
    balance_units, balance_cost = _balance(table, balance)
    stream = RandomStream(seed, epoch)
    alone: BoolArray = np.zeros(count, dtype=np.bool_)
    units, unit_limits = np.zeros((0, count), np.int64), np.zeros(0, np.int64)
    if limits is not None and algorithm != "fixed_count":
        units, unit_limits = costing.whole_units(table, limits)
        alone = np.any(units > unit_limits[:, None], axis=0)
        if oversized == "refuse":
            costing.refuse_oversized(table, limits, alone, names)
    inside = np.flatnonzero(~alone)
    problem = Problem(
        units[:, inside], unit_limits, balance_units[inside], num_ranks, int(alone.sum()), stream
    )
    batch_of = np.empty(count, dtype=np.int64)
    num_batches = 0
    if len(inside):
        batch_of[inside], num_batches = _run(problem, algorithm, batch_size, order)
    batch_of[alone] = num_batches + np.arange(problem.reserved)
    num_batches += problem.reserved
    num_batches = -(-num_batches // num_ranks) * num_ranks
    empty = np.flatnonzero(np.bincount(batch_of, minlength=num_batches) == 0)
    cheapest = np.resize(sorting_order(balance_units)[: len(empty)], len(empty))
    samples = np.concatenate([np.arange(count), cheapest])
    batch_of = np.concatenate([batch_of, empty])
    place = _places(batch_of, balance_units[samples], num_ranks, algorithm, stream)[batch_of]
    in_order = sorting_order(place)
    repeated = in_order >= count if len(empty) else None
    total = int(place.max()) + 1
    return Plan(
        indices=samples[in_order],
        offsets=pointer(np.bincount(place, minlength=total)),
        num_ranks=num_ranks,
        repeated=repeated,
        costs=np.bincount(place, weights=balance_cost[samples])
        .astype(np.float64)
        .reshape(-1, num_ranks),
        used=table.sum(axis=0, dtype=np.float64),
        capacity=limits,
    )


def _places(
    batch_of: IntArray,
    balance: IntArray,
    num_ranks: int,
    algorithm: Algorithm,
    stream: RandomStream,
) -> IntArray:
    """Return the place (step * num_ranks + rank) of each batch.

    The ranks of a step wait for each other, so `balanced` puts batches of nearly equal cost into
    one step, then shuffles the steps and the ranks within each.
    """
    cost = batch_sums(balance, batch_of, 0)
    place = np.arange(len(cost), dtype=np.int64)
    steps = len(cost) // num_ranks
    if algorithm == "algorithm1":
        return stream.permutation(steps)[place // num_ranks] * num_ranks + place % num_ranks
    if algorithm != "balanced":
        return place
    by_cost = stream.permutation(len(cost))
    by_cost = by_cost[sorting_order(int(cost.max()) - cost[by_cost])]
    step_of = np.empty_like(place)
    step_of[by_cost] = stream.permutation(steps)[place // num_ranks]
    shuffled = stream.permutation(len(cost))
    in_order = shuffled[sorting_order(step_of[shuffled])]
    place[in_order] = np.arange(len(cost))
    return place


def _run(
    problem: Problem, algorithm: Algorithm, batch_size: int | None, order: Order
) -> tuple[IntArray, int]:
    if algorithm == "balanced":
        return balanced(problem)
    if algorithm == "algorithm1":
        return algorithm1(problem, order)
    if algorithm == "streaming":
        return streaming(problem)
    return fixed_count(problem, batch_size or 1)


def _balance(table: costing.CostTable, balance: int | Numbers) -> tuple[IntArray, FloatArray]:
    """Return the quantity to balance in whole units and as given, [n]."""
    if isinstance(balance, int | np.integer):
        if not -table.shape[1] <= balance < table.shape[1]:
            raise DataError(
                f"balance is column {balance}, but the costs have {table.shape[1]} column(s)"
            )
        values = table[:, balance]
    else:
        values = np.asarray(balance)
    return costing.whole_balance(values, len(table)), values.astype(np.float64)


def _check_choice(name: str, choice: str, known: Any) -> None:
    if choice not in typing.get_args(known):
        raise DataError(f"{name} is '{choice}', expected {' or '.join(typing.get_args(known))}")


def _check_arguments(
    num_ranks: int,
    seed: int,
    epoch: int,
    algorithm: str,
    capacity: Numbers | None,
    batch_size: int | None,
) -> None:
    if num_ranks < 1:
        raise DataError(f"the number of ranks must be at least 1, got {num_ranks}")
    if seed < 0 or epoch < 0:
        raise DataError(f"seed and epoch must not be negative, got {seed} and {epoch}")
    if algorithm == "fixed_count":
        if batch_size is None or batch_size < 1:
            raise DataError(f"fixed_count needs batch_size, at least 1, got {batch_size}")
    elif batch_size is not None:
        raise DataError(f"batch_size belongs to fixed_count; '{algorithm}' fills the capacity")
    elif capacity is None:
        raise DataError(f"'{algorithm}' needs a capacity")
