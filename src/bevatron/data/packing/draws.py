"""Samples drawn with replacement, by weights, from a mixture of data sets.

Draw number k of a run is a function of (seed, k) alone: which source, which sample of it, and the
seed of what is random within the sample. So a position is one number, whatever ranks and workers
there are, and a run that is resumed on others draws exactly the rest. Randomness comes from Philox
(Salmon et al., SC 2011), whose counter is k.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from bevatron.data.dataset import Dataset, seeded_sample
from bevatron.data.packing.plan import Plan
from bevatron.data.packing.randomness import DRAWS, counted_words
from bevatron.errors import DataError
from bevatron.typing import Arrays, FloatArray, IntArray, WordArray


@dataclass(frozen=True)
class Source:
    """A data set of a mixture.

    Attributes
    ----------
    name : in messages
    dataset
        ``dataset.sample(index, seed)`` gives a sample if it has that method, else
        ``dataset[index]``.
    weights : [n]
        How often each sample is drawn, relative to the others of this data set; None = all alike.
    share : how often this data set is drawn from, relative to the others
    """

    name: str
    dataset: Dataset
    weights: FloatArray | None = None
    share: float = 1.0


@dataclass(frozen=True)
class Draw:
    """One draw: the number of the source, the sample in it, and the sample's 63-bit seed."""

    source: int
    index: int
    seed: int


SUBSTITUTES = 2**45
"""First number of the draws that replace others."""


class Draws:
    """Samples drawn from a mixture, by the number of the draw; also a data set for the loader.

    Raises DataError if there is nothing to draw from, or weights or shares are not numbers of at
    least 0.

    Parameters
    ----------
    sources : the data sets
    seed : another seed gives other draws; that of the run

    Examples
    --------
    >>> class Letters(list):
    ...     def describe(self, i): return f"letter {i}"
    >>> abc, xyz = (Letters({"letter": np.array(c)} for c in word) for word in ("abc", "xyz"))
    >>> draws = Draws([Source("a", abc), Source("x", xyz, share=3)], seed=0)
    >>> "".join(str(draws[k]["letter"]) for k in range(12))
    'zxzyayyzyzzc'
    >>> draws.draw(1) == Draws(draws.sources, seed=0).draw(1)
    True
    """

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        if not sources:
            raise DataError("a mixture needs at least one data set")
        self.sources, self.seed = tuple(sources), seed
        self.starts: IntArray = np.cumsum([0, *(len(s.dataset) for s in sources)], dtype=np.int64)
        shares = np.array([source.share for source in sources], dtype=np.float64)
        names = ", ".join(source.name for source in sources)
        self._shares = _cumulative(shares, f"the shares of {names}")
        self._weights = [self._cumulative_weights(source) for source in self.sources]

    @staticmethod
    def _cumulative_weights(source: Source) -> FloatArray | None:
        """Add up the weights of a source; None where all are alike."""
        count = len(source.dataset)
        if not count and source.share > 0:
            raise DataError(f"{source.name}: holds no samples to draw")
        if source.weights is None or not count:
            return None
        weights = np.asarray(source.weights, dtype=np.float64)
        if weights.shape != (count,):
            raise DataError(f"{source.name}: {len(weights)} weights for {count} samples")
        return _cumulative(weights, f"{source.name}: the weights")

    def __len__(self) -> int:
        """Return the number of samples that can be drawn; numbers of draws go on without end."""
        return int(self.starts[-1])

    def __getitem__(self, number: SupportsIndex) -> Arrays:
        draw = self.draw(number)
        return seeded_sample(self.sources[draw.source].dataset, draw.index, draw.seed)

    def draw(self, number: SupportsIndex) -> Draw:
        """Return one draw."""
        sources, indices, seeds = self.take(int(number), 1)
        return Draw(int(sources[0]), int(indices[0]), int(seeds[0]))

    def take(self, first: int, count: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return source, index and seed of the draws from number ``first`` on, [count] each."""
        words = counted_words(self.seed, DRAWS, first, count)
        sources = _choose(self._shares, _unit(words[:, 0]))
        indices = np.zeros(count, dtype=np.int64)
        places = _unit(words[:, 1])
        for number, (source, weights) in enumerate(zip(self.sources, self._weights, strict=True)):
            mine = sources == number
            if weights is None:
                last = max(len(source.dataset) - 1, 0)
                indices[mine] = np.minimum((places[mine] * (last + 1)).astype(np.int64), last)
            else:
                indices[mine] = _choose(weights, places[mine])
        return sources, indices, (words[:, 2] >> np.uint64(1)).astype(np.int64)

    def rows(self, first: int, count: int) -> IntArray:
        """Return which sample each draw is, counted through all sources in order, [count]."""
        sources, indices, _ = self.take(first, count)
        return self.starts[sources] + indices

    def describe(self, number: SupportsIndex) -> str:
        """Return the origin of a draw, and the seed that reproduces it."""
        draw = self.draw(number)
        name = self.sources[draw.source].dataset.describe(draw.index)
        return f"{name} (seed {draw.seed})"

    def substitute(self, number: int, attempt: int) -> int:
        """Return the number of the draw that replaces an unreadable one."""
        return number + attempt * SUBSTITUTES

    def lengths(self, field: str) -> IntArray:
        """Return the number of rows of a ragged field in every sample of all sources, in order."""
        return np.concatenate([source.dataset.lengths(field) for source in self.sources])

    def summary(self) -> dict[str, Any]:
        """Return how often each source is drawn, as plain values for a checkpoint."""
        return {
            source.name: {
                "share": float(source.share),
                "samples": len(source.dataset),
                "weights": None if weights is None else _fingerprint(weights),
            }
            for source, weights in zip(self.sources, self._weights, strict=True)
        }


def deal(costs: FloatArray, per_step: int, num_ranks: int, batch_size: int) -> Plan:
    """Deal drawn samples, in their order, to steps, and those of a step to ranks and batches.

    Step s takes samples ``s * per_step`` to ``(s + 1) * per_step``. By
    descending cost they are dealt to the ranks, in snake order, so that all have about as much to
    do, and cut into batches of ``batch_size``. If they do not fill all batches, the cheapest are
    repeated with weight zero.

    Parameters
    ----------
    costs : [n]
        Cost of each sample.
    per_step : samples of one optimiser step over all ranks
    num_ranks : number of processes that share a step
    batch_size : samples in a batch

    Examples
    --------
    >>> plan = deal(np.array([1.0, 4, 2, 3, 1, 1, 1, 1]), 4, num_ranks=2, batch_size=1)
    >>> [[batch.tolist() for batch in rank] for rank in plan]
    [[[1], [0], [4], [7]], [[3], [2], [5], [6]]]
    """
    each = batches_per_step(per_step, num_ranks, batch_size)
    slots, count = each * num_ranks * batch_size, len(costs)
    indices, repeated = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.bool_)]
    for first in range(0, count, per_step):
        chosen = np.arange(first, min(first + per_step, count))
        chosen = chosen[np.argsort(-costs[chosen], kind="stable")]
        again = np.resize(chosen[::-1], slots - len(chosen))
        grid: IntArray = np.concatenate([chosen, again]).reshape(-1, num_ranks)
        is_repeat = (np.arange(slots) >= len(chosen)).reshape(-1, num_ranks)
        grid[1::2], is_repeat[1::2] = grid[1::2, ::-1].copy(), is_repeat[1::2, ::-1].copy()
        cut = (each, batch_size, num_ranks)
        grid = grid.reshape(cut).swapaxes(1, 2)
        order = np.argsort(grid, axis=2, kind="stable")
        indices.append(np.take_along_axis(grid, order, 2).ravel())
        flags = is_repeat.reshape(cut).swapaxes(1, 2)
        repeated.append(np.take_along_axis(flags, order, 2).ravel())
    samples, repeats = np.concatenate(indices), np.concatenate(repeated)
    return Plan(
        indices=samples,
        offsets=np.arange(0, len(samples) + 1, batch_size, dtype=np.int64),
        num_ranks=num_ranks,
        repeated=repeats if repeats.any() else None,
        costs=costs[samples].reshape(-1, num_ranks, batch_size).sum(axis=2),
        used=np.array([costs.sum()]),
        capacity=None,
    )


def batches_per_step(per_step: int, num_ranks: int, batch_size: int) -> int:
    """Return how many batches each rank has in a step of ``per_step`` samples."""
    return -(-per_step // (num_ranks * batch_size))


def _cumulative(weights: FloatArray, what: str) -> FloatArray:
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise DataError(f"{what} must be numbers of at least 0, not all of them 0")
    return np.cumsum(weights)


def _fingerprint(weights: FloatArray) -> str:
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]


def _unit(words: WordArray) -> FloatArray:
    """Turn random words into numbers in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _choose(cumulative: FloatArray, places: FloatArray) -> IntArray:
    """Return the entry of each place in [0, 1); one of weight 0 is never chosen."""
    total = cumulative[-1]
    found = np.searchsorted(cumulative, places * total, side="right")
    # A place just below 1 may round up to the total.
    chosen: IntArray = np.minimum(found, np.searchsorted(cumulative, total, side="left"))
    return chosen
